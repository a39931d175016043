"""Functions that tests of spawn call in ranks; this module imports no pytest, so that ranks are quick."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import harness
from harness.launchers import registry


@dataclass
class Point:
    """A type that crosses processes by reference to this module."""

    x: int


class Picky(Exception):
    """Cannot be pickled back: its constructor wants two arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Custom(Exception):
    pass


def rank_and_size():
    env = harness.init_parallel_env()
    return env.rank, env.world_size


def give(value):
    return value


def spawn_in_a_fork(answers, of_parent):
    """Spawn in a process that was forked from one which has a warm server."""
    mine = id(registry.launcher("spawn")) != of_parent
    answers.put((mine, harness.spawn(give, args=(1,), nprocs=2, backend="gloo").return_values()))
    registry.close_all()


def leaves_before_joining():
    if os.environ["RANK"] == "1":
        sys.exit(0)
    harness.init_parallel_env()


def echo(*values):
    return values


def keyword_only(a, *, b):
    return a, b


def point():
    return Point(harness.ParallelEnv().rank)


def environment(*names):
    return {name: os.environ.get(name) for name in names}


def large(number_of_bytes):
    return bytes(number_of_bytes)


def tensor_of(megabytes):
    import torch

    return torch.full((megabytes * 2**18,), float(harness.ParallelEnv().rank))


def add_one(tensor):
    tensor += 1
    return tensor.tolist()


def sum_of(tensors):
    return float(sum(tensor.sum() for tensor in tensors))


def cannot_return():
    return threading.Lock()


def threads():
    import torch

    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def on_rank_1(what):
    """Do something fatal on rank 1, while rank 0 waits for it."""
    env = harness.init_parallel_env()
    if env.rank == 1:
        fatal(what)
    import torch

    torch.distributed.barrier()


def fatal(what):
    match what:
        case "raise":
            raise Custom("bad batch")
        case "picky":
            raise Picky(1, 2)
        case "config":
            raise harness.ConfigError("Mend this.")
        case "interrupt":
            raise KeyboardInterrupt
        case "exit 7":
            sys.exit(7)
        case "exit 0":
            sys.exit(0)
        case "os exit":
            os.write(1, b"last words\n")
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            threading.Event().wait()


def wait_for(path):
    """Wait until a file exists, so that a test decides when this ends."""
    while not os.path.exists(path):
        threading.Event().wait(0.01)
    return True


def tell_and_wait_for(folder, go):
    """Say that this rank is here, and wait until a file exists."""
    Path(folder, f"here-{harness.ParallelEnv().rank}").touch()
    return wait_for(go)


def pid_then_wait(folder):
    rank = harness.ParallelEnv().rank
    aside = Path(folder, f"{rank}.tmp")
    aside.write_text(str(os.getpid()))
    aside.replace(Path(folder, str(rank)))
    threading.Event().wait()


def say_things():
    import logging
    import warnings

    rank = harness.ParallelEnv().rank
    print(f"printed by {rank}")
    warnings.warn(f"warned by {rank}", stacklevel=1)
    logging.getLogger("x").error("logged by %d", rank)
    logging.getLogger("x").info("whispered by %d", rank)


def chatter():
    """Print without flushing, and end at once."""
    for number in range(1000):
        sys.stdout.write(f"line {number}\n")
    if harness.ParallelEnv().rank == 0:
        os._exit(3)
    threading.Event().wait()


def init_with(backend):
    return repr(harness.init_parallel_env(backend))


def twice():
    """Join twice; the second call changes nothing."""
    import warnings

    first = harness.init_parallel_env()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second = harness.init_parallel_env("nccl")
        third = harness.prepare_context()
    return first is second is third, [str(warning.message) for warning in caught], harness.get_rank(), harness.get_world_size()


def plain_process():
    """Join as a process that nobody started as a rank does."""
    from harness.run import environment

    kept = environment.without_stale(os.environ)
    os.environ.clear()
    os.environ.update(kept)
    del os.environ["GLOO_SOCKET_IFNAME"]
    before = dict(os.environ)
    import torch

    env = harness.init_parallel_env()
    one = torch.ones(1)
    torch.distributed.all_reduce(one)
    unchanged = dict(os.environ) == before
    torch.distributed.destroy_process_group()
    again = harness.init_parallel_env()
    return env.rank, env.world_size, one.item(), unchanged, again is env, torch.distributed.get_backend()


def adopts():
    """Take a group that the script has made itself."""
    import torch

    rank, size = harness.ParallelEnv().rank, harness.ParallelEnv().world_size
    torch.distributed.init_process_group("gloo", init_method="env://", rank=size - 1 - rank, world_size=size)
    env = harness.init_parallel_env()
    return env.rank, env.world_size, env.device_type


def group_timeout():
    import torch

    harness.init_parallel_env()
    group = torch.distributed.distributed_c10d._get_default_group()
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def spawn_in_spawn():
    return harness.spawn(rank_and_size, nprocs=2).return_values()


def comes_back_forked():
    """Return from a child of the rank's own as well, and let the child be the first."""
    if os.fork() == 0:
        return "child"
    os.wait()
    return "parent"


def say_hello():
    print("hello")


def start_a_process_by_spawn():
    import multiprocessing

    child = multiprocessing.get_context("spawn").Process(target=say_hello)
    child.start()
    child.join()
    return child.exitcode


def fail_at_length():
    raise RuntimeError("bad file name \ud800" + "x" * 1_000_000)
