"""Deaths at random moments under load: each ends in a report that names who died, and leaves nothing.

A job trains without end; its parent, its warm server, a rank or a rank's data worker gets a signal, or a rank leaves by itself.
Then the command must have ended with a failure that names that rank and signal, without a traceback of ours, and no process,
temporary folder or shared memory of it may be left::

    python -m benchmarks.deaths --count 300
    python -m benchmarks.deaths --seed 0 --only 17 --verbose
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils.data import Dataset, get_worker_info

ROOT = Path(__file__).parents[1]
RANKS = 2
MOST_S = 120.0
"""From the death to the end of the command; more is a hang."""
GONE_S = 10.0
"""From the end of the command until nothing is left, on a machine under load."""
LAUNCHERS = ("launcher=spawn", "launcher=spawn launcher.start_method=spawn", "launcher=spawn launcher.start_method=fork",
             "launcher=launch", "launcher=torchrun")  # fmt: skip
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSEGV, signal.SIGABRT, signal.SIGQUIT)
EXITS = ("os._exit(7)", "sys.exit(7)", "os._exit(0)", "sys.exit(0)", "raise ValueError('mine')")


# --- what dies ---------------------------------------------------------------------------------------------------------------


class Numbered(Dataset[Any]):
    """Samples that come from workers, which say who they are."""

    def __len__(self) -> int:
        # So many that workers, which are those of an epoch, do not end by themselves.
        return 100_000

    def __getitem__(self, number: int) -> Tensor:
        if get_worker_info() is not None:
            _say("worker")
        return torch.full((4,), float(number % 7))


class Endless:
    """Trains until somebody dies; with ``DEATHS_EXIT`` a rank leaves by itself after a few steps."""

    def __init__(self) -> None:
        self._calls = 0

    def dataset(self) -> Dataset[Any]:
        return Numbered()

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        return optim.SGD(model.parameters(), lr=1e-6)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        _say("rank")
        self._calls += 1
        rank, _, statement = os.environ.get("DEATHS_EXIT", "").partition(" ")
        if rank == os.environ["RANK"] and self._calls == 20:
            exec(statement)
        time.sleep(0.01)
        return model(batch).square().mean()


def _say(what: str) -> None:
    path = Path(os.environ["DEATHS_DIR"], f"{what}-{os.environ['RANK']}")
    if not path.exists():
        path.write_text(str(os.getpid()))


# --- one death ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Death:
    """Who dies, how, and when.

    Attributes:
        victim: ``parent``, ``server``, ``rank`` or ``worker``.
        how: A signal, or what a rank does itself.
        after_s: Since the victim is there; of a parent, since its start.
    """

    launcher: str
    victim: str
    rank: int
    how: signal.Signals | str
    after_s: float

    def __str__(self) -> str:
        who = self.victim if self.victim in ("parent", "server") else f"{self.victim} of rank {self.rank}"
        how = self.how.name if isinstance(self.how, signal.Signals) else self.how
        return f"{self.launcher}: {who}: {how} after {self.after_s:.2f} s"


def drawn(rng: random.Random) -> Death:
    """Return a death at random."""
    launcher = rng.choice(LAUNCHERS)
    victim = rng.choice(
        ("parent", "server", "rank", "rank", "worker") if launcher == LAUNCHERS[0] else ("parent", "rank", "worker")
    )
    how: signal.Signals | str = rng.choice(SIGNALS)
    if victim == "rank" and rng.random() < 0.4:
        how = rng.choice(EXITS)
    if victim == "parent" and how in (signal.SIGSEGV, signal.SIGABRT):
        how = signal.SIGKILL
    return Death(launcher, victim, rng.randrange(RANKS), how, rng.uniform(0, 8 if victim == "parent" else 2))


def wrong(death: Death, verbose: bool = False) -> list[str]:
    """Let it happen; return what was not as it should be."""
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="deaths-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "tmp").mkdir()
        shared = set(os.listdir("/dev/shm"))
        with (Path(folder) / "said").open("wb") as said:
            parent = subprocess.Popen(_command(death, folder), env=_environment(death, folder, mark), stdout=said, stderr=said,
                                      stdin=subprocess.DEVNULL, cwd=folder, start_new_session=True)  # fmt: skip
        try:
            found = _happen(death, Path(folder), parent)
            seen = _living(mark)
            found = found or _ended(parent)
        finally:
            left = _left(mark, Path(folder), shared)
            for pid in _living(mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            parent.wait()
        text = (Path(folder) / "said").read_text(errors="replace")
    if verbose:
        print(f"{death}: {len(seen)} processes, exit status {parent.returncode}\n{text}")
    last = text.strip().splitlines()[-1][:300] if text.strip() else "nothing"
    problems = [*found, *left, *(() if found else _unreported(death, parent.returncode, text))]
    return [f"{problem} [exit status {parent.returncode}, last line: {last}]" for problem in problems]


def _command(death: Death, folder: str) -> list[str]:
    settings = ["backend=gloo", f"nprocs={RANKS}", "num_workers=1", "steps=1000000", "global_batch_size=8", "compare=off"]
    where = [f"hydra.sweep.dir={folder}/out", f"--config-dir={folder}"]
    (Path(folder) / "recipe").mkdir()
    (Path(folder) / "recipe" / "endless.yaml").write_text("_target_: benchmarks.deaths.Endless\n")
    return [sys.executable, str(ROOT / "run.py"), "recipe=endless", *death.launcher.split(), *settings, *where]


def _environment(death: Death, folder: str, mark: str) -> dict[str, str]:
    leaves = {"DEATHS_EXIT": f"{death.rank} {death.how}"} if isinstance(death.how, str) else {}
    own = {"DEATHS_MARK": mark, "DEATHS_DIR": folder, "TMPDIR": f"{folder}/tmp", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own, **leaves}


def _happen(death: Death, folder: Path, parent: subprocess.Popen[bytes]) -> list[str]:
    """Let the victim die at its moment; return why it could not."""
    if isinstance(death.how, str):
        return []
    victim = parent.pid if death.victim == "parent" else _victim(death, folder, parent)
    if victim is None:
        return [f"no {death.victim} was there within {MOST_S:g} s"]
    time.sleep(death.after_s)
    try:
        os.kill(victim, death.how)
    except ProcessLookupError:
        return ["the victim had ended before"]
    return []


def _victim(death: Death, folder: Path, parent: subprocess.Popen[bytes]) -> int | None:
    def find() -> int | None:
        path = folder / f"{'worker' if death.victim == 'worker' else 'rank'}-{death.rank}"
        if not path.exists() or not path.read_text():
            return None
        if death.victim != "server":
            return int(path.read_text())
        return next((pid for pid in _children(parent.pid) if b"harness.launchers.server" in _read(pid, "cmdline")), None)

    return _wait(find, MOST_S) if parent.poll() is None else None


def _ended(parent: subprocess.Popen[bytes]) -> list[str]:
    try:
        parent.wait(MOST_S)
    except subprocess.TimeoutExpired:
        return [f"HANG: the command runs {MOST_S:g} s later"]
    return []


def _unreported(death: Death, status: int, text: str) -> Iterator[str]:
    """Yield what is wrong with the report."""
    if status == 0:
        yield "exit status 0"
    if "Traceback (most recent call last)" in text and "mine" not in text and death.victim not in ("rank", "worker"):
        yield "a traceback"
    if death.victim == "parent":
        if isinstance(death.how, signal.Signals) and status not in (-death.how, 128 + death.how):
            yield f"exit status {status} after {death.how.name}"
        return
    said = " ".join(text.split())
    if death.victim == "server" and not re.search(r"forked from|server", said):
        yield "the server's death is not told"
    if death.victim in ("rank", "worker"):
        first = re.search(r"rank (\d+) of \d+", said)
        if first is None or int(first[1]) != death.rank:
            yield f"{first[0] if first else 'nobody'} is named, where rank {death.rank} died"
        elif death.victim == "rank" and isinstance(death.how, signal.Signals) and death.how.name not in said:
            yield "the signal is not named"


# --- what is left ------------------------------------------------------------------------------------------------------------


def _left(mark: str, folder: Path, shared: set[str]) -> list[str]:
    found = []
    if not _wait(lambda: not _living(mark), GONE_S):
        found.append(
            "LEFT processes: " + ", ".join(_read(pid, "cmdline").replace(b"\0", b" ").decode()[:80] for pid in _living(mark))
        )
    if not _wait(lambda: not _files(folder), GONE_S / 2):
        found.append(f"LEFT files: {', '.join(_files(folder))}")
    mine = [name for name in set(os.listdir("/dev/shm")) - shared if _is_orphan(name)]
    return [*found, *([f"LEFT shared memory: {', '.join(mine)}"] if mine else [])]


def _files(folder: Path) -> list[str]:
    # torch keeps a cache for later programs.
    return [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor_")]


def _is_orphan(name: str) -> bool:
    owner = re.match(r"torch_(\d+)_", name)
    return owner is not None and not Path(f"/proc/{owner[1]}").exists()


def _living(mark: str) -> list[int]:
    sought = f"DEATHS_MARK={mark}".encode()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if sought in _read(pid, "environ") and b") Z" not in _read(pid, "stat")]


def _children(parent: int) -> list[int]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _read(pid, "stat").rpartition(b")")[2].split()[1:2] == [str(parent).encode()]]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _wait(ask: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not (found := ask()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep so many cores busy meanwhile."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    """Let all deaths happen, and print those that did not end as they should; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one death")
    parser.add_argument("--load", type=int, default=2, help="processes that keep cores busy")
    parser.add_argument("--verbose", action="store_true", help="all that commands say")
    asked = parser.parse_args()
    bad = taken = 0
    with load(asked.load):
        for number in range(asked.count) if asked.only is None else (asked.only,):
            death = drawn(random.Random(f"{asked.seed} {number}"))
            problems = wrong(death, asked.verbose)
            taken, bad = taken + 1, bad + bool(problems)
            if asked.verbose or problems:
                print(f"--only {number}: {death}", *problems, sep="\n    ", flush=True)
    print(f"{taken} deaths: {taken - bad} ended as they should")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
