"""What is known of ranks that torch's agent has started again."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from harness.launchers.ranks import Ranks
from harness.run.folder import RunDir, write_json
from harness.run.outcome import judge
from harness.run.plan import RunPlan, Task


class EndedAgent:
    """An agent that is gone, and has given its ranks up."""

    pid, rank, server = 1, None, None

    def poll(self) -> int:
        return 1

    def fileno(self) -> int:
        return -1


def record(run: RunDir, rank: int, *events: dict[str, object]) -> None:
    run.records(rank).write_text("".join(json.dumps(event) + "\n" for event in events))


def start(pid: int) -> dict[str, object]:
    return {"event": "start", "format": 1, "pid": pid, "marks": {}}


FAILURE = {"type": "ValueError", "message": "the first time", "where": "", "traceback": "", "collective": False, "t": 1.0}
RAISED = {"event": "end", "status": "raised", "code": 1, "failure": FAILURE, "value": None, "t": 1.0}


@pytest.mark.parametrize(
    "ending",
    [
        {"code": 1, "t": 1.0, "attempt": 0, "is_unheard": False},
        {"code": -int(signal.SIGTERM), "t": 4.0, "attempt": 1, "is_unheard": True},
    ],
    ids=["its worker did not come up", "it recorded nothing"],
)
def test_a_rank_that_is_stopped_on_its_way_up_is_not_judged_by_its_earlier_start(
    tmp_path: Path, ending: dict[str, object]
) -> None:
    run = RunDir(tmp_path)
    record(run, 0, start(11))
    record(run, 1, start(12), RAISED)
    write_json(run.ending(0), {"code": 9, "t": 3.0, "attempt": 1, "is_unheard": False})
    write_json(run.ending(1), ending)
    ranks = Ranks(run, RunPlan(Task("call"), method="torchrun", nprocs=2, max_restarts=1))
    ranks.processes = [EndedAgent()]  # type: ignore[list-item]
    list(ranks.read())
    result = judge(ranks.ends(), ["", ""], {})
    assert (result.failed_rank, result.exit_code) == (0, 9), result.message
