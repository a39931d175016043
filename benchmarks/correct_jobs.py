"""Whom the comparisons of whole jobs accuse: correct jobs, started by spawn and by launch, interrupted and resumed.

The fault table's correct runs are drawn the same way, but verified within one set of ranks; R10 (launcher against launcher)
and R12 (interrupted and resumed) need jobs. One takes some 15 s on 2 cores::

    python -m benchmarks.correct_jobs --count 40
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fault_table import Case, correct_cases
from harness.run.plan import TrainPlan

ROOT = Path(__file__).resolve().parent.parent
SEED = 1
"""Other settings than the fault table's."""


def main() -> int:
    """Run all sweeps, print each job that is not accepted, and how often each check was what; 1 if any job was not accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=40, help="sweeps of two jobs")
    count = parser.parse_args().count
    outcomes: Counter[tuple[str, str]] = Counter()
    accused = 0
    for case in correct_cases(count, SEED):
        with tempfile.TemporaryDirectory(prefix="correct-jobs-") as folder:
            for job in sweep(case, Path(folder)):
                outcomes.update((check["name"], check["status"]) for check in job["checks"])
                if job["status"] != "ok" or job["verdict"] != "ok":
                    accused += 1
                    print(f"WRONG: {' '.join(overrides(case))}: job {job['job']}: {job['message']} {job['checks']}", flush=True)
    for (name, status), number in sorted(outcomes.items(), key=lambda item: (int(item[0][0][1:]), item[0][1])):
        print(f"{name:<4} {status:<12} {number}")
    print(f"{accused} of {2 * count} correct jobs accused")
    return int(bool(accused))


def sweep(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Return the two jobs of a sweep over launchers, as its report has them."""
    command = [sys.executable, "run.py", "--config-dir=benchmarks/conf", "-m", *overrides(case), f"hydra.sweep.dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = folder / "report.json"
    if not report.exists():
        raise RuntimeError(f"{' '.join(command)} left no report:\n{done.stdout}\n{done.stderr}")
    return list(json.loads(report.read_text())["jobs"])


def overrides(case: Case) -> list[str]:
    """Return a case as typed: what differs from the plan's defaults."""
    overrides = ["launcher=spawn,launch", "backend=gloo", "threads=1", f"nprocs={case.nprocs}"]
    return [*overrides, f"recipe={case.label.partition(',')[0]}", *_settings(case.plan)]


def _settings(plan: TrainPlan) -> Iterator[str]:
    yield from (f"recipe.{key}={value}" for key, value in plan.recipe.items() if key != "_target_")
    yield f"ddp.find_unused_parameters={plan.ddp.find_unused_parameters}"
    names = ("compare", "seed", "steps", "global_batch_size", "precision", "grad_accumulation", "clip_norm", "sync_bn")
    for name in (*names, "num_workers"):
        value = getattr(plan, name)
        yield f"{name}={'null' if value is None else value}"


if __name__ == "__main__":
    sys.exit(main())
