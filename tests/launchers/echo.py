"""What a rank of the contract tests does, by its first argument: JSON, rank -> behaviour. Imports no torch unless told to."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RUN = Path(os.environ["HARNESS_RUN_DIR"])
RANK = int(os.environ["RANK"])


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("no")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Stop(BaseException):
    pass


class DistFakeError(RuntimeError):
    """Looks like what torch raises when another rank is gone."""


DistFakeError.__module__ = "torch.distributed"


def tell(name, content=""):
    path = RUN / f"{name}-{RANK}"
    # A rank and its child may tell the same.
    aside = path.with_suffix(f".aside-{os.getpid()}")
    aside.write_text(content)
    aside.rename(path)


def wait_for(path):
    while not path.exists():
        time.sleep(0.005)


def outer():
    inner()


def inner():
    raise ValueError("bad batch")


def report():
    tell(
        "echo",
        json.dumps(
            {
                "environ": dict(os.environ),
                "argv": sys.argv,
                "cwd": str(Path.cwd()),
                "path": sys.path,
                "hash": hash("x"),
                "pid": os.getpid(),
                "stdin": sys.stdin.read(),
                "torch": "torch" in sys.modules,
            }
        ),
    )


def group():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.ones(1)
    dist.all_reduce(value)
    return dist, value.item()


def threads():
    import threadpoolctl
    import torch

    blas = [lib["num_threads"] for lib in threadpoolctl.threadpool_info() if lib["user_api"] == "blas"]
    tell("threads", json.dumps({"torch": torch.get_num_threads(), "blas": blas, "omp": os.environ["OMP_NUM_THREADS"]}))


def listen():
    dist, total = group()
    tell("listen", json.dumps({"sum": total, "sockets": listeners()}))
    dist.barrier()


def listeners():
    """Return the local addresses (hexadecimal) on which this process and its parents up to the test listen."""
    found = []
    for pid in (os.getpid(), os.getppid(), grandparent()):
        inodes = set()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and fields[9] in inodes:
                    found.append(fields[1].partition(":")[0])
    return found


def grandparent():
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


def lines():
    print("\n".join(f"rank {RANK} line {number}" for number in range(999)))
    print(f"rank {RANK} ", end="")
    print("line 999")


def workers(then=lambda: None):
    """Iterate over a DataLoader with two workers for ever."""
    from torch.utils.data import DataLoader

    for number, _ in enumerate(DataLoader(range(10**9), batch_size=1, num_workers=2)):
        if number == 0:
            tell("iterating")
            then()


def epoch():
    """Go through a DataLoader with two workers once, by way of sockets and shared memory."""
    import torch
    from torch.utils.data import DataLoader

    assert sum(len(batch) for batch in DataLoader(torch.arange(8.0), batch_size=2, num_workers=2)) == 8


def temporary_folders():
    """Tell where multiprocessing keeps its sockets, in this process and in a child of it."""
    import multiprocessing
    from multiprocessing import util

    def tell_the_childs():
        tell("child", json.dumps(util.get_temp_dir()))

    child = multiprocessing.get_context("fork").Process(target=tell_the_childs)
    child.start()
    child.join()
    tell("own", json.dumps(util.get_temp_dir()))


def shared_memory():
    """Leave what a process leaves that is killed while it hands over a tensor, or makes a lock: here and in a child."""
    import multiprocessing

    semaphores = multiprocessing.current_process()._config["semprefix"].removeprefix("/")
    child = os.fork()
    Path(f"/dev/shm/torch_{os.getpid()}_1_0").touch()
    Path(f"/dev/shm/sem.{semaphores}-{os.getpid()}").touch()
    if child == 0:
        for_ever()
    wait_for(Path(f"/dev/shm/torch_{child}_1_0"))
    wait_for(Path(f"/dev/shm/sem.{semaphores}-{child}"))
    for_ever()


def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell("ready")
    for_ever()


def stubborn():
    signal.signal(signal.SIGTERM, lambda number, frame: tell("stopping"))
    tell("ready")
    for_ever()


def talk():
    """Print a line that no pipe takes whole, then more for 4 s."""
    print("x" * 100_000)
    for _ in range(80):
        print("talking")
        time.sleep(0.05)


def for_ever():
    tell("waiting")
    while True:
        time.sleep(0.05)


def child_process():
    tell("child", str(subprocess.Popen(["sleep", "600"]).pid))


def barrier_alone():
    dist, _ = group()
    dist.barrier()


def timed_barrier():
    import datetime

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(os.environ["BARRIER_S"])))
    if RANK == 0:
        dist.barrier()
    else:
        for_ever()


def left_in_barrier():
    group()
    if RANK == 1:
        os._exit(0)
    barrier_alone_again()


def barrier_alone_again():
    import torch.distributed as dist

    dist.barrier()


def returns_before_barrier():
    group()
    if RANK == 0:
        barrier_alone_again()


def leave_at_exit():
    import atexit
    import threading

    atexit.register(lambda: tell("atexit"))
    threading.Thread(target=lambda: (time.sleep(0.2), tell("thread"))).start()
    print("no end of line", end="")


BEHAVIOUR = {
    "ok": report,
    "nothing": lambda: None,
    "raise": outer,
    "raise when 0 is ready": lambda: (wait_for(RUN / "ready-0"), outer()),
    "raise when 0 waits": lambda: (wait_for(RUN / "waiting-0"), outer()),
    "raise after 0": lambda: (wait_for_end_of(0), outer()),
    "exit 0 after 2": lambda: (wait_for(RUN / "waiting-0"), wait_for_end_of(2), os._exit(0)),
    "exit 0 when 0 waits": lambda: (wait_for(RUN / "waiting-0"), os._exit(0)),
    "die when 0 waits": lambda: (wait_for(RUN / "waiting-0"), os.kill(os.getpid(), signal.SIGKILL)),
    "consequence": lambda: throw(DistFakeError("Connection closed by peer")),
    "unpicklable": lambda: throw(Unpicklable("cannot be pickled")),
    "unprintable": lambda: throw(Unprintable()),
    "base": lambda: throw(Stop("stop it")),
    "interrupt": lambda: throw(KeyboardInterrupt()),
    "sys.exit(3)": lambda: sys.exit(3),
    "sys.exit(256)": lambda: sys.exit(256),
    "sys.exit(text)": lambda: sys.exit("no such file"),
    "os._exit(3) when told": lambda: (wait_for(RUN / "go"), os._exit(3)),
    "os._exit(7)": lambda: os._exit(7),
    "kill -9": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "lines and exit when 1 waits": lambda: (wait_for(RUN / "waiting-1"), lines(), os._exit(1)),
    "lines and wait": lambda: (lines(), for_ever()),
    "long line and wait": lambda: (print("x" * 100_000), for_ever()),
    "lines": lines,
    "for ever": for_ever,
    "deaf": deaf,
    "stubborn": stubborn,
    "talk": talk,
    "child process": child_process,
    "threads": threads,
    "listen": listen,
    "workers": workers,
    "workers, then kill -9": lambda: workers(lambda: (wait_for(RUN / "iterating-0"), os.kill(os.getpid(), signal.SIGKILL))),
    "epoch": epoch,
    "temporary folders": temporary_folders,
    "shared memory": shared_memory,
    "timed barrier": timed_barrier,
    "left in barrier": left_in_barrier,
    "returns before barrier": returns_before_barrier,
    "leave": leave_at_exit,
    "progress": lambda: print("10 %\r20 %\r30 %"),
}


def throw(error):
    raise error


def wait_for_end_of(rank):
    wait_for(RUN / f"rank-{rank}.jsonl")
    while '"event": "end"' not in (RUN / f"rank-{rank}.jsonl").read_text():
        time.sleep(0.005)


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    BEHAVIOUR[plan.get(str(RANK), plan.get("*", "nothing"))]()
