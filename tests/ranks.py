"""Groups of ranks for tests: every case of a module runs in forks of one process that has torch imported.

A module's ``CASES`` maps a name to a function of a :class:`~harness.training.trainer.Seat` and a folder that all groups share.
What it returns in each rank, or the traceback of what it raised, is what :func:`run_cases` returns. Each case has a process
group of its own, so that one which leaves its ranks in disorder spoils no other. A rank whose case is done at once leaves that
group only when all have joined it, as the product's ranks do.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer of every rank would import it
import torch.distributed as dist

from harness.rank.group import leave_group
from harness.rank.lifetime import children_die_with_this_process, die_with_parent
from harness.run.environment import INIT_BARRIER
from harness.training.trainer import Seat

TIMEOUT_S = 400
COLLECTIVE_S = 20


class Outcomes:
    """What each rank of each group returned."""

    def __init__(self, by_size: dict[int, list[dict[str, Any]]]) -> None:
        self._by_size = by_size

    def of(self, size: int, case: str) -> list[Any]:
        """Return what the ranks of one group returned for a case, in rank order; fail the test if any raised."""
        results = [rank[case] for rank in self._by_size[size]]
        raised = [f"rank {rank} of {size}: {result}" for rank, result in enumerate(results) if isinstance(result, Raised)]
        if raised:
            pytest.fail("\n".join(raised), pytrace=False)
        return results


class Raised(str):
    """A traceback."""


def run_cases(module: str, sizes: Sequence[int], folder: Path) -> Outcomes:
    """Run all cases of a module in groups of these sizes, one group after another."""
    command = [sys.executable, "-m", "tests.ranks", module, str(folder), *map(str, sizes)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", INIT_BARRIER: "1"}
    with subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[1]) as process:
        try:
            process.wait(TIMEOUT_S)
        finally:
            process.kill()
    return Outcomes({size: [_read(folder, size, rank) for rank in range(size)] for size in sizes})


def _read(folder: Path, size: int, rank: int) -> dict[str, Any]:
    path = folder / f"results-{size}-{rank}.pt"
    if not path.exists():
        pytest.fail(f"rank {rank} of {size} left no results", pytrace=False)
    return dict(torch.load(path, weights_only=False))


def main(module: str, folder: Path, sizes: Sequence[int]) -> None:
    """Fork the ranks of each group and wait for them."""
    children_die_with_this_process()
    gc.freeze()  # what a rank collects is its own alone
    cases = importlib.import_module(module).CASES
    for size in sizes:
        children = []
        for rank in range(size):
            child = os.fork()
            if child == 0:
                _rank(cases, Seat(rank, size, torch.device("cpu")), folder)
            children.append(child)
        for _ in children:
            ended, status = os.wait()
            if status:
                # The others would wait for it in every case that is left.
                print(f"rank {children.index(ended)} of {size} ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
                os._exit(1)


def _rank(cases: dict[str, Any], seat: Seat, folder: Path) -> None:
    code = 1
    try:
        die_with_parent(os.getppid())
        faulthandler.enable()
        faulthandler.dump_traceback_later(TIMEOUT_S / 2, exit=True)
        torch.set_num_threads(1)
        results = {name: _outcome(name, case, seat, folder) for name, case in cases.items()}
        aside = folder / f"aside-{seat.world_size}-{seat.rank}"
        torch.save(results, aside)
        aside.rename(folder / f"results-{seat.world_size}-{seat.rank}.pt")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _outcome(name: str, case: Any, seat: Seat, folder: Path) -> Any:
    begin = time.monotonic()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store-{seat.world_size}-{name}",
        rank=seat.rank,
        world_size=seat.world_size,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    try:
        return case(seat, folder)
    except BaseException:
        return Raised(traceback.format_exc())
    finally:
        group = leave_group()
        gc.collect()
        del group
        if "CASE_TIMES" in os.environ and seat.rank == 0:
            print(f"{seat.world_size} ranks, {name}: {time.monotonic() - begin:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    from tests.ranks import main as run  # so that results can be unpickled elsewhere

    run(sys.argv[1], Path(sys.argv[2]), [int(size) for size in sys.argv[3:]])
