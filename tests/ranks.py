"""Groups of ranks for tests: every case of a module runs in forks of one process that has torch imported.

A module's ``CASES`` maps a name to a function of a :class:`~harness.training.seat.Seat` and a folder that all groups share.
What it returns in each rank, or the traceback of what it raised, is what :meth:`Outcomes.of` returns. Ranks are forked when a
test first asks, for a handful of cases at a time; a case that has ``sizes`` runs in groups of those alone. Each case has a
process group of its own, so that one which leaves its ranks in disorder spoils no other. A rank whose case is done at once
leaves that group only when all have joined it, as the product's ranks do. No clock limits a group: a rank that is silent over
one case shows its stack and ends, and so do the others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
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
from harness.training.seat import Seat

TOGETHER = 16
SILENCE_S = 900
COLLECTIVE_S = 600


class Outcomes:
    """What each rank of each group returns, by way of a process that forks them."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder
        self._results: dict[tuple[int, str], list[Any]] = {}

    def of(self, size: int, case: str) -> list[Any]:
        """Return what the ranks of one group returned for a case, in rank order; fail the test if any raised."""
        if (size, case) not in self._results:
            self._run(size, case)
        results = self._results[size, case]
        raised = [f"rank {rank} of {size}: {result}" for rank, result in enumerate(results) if isinstance(result, Raised)]
        if raised:
            pytest.fail("\n".join(raised), pytrace=False)
        return results

    def _run(self, size: int, case: str) -> None:
        """Have a group of this size run the case, and those that run together with it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([size, case]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        names = json.loads(answer) if answer else [case]
        ranks = [self._read(size, rank) for rank in range(size)]
        missing = Raised("it left no results")
        self._results |= {(size, name): [results.get(name, missing) for results in ranks] for name in names}

    def _read(self, size: int, rank: int) -> dict[str, Any]:
        path = results_path(self._folder, size, rank)
        if not path.exists():
            return {}
        results = dict(torch.load(path, weights_only=False))
        path.unlink()
        return results


class Raised(str):
    """A traceback."""


def results_path(folder: Path, size: int, rank: int) -> Path:
    """Return where a rank leaves what its cases returned."""
    return folder / f"results-{size}-{rank}.pt"


@contextlib.contextmanager
def groups_of(module: str, folder: Path) -> Iterator[Outcomes]:
    """Have groups of ranks run the cases of a module as long as this lasts."""
    command = [sys.executable, "-m", "tests.ranks", module, str(folder)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", INIT_BARRIER: "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[1], **pipes) as process:
        try:
            yield Outcomes(process, folder)
        finally:
            process.kill()


def main(module: str, folder: Path) -> None:
    """Fork the ranks of each group that is asked for, and answer with the names of the cases that they have run."""
    children_die_with_this_process()
    cases = importlib.import_module(module).CASES
    gc.freeze()  # what a rank collects is its own alone
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        size, case = json.loads(line)
        names = [name for name in cases if size in getattr(cases[name], "sizes", (size,))]
        begin = names.index(case) // TOGETHER * TOGETHER
        together = names[begin : begin + TOGETHER]
        run_group({name: cases[name] for name in together}, size, folder)
        print(json.dumps(together), file=answers, flush=True)


def run_group(cases: dict[str, Any], size: int, folder: Path) -> None:
    """Fork the ranks of one group and wait for them; one that fails ends the others, which would wait for it in every case."""
    children: dict[int, int] = {}
    for rank in range(size):
        child = os.fork()
        if child == 0:
            _rank(cases, Seat(rank, size, torch.device("cpu")), folder)
        children[child] = rank
    while children:
        child, status = os.wait()
        rank = children.pop(child)
        if status:
            print(f"rank {rank} of {size} ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr, flush=True)
            for other in children:
                os.kill(other, signal.SIGKILL)


def _rank(cases: dict[str, Any], seat: Seat, folder: Path) -> None:
    code = 1
    try:
        die_with_parent(os.getppid())
        torch.set_num_threads(1)
        results = {name: _outcome(name, case, seat, folder) for name, case in cases.items()}
        path = results_path(folder, seat.world_size, seat.rank)
        aside = path.with_suffix(".aside")
        torch.save(results, aside)
        aside.rename(path)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _outcome(name: str, case: Any, seat: Seat, folder: Path) -> Any:
    begin = time.monotonic()
    faulthandler.dump_traceback_later(SILENCE_S, exit=True)
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

    run(sys.argv[1], Path(sys.argv[2]))
