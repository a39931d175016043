"""What a sweep of 100 jobs costs at its end against its beginning, and what one rank more takes of the memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.compare.performance import stats

ROOT = Path(__file__).resolve().parent.parent
JOBS, END = 100, 10
KIB_OF_MIB = 1024


def size_mib(pid: int | str, kind: str) -> float:
    """Return the size of a process: ``Rss``, or ``Pss``, where pages that n processes share count 1/n."""
    found = re.search(rf"^{kind}:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return int(found.group(1)) / KIB_OF_MIB if found else 0.0


def long_sweep() -> str:
    """Return the line on a sweep of 100 jobs of 2 ranks and one step: its last 10 jobs against its first, and its memory."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [sys.executable, str(ROOT / "run.py"), f"hydra.sweep.dir={folder}", "report=none", "backend=gloo", "nprocs=2"]
        command += ["steps=1", "compare=off", "threads=1", f"seed={','.join(map(str, range(JOBS)))}"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        sweep = subprocess.Popen(command, **quiet)  # type: ignore[call-overload]
        early = _memory_at(sweep, Path(folder), END)
        late = _memory_at(sweep, Path(folder), JOBS)
        if sweep.wait():
            raise RuntimeError(f"{' '.join(command)} failed ({sweep.returncode})")
        first, last = (stats.median(_seconds(Path(folder), jobs)) for jobs in (range(END), range(JOBS - END, JOBS)))
    memory = f"parent {early[0]:.0f} to {late[0]:.0f} MiB, server {early[1]:.0f} to {late[1]:.0f} MiB"
    what = f"{JOBS} jobs in one sweep: the last {END} vs the first"
    return f"| {what} | {last:.3g} s | {first:.3g} s | {last / first:.3f}; {memory} | 1.1 |"


def _memory_at(sweep: subprocess.Popen[bytes], folder: Path, jobs: int) -> tuple[float, float]:
    """Return the size of parent and server when so many jobs have begun."""
    while sweep.poll() is None and not (folder / str(jobs - 1) / "plan.json").exists():
        time.sleep(0.02)
    children = Path(f"/proc/{sweep.pid}/task/{sweep.pid}/children").read_text().split()
    # Not Pss: it is larger whenever no rank shares the pages of the server.
    return size_mib(sweep.pid, "Rss"), max((size_mib(child, "Rss") for child in children), default=0.0)


def _seconds(folder: Path, jobs: range) -> list[float]:
    marks = [json.loads((folder / str(job) / "result.json").read_text())["marks"] for job in jobs]
    return [each["returned"] - each["called"] for each in marks]


def starts(count: int = 1000) -> str:
    """Return the line on so many warm starts of 2 ranks with DDP and a step: what they left, and the last 10 against the first.

    Raises:
        RuntimeError: They left something.
    """
    import harness
    from benchmarks.one_step import one_step_of_harness

    def start() -> float:
        begin = time.monotonic()
        harness.spawn(one_step_of_harness, nprocs=2, backend="gloo", threads=1)
        return time.monotonic() - begin

    start()
    before, times = _belongings(), [start() for _ in range(count)]
    left = _belongings() - before
    if left:
        raise RuntimeError(f"{count} starts left {len(left)} things: {', '.join(sorted(left)[:5])}")
    first, last = stats.median(times[:END]), stats.median(times[-END:])
    what = f"{count} starts of 2 ranks, which left nothing: the last {END} vs the first"
    return f"| {what} | {last:.3g} s | {first:.3g} s | {last / first:.3f} | 1.1 |"


def _belongings() -> set[str]:
    """Return this process's children and descriptors, without which no port is open; shared memory and temporary files."""
    me = Path(f"/proc/{os.getpid()}")
    children = {f"child {pid}" for pid in (me / "task" / str(os.getpid()) / "children").read_text().split()}
    descriptors = {f"descriptor {each.name}" for each in (me / "fd").iterdir()}
    return (
        children
        | descriptors
        | {str(path) for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).iterdir()}
    )


def pss_of_rank() -> float:
    """Take a step in a rank of ``harness.spawn``; return its size while all ranks live."""
    import torch.distributed as dist

    from benchmarks.one_step import one_step_of_harness

    one_step_of_harness()
    dist.barrier()
    size = size_mib(os.getpid(), "Pss")
    dist.barrier()
    return size


def memory_of_ranks(nprocs: int = 64) -> str:
    """Return the line on the proportional set size of one rank of many."""
    import harness

    context = harness.spawn(pss_of_rank, nprocs=nprocs, backend="gloo", threads=1)
    sizes = list(context.return_values())
    return f"| PSS of each of {nprocs} ranks | {stats.median(sizes):.3g} MiB | | at most {max(sizes):.3g} MiB | 40 MiB |"
