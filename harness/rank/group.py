"""A script's own view of the ranks: ``import harness.rank.group as dist``.

Importing this costs no torch, so that a parent which only calls ``spawn`` starts its ranks at once; what needs torch imports
it when it is called.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import Any

from harness.errors import BackendUnavailable, ConfigError, Problem
from harness.rank.context import recorder
from harness.run.environment import INIT_BARRIER, RUN_DIR, RankEnvironment, loopback_interface, slurm_rendezvous, usable_cores
from harness.run.folder import RunDir
from harness.run.placement import Machine, may_have_accelerator, place
from harness.run.plan import RunPlan

# Torch's limit comes after the supervisor's, which names the rank that hangs; torch's error names those that waited.
_AFTER_THE_SUPERVISOR = timedelta(seconds=30)
_joined: list[ParallelEnv] = []


class ParallelEnv:
    """This process's place among the ranks, as it is when this object is made.

    It may be made before :func:`init_parallel_env` too: then it says what the environment says. In a process that nobody
    started as a rank it is rank 0 of 1.
    """

    def __init__(self) -> None:
        who = _who() or RankEnvironment()
        self._local_rank = who.local_rank
        self._rank, self._world_size = who.rank, who.world_size
        if _group_exists():
            group = sys.modules["torch.distributed"]
            self._rank, self._world_size = int(group.get_rank()), int(group.get_world_size())
        # Found when it is asked for, because that may take an import of torch.
        self._device_type: str | None = None
        self._host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = os.environ.get("MASTER_PORT", "")
        self._port = int(port) if port.isdecimal() else 0

    @property
    def rank(self) -> int:
        """Number of this rank over all machines, from 0."""
        return self._rank

    @property
    def local_rank(self) -> int:
        """Number of this rank on its machine, from 0."""
        return self._local_rank

    @property
    def world_size(self) -> int:
        """Number of ranks over all machines."""
        return self._world_size

    @property
    def nranks(self) -> int:
        """The same as ``world_size``."""
        return self._world_size

    @property
    def device_id(self) -> int:
        """Index of this rank's device among those that it sees; 0 on the CPU."""
        return 0 if self.device_type == "cpu" else self._local_rank

    @property
    def dev_id(self) -> int:
        """The same as ``device_id``."""
        return self.device_id

    @property
    def device_type(self) -> str:
        """``cpu``, ``cuda`` or ``xpu``: ``torch.device(env.device_type, env.device_id)`` is this rank's device."""
        if self._device_type is None:
            self._device_type = _device_without_group()
        return self._device_type

    @property
    def current_endpoint(self) -> str:
        """This rank's entry of ``trainer_endpoints``."""
        return self.trainer_endpoints[self._rank]

    @property
    def trainer_endpoints(self) -> list[str]:
        """A ``host:number`` for each rank, in rank order, to tell ranks apart by.

        Unlike paddle's they are names only: no rank listens there, because ranks find each other through the rendezvous.
        """
        return [f"{self._host}:{self._port + rank}" for rank in range(self._world_size)]

    def __repr__(self) -> str:
        return f"ParallelEnv(rank={self._rank}, world_size={self._world_size}, local_rank={self._local_rank})"


def init_parallel_env(backend: str = "auto") -> ParallelEnv:
    """Join this process to its group and return its place in it; a second call returns the same and changes nothing.

    Works in a rank of ``spawn`` or of the launch command, in a script under ``torchrun`` or ``srun``, and in a plain
    ``python train.py``, which is one rank at once. Under ``srun`` without MASTER_ADDR the ranks meet on the first machine of
    the step, at a port that follows from the job's number. A group that the script has initialised itself is taken as it is.
    A rank on an accelerator gets its device set as the current one.

    Args:
        backend: ``auto``, ``gloo``, ``nccl`` or ``bkcl``; ``auto`` is what the launcher chose, else what fits this machine.

    Raises:
        ConfigError: The backend contradicts the one that the launcher was asked for, or the environment is incomplete.
        BackendUnavailable: The backend cannot run here.
    """
    if _group_exists():
        return _adopt(backend)
    who = _who()
    plan = _plan()
    name, device = _choose(backend, who or RankEnvironment(), plan)
    # Without this, all ranks of a machine would work on its first device.
    _set_device(device, who or RankEnvironment())
    record = recorder()
    if record is not None:
        # The supervisor sees by these that a rank waits for one that has ended.
        record.event("joining")
    _join(name, device, who, plan)
    if record is not None:
        record.event("joined")
    # A rank of ours sees to this itself. In any other process gloo's threads would meet the interpreter's end.
    elif name == "gloo":
        atexit.register(_leave_group_for_good)
    env = ParallelEnv()
    env._device_type = device
    _joined[:] = [env]
    return env


def get_rank() -> int:
    """Return this process's rank; 0 before the group is initialised."""
    return int(sys.modules["torch.distributed"].get_rank()) if _group_exists() else 0


def get_world_size() -> int:
    """Return the number of ranks; 1 before the group is initialised."""
    return int(sys.modules["torch.distributed"].get_world_size()) if _group_exists() else 1


def prepare_context(strategy: object = None) -> ParallelEnv:
    """Call :func:`init_parallel_env`. Deprecated; ``strategy`` has no effect."""
    # FutureWarning: Python shows a DeprecationWarning only where __main__ calls, and none to a script's own modules.
    warnings.warn("prepare_context() is an old name: call init_parallel_env().", FutureWarning, stacklevel=2)
    return init_parallel_env()


def _group_exists() -> bool:
    """Return True in a process that has joined a group; one that has not imported torch has not."""
    group = sys.modules.get("torch.distributed")
    return group is not None and bool(group.is_available()) and bool(group.is_initialized())


def _adopt(backend: str) -> ParallelEnv:
    """Return the place in the group that exists, whoever made it."""
    current = str(sys.modules["torch.distributed"].get_backend())
    if backend not in ("auto", current):
        # stacklevel: the warning names the script's own line, which called init_parallel_env().
        warnings.warn(
            f"init_parallel_env(backend={backend!r}) changes nothing: the group exists already, with backend {current!r}.",
            RuntimeWarning,
            stacklevel=3,
        )
    place_now = ParallelEnv()
    # The group that is remembered may have been left, by an inline rank, or by the script that made another since.
    if not _joined or repr(_joined[0]) != repr(place_now):
        _joined[:] = [place_now]
    return _joined[0]


def _who() -> RankEnvironment | None:
    try:
        return RankEnvironment.read()
    except ValueError as error:
        raise ConfigError(f"This process cannot tell which rank it is: {error}.") from error


def _plan() -> RunPlan | None:
    """Return the plan that this rank was started for; None where another launcher, or nobody, started it."""
    if RUN_DIR not in os.environ:
        return None
    run = RunDir(os.environ[RUN_DIR])
    # The variable may be inherited from a run that is over, whose folder has been removed.
    return RunPlan.read(run) if run.plan.exists() else None


def _choose(backend: str, who: RankEnvironment, plan: RunPlan | None) -> tuple[str, str]:
    """Return the backend and the type of device."""
    if plan is not None and plan.backend:
        if backend in ("auto", plan.backend):
            return plan.backend, plan.device
        # What auto chose nobody has asked for: then the script decides.
        if not plan.backend_reason.startswith("auto"):
            contradiction = (
                "init_parallel_env(backend={asked!r}) contradicts the launcher, which was asked for "
                "{backend}={name}. Leave one of the two out."
            )
            raise ConfigError(Problem(contradiction, asked=backend, name=plan.backend))
    placement = place(backend, who.local_world_size, None, usable_cores(), os.environ, _machine)
    return placement.backend, placement.device


def _machine() -> Machine:
    from harness.rank.backend import probe

    return Machine(**probe())


def leave_group() -> object:
    """Leave the process group, if there is one; return what to hold until no DDP is left that held it too.

    A group's end waits for its threads. Where Python was the last to hold it, others may run meanwhile. Where DDP's reducer
    was, they may not, and a thread that lets go of a tensor just then waits for ever.
    """
    if not _group_exists():
        return None
    group = sys.modules["torch.distributed"].group.WORLD
    sys.modules["torch.distributed"].destroy_process_group()
    return group


def _leave_group_for_good() -> None:
    """Leave the group, and end its threads where nothing else of the script holds it.

    One that lets go of a tensor while the interpreter is torn down aborts the process: the rank would fail after its work. A
    model that lives as long as the script, in a variable of its module, still holds the group, as it does in torch.
    """
    group = leave_group()
    # A process's first DDP is in a reference cycle.
    gc.collect()
    del group


def _device_without_group() -> str:
    plan = _plan()
    if plan is not None:
        return plan.device
    if not may_have_accelerator():
        return "cpu"
    devices = _machine().devices
    return next((kind for kind in ("cuda", "xpu") if devices.get(kind)), "cpu")


def _set_device(device: str, who: RankEnvironment) -> None:
    if device == "cpu":
        return
    import torch

    module: ModuleType = torch.cuda if device == "cuda" else torch.xpu
    module.set_device(who.local_rank)


def _join(name: str, device: str, who: RankEnvironment | None, plan: RunPlan | None) -> None:
    import torch
    import torch.distributed as dist

    # Torch can be built without (USE_DISTRIBUTED=0); one rank alone needs none.
    if not dist.is_available():
        if who is None or who.world_size == 1:
            return
        raise BackendUnavailable(f"This torch build ({torch.__version__}) has no torch.distributed: use nprocs=1.")
    options: dict[str, Any] = {}
    if plan is not None and plan.timeout_s is not None:
        options["timeout"] = timedelta(seconds=plan.timeout_s) + _AFTER_THE_SUPERVISOR
    if who is None or who.world_size == 1:
        # In memory: a rank that is alone need not listen anywhere.
        options |= {"store": torch._C._distributed_c10d.HashStore(), "rank": 0, "world_size": 1}
    else:
        _require_rendezvous(who)
        options |= {"init_method": "env://", "rank": who.rank, "world_size": who.world_size}
    # Given its device, NCCL connects at once: what keeps it from that is met here, not in the first step.
    if device == "cuda":
        options["device_id"] = torch.device("cuda", who.local_rank if who else 0)
    with joining(_is_one_machine(who)):
        dist.init_process_group(name, **options)


def _require_rendezvous(who: RankEnvironment) -> None:
    """See to it that MASTER_ADDR and MASTER_PORT are set.

    Raises:
        ConfigError: They are not, and no job of Slurm tells them.
    """
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return
    rendezvous = slurm_rendezvous(os.environ)
    if rendezvous is None:
        raise ConfigError(
            f"RANK={who.rank} and WORLD_SIZE={who.world_size} are set, but not both of MASTER_ADDR and MASTER_PORT, so the "
            "ranks cannot meet. Start the script by python -m harness.launch, torchrun or srun."
        )
    host, port = rendezvous
    # RANK and its kin too, which srun does not set: the script and its libraries may read them.
    os.environ.update({**who.variables(), "MASTER_PORT": str(port), "MASTER_ADDR": os.environ.get("MASTER_ADDR", host)})


def _is_one_machine(who: RankEnvironment | None) -> bool:
    if who is None:
        return True
    # Where nothing says how many ranks are on this machine, local_world_size counts them all.
    return "LOCAL_WORLD_SIZE" in os.environ and who.local_world_size == who.world_size


@contextmanager
def joining(one_machine: bool) -> Iterator[None]:
    """Set, for the time of joining, what the user has not set: on one machine loopback, because its name may not resolve."""
    wanted = {INIT_BARRIER: "1"} | ({"GLOO_SOCKET_IFNAME": loopback_interface()} if one_machine else {})
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]
