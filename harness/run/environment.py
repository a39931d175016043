"""The environment of a rank: the only place that reads or makes ``RANK``, ``WORLD_SIZE``, thread counts and their kin."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import ConfigError, HarnessError, Problem
from harness.run.plan import RunPlan

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""What math libraries read their thread count from."""

MOST_THREADS = 4096
"""Of one rank: systems refuse to start many more, and the rank would die of it."""

RUN_DIR = "HARNESS_RUN_DIR"
"""Names the run's folder; set in every rank that this harness started."""

INIT_BARRIER = "TORCH_DIST_INIT_BARRIER"
"""Has torch's ``init_process_group`` return only when all ranks have joined."""

PARENT = "HARNESS_PARENT"
"""Process id of a rank's parent, with which it dies."""

UNSHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Keeps torch's elastic agent from serving a store; of no meaning to its ranks. Undocumented: a test sees what listens."""

# Of another launcher, or of an outer run: a rank would take them for its own, or a library for its rendezvous.
_STALE = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|TORCH_NCCL_ASYNC_ERROR_HANDLING"
    r"|HARNESS_.*|(PMI|OMPI_COMM|PMIX)_.*"
)


@dataclass(frozen=True)
class RankEnvironment:
    """Who this process is among the ranks. ``local_*`` count within one machine."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> RankEnvironment | None:
        """Return what ``RANK`` and its kin say, else what ``srun`` says; None in a plain process.

        Raises:
            ValueError: Only a part of the variables is set, or they contradict each other.
        """
        env = os.environ if environ is None else environ
        if "RANK" in env or "WORLD_SIZE" in env:
            return cls._from_torch(env)
        # A batch script and a shell inside an allocation carry SLURM_PROCID=0 too, but no numbered step.
        if env.get("SLURM_STEP_ID", "").isdigit() and int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1"))) > 1:
            return cls._from_slurm(env)
        return None

    @classmethod
    def _from_torch(cls, env: Mapping[str, str]) -> RankEnvironment:
        missing = [name for name in ("RANK", "WORLD_SIZE") if name not in env]
        if missing:
            raise ValueError(f"{missing[0]} is not set, but its counterpart is: set both RANK and WORLD_SIZE, or neither")
        rank, world_size = int(env["RANK"]), int(env["WORLD_SIZE"])
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK={rank} does not lie in 0 <= RANK < WORLD_SIZE={world_size}")
        # Ranks that are started by hand, on one machine, may have no more than those two.
        return cls(rank, int(env.get("LOCAL_RANK", rank)), world_size, int(env.get("LOCAL_WORLD_SIZE", world_size)))

    @classmethod
    def _from_slurm(cls, env: Mapping[str, str]) -> RankEnvironment:
        world_size = int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1")))
        counts = _counts(env.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)))
        # Where Slurm gives no list, its one count stands for every machine.
        local_world_size = counts[min(int(env.get("SLURM_NODEID", "0")), len(counts) - 1)]
        return cls(int(env["SLURM_PROCID"]), int(env.get("SLURM_LOCALID", "0")), world_size, local_world_size)

    @property
    def slot(self) -> int:
        """The number of this rank's files: its rank, or on one of several machines, which share no folder, its number there."""
        return self.rank if self.is_on_one_machine else self.local_rank

    @property
    def is_on_one_machine(self) -> bool:
        """True where every rank is on this machine."""
        return self.local_world_size >= self.world_size

    def variables(self) -> dict[str, str]:
        """Return the variables that torch and its users read."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            # torch's name for the number of a machine.
            "GROUP_RANK": str(self.rank // max(1, self.local_world_size)),
        }


def slurm_rendezvous(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return where the ranks of a job step of Slurm meet: its first machine, and a port from the job's number; None outside.

    The port lies in 15000..29999, below those that systems hand out by themselves. Steps of one job get different ones.
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    job = environ.get("SLURM_JOB_ID", "")
    if not nodes or not job.isdigit():
        return None
    step = environ.get("SLURM_STEP_ID", "0")
    # Times 31, or step 1 of a job would share a port with step 0 of the next one.
    port = 15000 + (int(job) * 31 + (int(step) if step.isdigit() else 0)) % 15000
    # A machine's own name may not resolve, and loopback needs none.
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1", port
    # node[07-09,12],other3: the first machine is node07.
    first = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    return ("".join(part for part in first.groups() if part) if first else nodes), port


def _counts(text: str) -> list[int]:
    """Return what ``4(x2),3`` stands for: 4, 4, 3."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]


def without_stale(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without what another launcher may have left in it."""
    return {name: value for name, value in environ.items() if not _STALE.fullmatch(name)}


def common_environment(environ: Mapping[str, str], plan: RunPlan, run_dir: Path) -> dict[str, str]:
    """Return what all ranks of a run have in common, whatever starts them.

    Args:
        environ: Of the parent; left as it is. The plan's thread count and settings win over it.
    """
    # In this order: what the job itself sets is no leftover, whatever its name.
    env = without_stale(environ) | dict(plan.settings)
    # Before a rank exists: the libraries read these once, when they are loaded.
    env |= {name: str(plan.threads) for name in THREAD_VARIABLES}
    if plan.devices:
        # LOCAL_RANK then counts these devices, as it does everywhere else.
        env["XPU_VISIBLE_DEVICES" if plan.device == "xpu" else "CUDA_VISIBLE_DEVICES"] = ",".join(plan.devices)
    # Else sets of texts have another order in each rank, and so has all that goes through one.
    if env.get("PYTHONHASHSEED", "random") == "random":
        env["PYTHONHASHSEED"] = "0"
    env["PYTHONPATH"] = import_path(env)
    # Else a rank that is done at once would close connections that others are still making.
    env.setdefault(INIT_BARRIER, "1")
    if plan.num_machines == 1:
        # One machine needs no other interface, and the host name may not resolve.
        env.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    return env | {RUN_DIR: str(run_dir)}


def import_path(environ: Mapping[str, str]) -> str:
    """Return PYTHONPATH for a fresh interpreter that has to find this package before it knows the parent's ``sys.path``."""
    inherited = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.pathsep.join(dict.fromkeys([*inherited, str(Path(__file__).resolve().parents[2])]))


def loopback_interface() -> str:
    """Return the name of the loopback interface."""
    return "lo" if os.path.exists("/sys/class/net/lo") or os.uname().sysname == "Linux" else "lo0"


def require_loopback() -> None:
    """See to it that processes of this machine reach each other.

    Raises:
        HarnessError: They do not, so that ranks would wait for each other in vain.
    """
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            # A firewall may drop what is sent, without a word.
            client.settimeout(5)
            # Where the interface is down, binding works and connecting does not.
            client.connect(server.getsockname())
    except OSError as error:
        reason = error.strerror or error
        raise HarnessError(f"127.0.0.1 cannot be used: {reason}. Bring the interface {loopback_interface()} up.") from None


def wanted_threads(environ: Mapping[str, str], asked: int | str, cores: int, local_ranks: int) -> int:
    """Return the threads of each rank: as asked; for ``auto`` the user's ``OMP_NUM_THREADS``, else the cores shared out.

    Raises:
        ConfigError: ``asked`` is neither ``auto`` nor a number from 1 to :data:`MOST_THREADS`.
    """
    if asked != "auto":
        if not str(asked).isdecimal() or int(asked) < 1:
            raise ConfigError(Problem("{threads}={asked!r} must be auto or at least 1.", asked=asked))
        if int(asked) > MOST_THREADS:
            raise ConfigError(Problem("{threads}={asked} must be at most {most}.", asked=asked, most=MOST_THREADS))
        return int(asked)
    # OpenMP takes a list too, a number for each level of nesting.
    from_user = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if from_user.isdigit() and int(from_user) > 0:
        return int(from_user)
    return max(1, cores // local_ranks)


def usable_cores() -> int:
    """Return how many cores this process may use: its affinity, or its cgroup's quota where that is less; at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A container's quota limits time and not cores, so that the affinity does not show it.
    return max(1, min(affinity, math.ceil(cgroup_quota() or affinity)))


def cgroup_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Return the smallest CPU quota on the way from this process's cgroup to the root, in cores; None without one."""
    quotas = [quota for folder in _cgroup_folders(root, membership) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _cgroup_folders(root: Path, membership: Path) -> list[Path]:
    # The roots in any case: inside a container, the path below may be one of the host's, which is not there.
    folders = [root, root / "cpu"]
    lines = membership.read_text().splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 1 has a tree for each controller; the line of version 2, which has one tree, names none.
        base = root if controllers == "" else root / "cpu"
        if controllers == "" or "cpu" in controllers.split(","):
            inside = base / path.lstrip("/")
            folders += [inside, *(parent for parent in inside.parents if parent.is_relative_to(base))]
    return folders


def _quota_of(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
    except (OSError, ValueError):
        return None
    # Where there is no limit, version 2 says max, and version 1 says -1.
    return int(quota) / int(period) if quota.isdigit() and int(period) else None


def current_folder() -> str:
    """Return the current folder.

    Raises:
        ConfigError: It has been removed since this process, or its shell, went there.
    """
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("The current folder has been removed: nothing can run there. Change to another.") from None
