"""The targets, each measured side by side in one run: ``make bench``, or ``python benchmarks/bench.py [ROW ...] [--pairs N]``.

A row is a candidate and a baseline, launched in ABBA order after a discarded pilot of each. It prints their median times, the
ratio candidate / baseline with its 95 % interval, and whether the target lies above that interval, in it or below it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.growth import long_sweep, memory_of_ranks, starts
from harness.compare.performance import stats
from harness.run.folder import RunDir
from harness.run.machine import machine_facts

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
WARM_UP = 3
"""Steps that do not count."""
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone"]


@dataclass(frozen=True)
class Row:
    """One target.

    Attributes:
        target: The largest ratio of candidate to baseline, in seconds by seconds.
        what: The row's text.
    """

    name: str
    what: str
    target: float
    candidate: Callable[[], float]
    baseline: Callable[[], float]


@functools.cache
def folders() -> tempfile.TemporaryDirectory[str]:
    """Return the folder of all jobs; not made on import, because ranks import this script."""
    return tempfile.TemporaryDirectory(prefix="bench-")


def run(command: list[str], environment: Mapping[str, str], tries: int = 3) -> tuple[float, str]:
    """Run a command to its end; return CLOCK_MONOTONIC at its start, and what it printed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
        )
        if done.returncode and tries > 1:
            print(f"failed with {done.returncode}, and is run again: {' '.join(command)}", file=sys.stderr)
            return run(command, environment, tries - 1)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
        return begin, done.stdout


def seconds(command: list[str], **environment: str) -> float:
    """Return how long a command takes, to its end."""
    begin, _ = run(command, environment)
    return time.monotonic() - begin


def harness_job(*overrides: str) -> tuple[float, list[RunDir]]:
    """Run ``run.py``; return when the command was given, and the folders of its jobs."""
    folder = tempfile.mkdtemp(dir=folders().name)
    begin, _ = run([PYTHON, str(ROOT / "run.py"), f"hydra.sweep.dir={folder}", "report=none", "backend=gloo", *overrides], {})
    return begin, [RunDir(path) for path in sorted(Path(folder).iterdir()) if path.is_dir()]


def first_step_of_harness(*overrides: str) -> float:
    """Return the seconds from the command to the end of the first training step on all ranks."""
    begin, runs = harness_job(*overrides)
    result = json.loads(runs[0].result.read_text())
    return max(rank["steps"][0]["t"] for rank in result["ranks"]) - begin


def marks_of_torchrun(nprocs: int, steps: int, **environment: str) -> tuple[float, dict[str, float]]:
    """Run the hand-written script under torchrun; return when the command was given, and rank 0's marks."""
    command = [*TORCHRUN, f"--nproc-per-node={nprocs}", str(ROOT / "benchmarks" / "mnist_ddp.py"), str(steps)]
    begin, printed = run(command, environment)
    return begin, _marks(printed)


def _marks(printed: str) -> dict[str, float]:
    found = re.search(r"MARKS (\{.*\})", printed)
    assert found is not None, printed
    return dict(json.loads(found.group(1)))


def first_step_of_torchrun(nprocs: int) -> float:
    """Return the seconds from the command to the end of the first step."""
    begin, marks = marks_of_torchrun(nprocs, 1)
    return marks["first_step"] - begin


def step_of_harness(nprocs: int, *overrides: str, steps: int = 200) -> float:
    """Return the median seconds from the end of a step to the end of the next, rank 0's."""
    _, runs = harness_job(f"nprocs={nprocs}", f"steps={steps}", "compare=off", *overrides)
    ends = [step["t"] for step in json.loads(runs[0].result.read_text())["ranks"][0]["steps"][WARM_UP:]]
    return stats.median([after - before for before, after in itertools.pairwise(ends)])


def step_of_torchrun(nprocs: int, steps: int = 200, **environment: str) -> float:
    """Return the same of the hand-written script."""
    return marks_of_torchrun(nprocs, steps, **environment)[1]["step_s"]


def step_of_mp_spawn(nprocs: int, steps: int = 200) -> float:
    """Return the same of the script under mp.spawn, which leaves each rank all cores."""
    _, printed = run([PYTHON, str(ROOT / "benchmarks" / "mnist_ddp.py"), str(steps), str(nprocs)], {})
    return float(_marks(printed)["step_s"])


def refusal() -> float:
    """Return the seconds until a wrong override is refused."""
    begin = time.monotonic()
    done = subprocess.run(
        [PYTHON, str(ROOT / "run.py"), "nprocs=two"], capture_output=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode != 1:
        raise RuntimeError(f"nprocs=two ended with {done.returncode}")
    return time.monotonic() - begin


def warm_start(nprocs: int) -> float:
    """Return the seconds that ``harness.spawn`` takes from call to end, the server being warm."""
    import harness
    from benchmarks.one_step import one_step_of_harness

    begin = time.monotonic()
    harness.spawn(one_step_of_harness, nprocs=nprocs, backend="gloo")
    return time.monotonic() - begin


def torchrun_start(nprocs: int) -> float:
    """Return the seconds that torchrun takes with the same work."""
    return seconds([*TORCHRUN, f"--nproc-per-node={nprocs}", str(ROOT / "benchmarks" / "one_step.py")], OMP_NUM_THREADS="1")


def verification() -> float:
    """Return the seconds that ``compare=quick`` took within a default job of 100 steps."""
    _, runs = harness_job("nprocs=2", "steps=100", "compare=quick")
    ranks = json.loads(runs[0].result.read_text())["ranks"]
    return max(rank["marks"]["verified"] - rank["marks"]["data and model"] for rank in ranks)


def job_without_verification() -> float:
    """Return the seconds from the command to the last of 100 steps, nothing being compared."""
    begin, runs = harness_job("nprocs=2", "steps=100", "compare=off")
    return max(rank["marks"]["last step"] for rank in json.loads(runs[0].result.read_text())["ranks"]) - begin


def sweep_of_harness() -> float:
    """Return the seconds of one sweep of 12 jobs of 4 ranks, one step each."""
    begin, _ = harness_job("nprocs=4", "steps=1", "compare=off", "seed=" + ",".join(map(str, range(12))))
    return time.monotonic() - begin


def sweep_of_torchrun() -> float:
    """Return the seconds of 12 torchrun calls of 4 ranks: 4 times those of 3 calls."""
    return 4 * sum(seconds([*TORCHRUN, "--nproc-per-node=4", str(ROOT / "benchmarks" / "mnist_ddp.py"), "1"]) for _ in range(3))


def one_second() -> float:
    """Return 1: the baseline of an absolute target."""
    return 1.0


PEERS = ROOT / ".venv-peers"
"""Environment that ``make bench-peers`` makes."""


def peer_start(python: Path | str, name: str) -> float:
    """Return the seconds that another tool takes for the work of :func:`warm_start`."""
    return seconds([str(python), str(ROOT / "benchmarks" / "peers.py"), name, "4"], OMP_NUM_THREADS="1")


def peers() -> list[Row]:
    """Return a row for each tool that is installed."""
    found = [("torch.multiprocessing.spawn", "torch", PYTHON)]
    found += [
        (name, name, str(PEERS / "bin" / "python"))
        for name in ("accelerate", "lightning_fabric", "paddle")
        if any(PEERS.glob(f"lib/python*/site-packages/{name}"))
    ]
    return [
        Row(f"vs_{name}", f"the same vs {title}", 0.1, lambda: warm_start(4), lambda n=name, p=python: peer_start(p, n))  # type: ignore[misc]
        for title, name, python in found
    ]


ROWS = [
    Row(
        "warm",
        "warm start of 4 ranks, DDP and one step, call to end, vs torchrun",
        1 / 40,
        lambda: warm_start(4),
        lambda: torchrun_start(4),
    ),
    *peers(),
    Row("many", "64 ranks on these cores, call to end, vs 5 s", 5.0, lambda: warm_start(64), one_second),
    Row(
        "command",
        "python run.py backend=gloo nprocs=4, command to first step, vs a plain script under torchrun",
        0.45,
        lambda: first_step_of_harness("nprocs=4", "steps=1", "compare=off"),
        lambda: first_step_of_torchrun(4),
    ),
    Row(
        "verified",
        "the same with compare=quick, which verifies before the first step",
        0.45,
        lambda: first_step_of_harness("nprocs=4", "steps=1"),
        lambda: first_step_of_torchrun(4),
    ),
    Row(
        "launch",
        "launcher=launch, 4 fresh interpreters, command to first step, vs torchrun",
        0.75,
        lambda: first_step_of_harness("launcher=launch", "nprocs=4", "steps=1", "compare=off"),
        lambda: first_step_of_torchrun(4),
    ),
    Row("sweep", "a sweep of 12 jobs of 4 ranks vs 12 torchrun calls (4 times 3)", 1 / 8, sweep_of_harness, sweep_of_torchrun),
    Row(
        "step",
        "steady step, 2 ranks, vs a hand-written DDP loop",
        1.01,
        lambda: step_of_harness(2, "threads=1"),
        lambda: step_of_torchrun(2, OMP_NUM_THREADS="1"),
    ),
    Row(
        "threads",
        "step with default threads, 1 rank, vs torchrun's default",
        1.0,
        lambda: step_of_harness(1),
        lambda: step_of_torchrun(1),
    ),
    Row(
        "shared",
        "step with default threads, 2 ranks, vs mp.spawn's default",
        1.0,
        lambda: step_of_harness(2),
        lambda: step_of_mp_spawn(2),
    ),
    Row("proof", "compare=quick vs start-up and 100 steps of MNIST", 0.5, verification, job_without_verification),
    Row("help", "python run.py --help vs 1 s", 1.0, lambda: seconds([PYTHON, str(ROOT / "run.py"), "--help"]), one_second),
    Row("refusal", "a wrong override, refused, vs 1 s", 1.0, refusal, one_second),
]


MEASURED_ONCE = {"long": long_sweep, "starts": starts, "memory": memory_of_ranks}
"""Name of a row -> what returns it: sizes and single sweeps, which no interval belongs to."""


def measure(row: Row, pairs: int) -> str:
    """Return the row's line of the table."""
    row.candidate(), row.baseline()
    logs, mine, theirs = [], [], []
    for pair in range(pairs):
        order = ("ab", "ba")[pair % 2]
        times = {arm: (row.candidate if arm == "a" else row.baseline)() for arm in order}
        mine.append(times["a"])
        theirs.append(times["b"])
        logs.append(stats.log_ratios([times["b"]], [times["a"]])[0])
    found = stats.paired_ratio(logs)
    low, high = (found.interval.low, found.interval.high) if found.interval else (float("nan"), float("nan"))
    verdict = "met" if high <= row.target else "missed" if low > row.target else "within the noise"
    cells = [f"{stats.median(mine):.3g} s", f"{stats.median(theirs):.3g} s", f"{found.ratio:.3f} ({low:.3f} to {high:.3f})"]
    return f"| {row.what} | {' | '.join(cells)} | {row.target:.3f} | {verdict} |"


def main() -> None:
    """Print the table, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*", choices=[[], *(row.name for row in ROWS), *MEASURED_ONCE], default=[])
    parser.add_argument("--pairs", type=int, default=3)
    arguments = parser.parse_args()
    facts = ", ".join(f"{name} {value}" for name, value in machine_facts().items())
    print(f"{facts}; load before {os.getloadavg()[0]:.1f}; {arguments.pairs} pairs in ABBA order\n")
    print("| what | harness | baseline | ratio (95 % interval) | target | verdict |")
    print("|---|---:|---:|---:|---:|---|", flush=True)
    for row in ROWS:
        if not arguments.rows or row.name in arguments.rows:
            print(measure(row, arguments.pairs), flush=True)
    for name, line in MEASURED_ONCE.items():
        if not arguments.rows or name in arguments.rows:
            print(line() + " |", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
