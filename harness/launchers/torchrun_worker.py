"""The parent of one rank under torch's elastic agent, which tells nobody how a rank ended.

``python -m harness.launchers.torchrun_worker RUN_DIR``
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

from harness.launchers.local import signal_group
from harness.rank.lifetime import die_with_parent
from harness.run.environment import PARENT, UNSHARED, RankEnvironment
from harness.run.folder import RunDir, write_json

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(path: str) -> NoReturn:
    """Start the rank in a session of its own, pass signals on to it, and write down its exit code and its time."""
    die_with_parent(int(os.environ[PARENT]))
    os.environ[PARENT] = str(os.getpid())
    os.environ.pop(UNSHARED, None)
    # One that came before the handlers were set would end this process, and leave the rank to nobody.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    pid = os.fork()
    if pid == 0:
        _become_rank(path)

    def forward(number: int, frame: FrameType | None) -> None:
        signal_group(pid, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    code = _await_end(pid)
    who = RankEnvironment.read() or RankEnvironment()
    # Before this process ends: by that the agent hears of it, and stops the other ranks.
    ending = {"code": code, "t": time.monotonic(), "attempt": _attempt(), "is_unheard": not _has_started(path, who.slot, pid)}
    write_json(RunDir(path).ending(who.slot), ending)
    # For a signal 128 and its number, as shells have it.
    os._exit(code if code >= 0 else 128 - code)


def _attempt() -> int:
    """Return which start of the ranks this is, as torch's agent counts them."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _has_started(path: str, slot: int, pid: int) -> bool:
    """Return whether the rank of this start has recorded so; until it has, its record is that of the start before."""
    events = RunDir(path).events(slot)
    return bool(events) and events[0].get("pid") == pid


def _become_rank(path: str) -> NoReturn:
    os.setsid()
    for number in _FORWARDED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    from harness.rank.process import main as be_rank

    be_rank(path)


def _await_end(pid: int) -> int:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    # The zombie keeps its group's number taken until what it left behind is gone.
    signal_group(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main(sys.argv[1])
