"""Ten small mistakes in the product, one at a time in a copy of it: for each, tests must turn red.

Run by hand, with the numbers of some mutations or none for all::

    python -m benchmarks.mutations
    python -m benchmarks.mutations 1 5

Prints a Markdown table; its exit status is the number of mutations that no test has seen.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "outputs", "multirun", "build", "*.egg-info")


@dataclass(frozen=True)
class Mutation:
    """A mistake: what it does, where, and which tests are asked."""

    mistake: str
    path: str
    right: str
    wrong: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "a shard begins off by one where sizes differ",
        "harness/training/shard.py",
        "start = rank * size + min(rank, longer)",
        "start = rank * size + rank",
        ("tests/test_shard.py",),
    ),
    Mutation(
        "no broadcast of parameters at birth",
        "harness/training/parallel/ddp.py",
        "dist.broadcast(tensor.detach(), group=group, group_src=0)",
        "tensor.detach()",
        ("tests/test_parallel.py",),
    ),
    Mutation(
        "the supervisor passes over a rank that was killed",
        "harness/run/outcome.py",
        'return not self.stopped and self.result.status == "unfinished" and self.returncode is not None',
        "return False",
        ("tests/test_outcome.py",),
    ),
    Mutation(
        "the bound of R7 in float64 is ten times as large",
        "harness/compare/correctness/bounds.py",
        "MOST_IN_FLOAT64 = 1e-11",
        "MOST_IN_FLOAT64 = 1e-10",
        ("tests/test_compare_correctness.py",),
    ),
    Mutation(
        "a learning rate is wrong where it is declared",
        "harness/compare/correctness/checks_step.py",
        "repr(mine) == repr(other)",
        "repr(mine) != repr(other)",
        ("tests/test_compare_correctness.py",),
    ),
    Mutation(
        "a run's temporary folder stays",
        "harness/launchers/temp_dir.py",
        'rm -rf -- "$1" "/dev/shm',
        'rm -rf -- "/dev/shm',
        ("tests/test_spawn.py",),
    ),
    Mutation(
        "the table has no column of what was verified",
        "harness/report/sweep/table.py",
        '        ("verified", False, [verified_cell(job) for job in jobs]),\n',
        "",
        ("tests/test_report_terminal.py",),
    ),
    Mutation(
        "the launch command ends with status 0 after a failure",
        "harness/entrypoints/launch_command.py",
        "_report(result, run, asked)\n",
        "0 * _report(result, run, asked)\n",
        ("tests/test_launch.py",),
    ),
    Mutation(
        "an evaluation counts batches where it should count samples",
        "harness/training/evaluate.py",
        "before[1] + count",
        "before[1] + 1",
        ("tests/test_evaluate.py",),
    ),
    Mutation(
        "a resumed training draws other random numbers",
        "harness/training/checkpoint.py",
        'len(content["random"]) == seat.world_size',
        'len(content["random"]) == 0',
        ("tests/test_checkpoint.py",),
    ),
)


def main(numbers: list[int]) -> int:
    """Print how each of the mutations ended, and return how many were not seen."""
    survivors = 0
    print("| | mistake | where | tests | |\n|---:|---|---|---|---|")
    for number in numbers or range(1, len(MUTATIONS) + 1):
        mutation = MUTATIONS[number - 1]
        last = outcome(mutation)
        seen = last.startswith(("FAILED", "ERROR"))
        survivors += not seen
        tests, colour = ", ".join(mutation.tests), "red" if seen else "GREEN"
        print(f"| {number} | {mutation.mistake} | {mutation.path} | {tests} | {colour}: {last} |", flush=True)
    return survivors


def outcome(mutation: Mutation) -> str:
    """Return the line of the test that a copy with this mistake fails first, else the last line that the tests print."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = shutil.copytree(ROOT, Path(folder, "copy"), ignore=NOT_COPIED)
        path = copy / mutation.path
        text = path.read_text()
        if text.count(mutation.right) != 1:
            raise SystemExit(f"{mutation.path} does not have this once: {mutation.right!r}.")
        path.write_text(text.replace(mutation.right, mutation.wrong))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))
