"""Command lines at random over the whole configuration: each is refused in a sentence before ranks start, or runs.

Each line is planned as ``run.py`` plans it, in a process of its own that stops where the first rank would start; some that
can be planned are then run in earnest. A line that ends otherwise (a traceback, a hang, silence) is printed with its number::

    python -m benchmarks.fuzz --count 1000
    python -m benchmarks.fuzz --seed 0 --only 17          the one line again, with all that it says
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"
MOST_S, MOST_S_OF_RUN = 30.0, 120.0
PLANNED = 77
"""Exit status of a process that came to where ranks start."""
MOST_LINES = 12
"""Of what is said where a line is refused; several settings may be wrong, in several jobs."""

HYDRA = ("hydra.sweep.dir", "hydra.sweep.subdir", "hydra.verbose", "hydra.job.chdir", "hydra.sweeper.max_batch_size",
         "hydra.job.name", "hydra.job.env_set.X", "hydra.job_logging.root.level", "hydra.launcher.nprocs",
         "hydra.launcher.method", "hydra.launcher.threads", "hydra.mode")  # fmt: skip
NUMBERS = ("0", "1", "2", "3", "-1", "-2", "0.5", "1e-300", "1e300", "nan", "inf", "-inf", "9999999999999999999999",
           "18446744073709551616", "1000000", "007", "1_000", "0x10", "1.0", "2.7")  # fmt: skip
WORDS = ("null", "true", "False", "abc", "''", '"a b"', "[]", "[1,2]", "{}", "{a: 1}", "${nprocs}", "${missing}", "../x",
         "${oc.env:HOME}", "${oc.env:NOT_THERE}", "${oc.env:", "???", "\\ud800", "é", "a=b", "'${now:%S}'", "os.getcwd",
         "json", "/proc/x")  # fmt: skip
SWEEPS = ("1,2", "a,b", "choice(1,2)", "range(1,3)", "range(3,1)", "interval(0,1)", "glob(*)", "shuffle(1,2)", "tag(t,1)",
          "cast(int,3)", "1,1", "1,null", ",", "choice()", "int(2)")  # fmt: skip


@dataclass(frozen=True)
class Ending:
    """How a line ended.

    Attributes:
        kind: ``planned``, ``refused``, ``ran``, or what is wrong: ``traceback``, ``hang``, ``silence``, ``long``, ``signal``.
    """

    kind: str
    said: str

    @property
    def is_right(self) -> bool:
        return self.kind in ("planned", "refused", "ran")


# --- lines -------------------------------------------------------------------------------------------------------------------


def keys() -> list[str]:
    """Return all settings that the default configuration has, dotted, those of all recipes, and a few of Hydra's."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        found = list(_leaves("", compose("config")))
        for recipe in sorted(path.stem for path in (CONF / "recipe").glob("*.yaml")):
            found += _leaves("recipe.", compose("config", [f"recipe={recipe}"]).recipe)
    return sorted({*found, *HYDRA})


def _leaves(prefix: str, config: DictConfig) -> Iterator[str]:
    for key in map(str, config):
        node = None if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key) else config[key]
        yield f"{prefix}{key}"
        if isinstance(node, DictConfig):
            yield from _leaves(f"{prefix}{key}.", node)


def lines(count: int, seed: int) -> Iterator[list[str]]:
    """Yield command lines, the same for the same seed."""
    known, groups = keys(), {path.name: sorted(p.stem for p in path.glob("*.yaml")) for path in CONF.iterdir() if path.is_dir()}
    groups = {name: options for name, options in groups.items() if options}
    for number in range(count):
        yield _line(random.Random(f"{seed} {number}"), known, groups)


def _line(rng: random.Random, known: Sequence[str], groups: dict[str, list[str]]) -> list[str]:
    overrides = [_override(rng, known, groups) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 5)))]
    # The last one holds: what is not under test is small.
    return ["backend=gloo", "nprocs=2", "steps=3", "recipe.width=4", *overrides]


def _override(rng: random.Random, known: Sequence[str], groups: dict[str, list[str]]) -> str:
    kind = rng.random()
    if kind < 0.15:
        group = rng.choice(sorted(groups))
        return f"{group}={rng.choice([*groups[group], rng.choice(WORDS), 'null'])}"
    key = rng.choice(known)
    if kind < 0.2:
        return f"~{key}"
    prefix = rng.choice(("+", "++")) if kind < 0.27 else ""
    key = f"{key}{rng.choice(('x', '.x', '.0'))}" if kind > 0.95 else key
    return f"{prefix}{key}={rng.choice((*NUMBERS, *WORDS, *SWEEPS))}"


# --- one line ----------------------------------------------------------------------------------------------------------------


def planned(overrides: Sequence[str]) -> Ending:
    """Return how a line ends that is only planned, in a process forked from this one, which has Hydra and harness imported."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        inside = Path(folder, "a", "b", "c")
        inside.mkdir(parents=True)
        with Path(folder, "said").open("w+b") as said:
            process = os.fork()
            if process == 0:
                _plan(overrides, inside, said.fileno())
            status = _waited(process)
            said.seek(0)
            text = said.read().decode(errors="replace")
    return _judged(status, text)


def _plan(overrides: Sequence[str], folder: Path, said: int) -> None:
    """Be ``run.py`` up to the first rank; it does not return."""
    try:
        for number in (1, 2):
            os.dup2(said, number)
        os.chdir(folder)
        sys.argv = [str(ROOT / "run.py"), *overrides]
        sys.path.insert(0, str(ROOT))
        from harness.entrypoints import hydra_jobs

        def stop(*_: Any) -> None:
            os._exit(PLANNED)

        hydra_jobs._run_all = stop  # type: ignore[assignment]
        import run

        run.main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _waited(process: int) -> int | None:
    """Return the exit status of a child, negative for a signal; None where it had to be killed."""
    end = time.monotonic() + MOST_S
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(process, 9)
    os.waitpid(process, 0)
    return None


def _judged(status: int | None, text: str, good: int = PLANNED) -> Ending:
    text = text.strip()
    checks = [
        (status is None, "hang"),
        ("Traceback (most recent call last)" in text, "traceback"),
        (status is not None and status < 0, "signal"),
        (status == good, "planned" if good == PLANNED else "ran"),
        (not text, "silence"),
        (status == 0, "neither refused nor planned"),
        (len(text.splitlines()) > MOST_LINES, "long"),
    ]
    return Ending(next((kind for is_so, kind in checks if is_so), "refused"), text)


def really(overrides: Sequence[str]) -> Ending:
    """Return how a line ends that is run; one that is red or fails says so, without a traceback of ours."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        inside = Path(folder, "a", "b", "c")
        inside.mkdir(parents=True)
        command = [sys.executable, str(ROOT / "run.py"), *overrides]
        try:
            done = subprocess.run(
                command, cwd=inside, capture_output=True, timeout=MOST_S_OF_RUN, check=False, text=True, errors="replace"
            )
        except subprocess.TimeoutExpired:
            return Ending("hang", "")
    judged = _judged(done.returncode, done.stdout + done.stderr, good=0)
    # Of a run there is more to say.
    return Ending("refused", judged.said) if judged.kind == "long" else judged


def may_run(overrides: Sequence[str]) -> bool:
    """Return whether a line can be run without harm to this machine: nothing in it is large."""
    big = any(len(word) > 4 and word.isdigit() for o in overrides for word in o.replace("=", ",").split(","))
    return not big and not any(
        "1e300" in o or "audit" in o or "experiment" in o or "fault=" in o or "0x10" in o for o in overrides
    )


# --- the command -------------------------------------------------------------------------------------------------------------


def main() -> int:
    """Plan all lines, run some, and print those that end otherwise; 1 if there are any."""
    asked = _parser().parse_args()
    import harness.train
    import run

    assert harness.train and run
    wanted = [(n, line) for n, line in enumerate(lines(asked.count, asked.seed)) if asked.only in (None, n)]
    endings = [_told(number, line, planned, asked.only is not None) for number, line in wanted]
    good = [pair for pair, ending in zip(wanted, endings, strict=True) if ending.kind == "planned" and may_run(pair[1])]
    sample = random.Random(asked.seed).sample(good, min(asked.run, len(good)))
    runs = [_told(number, line, really, asked.only is not None) for number, line in sample]
    for title, some in (("planned", endings), ("run", runs)):
        counts = {kind: sum(e.kind == kind for e in some) for kind in sorted({e.kind for e in some})}
        print(f"{len(some)} {title}: {', '.join(f'{count} {kind}' for kind, count in counts.items())}")
    return int(not all(ending.is_right for ending in (*endings, *runs)))


def _told(number: int, line: Sequence[str], ask: Callable[[Sequence[str]], Ending], in_full: bool) -> Ending:
    ending = ask(line)
    if in_full:
        print(f"{ending.kind}: {shlex.join(line)}\n{ending.said}")
    elif not ending.is_right:
        last = ending.said.splitlines()[-1][:300] if ending.said else ""
        print(f"--only {number}: {ending.kind}: {shlex.join(line[4:])}: {last}", flush=True)
    return ending


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--count", type=int, default=1000, help="lines")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--run", type=int, default=20, help="lines that are run too, of those that can be planned")
    made.add_argument("--only", type=int, help="the number of one line")
    return made


if __name__ == "__main__":
    sys.exit(main())
