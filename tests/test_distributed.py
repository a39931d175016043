"""A script's view of the ranks: under spawn, under torchrun's and srun's environment, and in a plain process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import harness
import harness.distributed
import harness.rank.group
from harness.entrypoints.spawn import spawn
from harness.rank.group import ParallelEnv
from harness.run.environment import slurm_rendezvous, without_stale
from tests import calls
from tests.processes import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
has_gpu = os.path.exists("/dev/nvidia0")


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets variables, in an environment without any that a launcher may have left."""
    for name in set(os.environ) - set(without_stale(os.environ)):
        monkeypatch.delenv(name)

    def give(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return give


def test_importing_costs_no_torch():
    code = (
        "import sys, time, harness, harness.distributed as dist\n"
        "assert dir(harness) and dist.get_rank() == 0 and dist.ParallelEnv().rank == 0 and dist.spawn is harness.spawn\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "False\n"


def test_public_names():
    assert all(hasattr(harness, name) for name in harness.__all__)
    assert all(hasattr(harness.distributed, name) for name in harness.distributed.__all__)
    assert harness.spawn is harness.distributed.spawn and harness.DataParallel is harness.distributed.DataParallel
    for module in (harness, harness.distributed):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            _ = module.nothing


def test_before_initialisation(environment):
    environment(RANK="1", WORLD_SIZE="4")
    assert (harness.get_rank(), harness.get_world_size()) == (0, 1)


def test_plain_process(environment):
    environment()
    env = ParallelEnv()
    assert (env.rank, env.local_rank, env.world_size, env.nranks) == (0, 0, 1, 1)
    assert env.trainer_endpoints == [env.current_endpoint] == ["127.0.0.1:0"]


def test_environment_of_torchrun(environment):
    environment(RANK="5", LOCAL_RANK="1", WORLD_SIZE="8", LOCAL_WORLD_SIZE="4", MASTER_ADDR="10.0.0.1", MASTER_PORT="2000")
    env = ParallelEnv()
    assert (env.rank, env.local_rank, env.world_size, env.nranks) == (5, 1, 8, 8)
    assert env.current_endpoint == "10.0.0.1:2005"
    assert env.trainer_endpoints == [f"10.0.0.1:{2000 + rank}" for rank in range(8)]
    assert repr(env) == "ParallelEnv(rank=5, world_size=8, local_rank=1)"


@pytest.mark.skipif(has_gpu, reason="there is a GPU")
def test_device_on_the_cpu(environment):
    environment(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    env = ParallelEnv()
    assert (env.device_type, env.device_id, env.dev_id) == ("cpu", 0, 0)


def test_device_of_an_accelerator(environment, monkeypatch):
    environment(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    monkeypatch.setattr("harness.rank.group.may_have_accelerator", lambda: True)
    monkeypatch.setattr("harness.rank.group._machine", lambda: harness.rank.group.Machine(devices={"cuda": 2}))
    env = ParallelEnv()
    assert (env.device_type, env.device_id, env.dev_id) == ("cuda", 1, 1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1"}, r"cannot tell which rank it is: WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, r"cannot tell which rank it is: RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK=2 does not lie in 0 <= RANK < WORLD_SIZE=2"),
    ],
)
def test_incomplete_environment(environment, variables, message):
    environment(**variables)
    with pytest.raises(harness.ConfigError, match=message):
        harness.init_parallel_env()


def test_ranks_that_cannot_meet(environment):
    environment(RANK="0", WORLD_SIZE="2")
    with pytest.raises(
        harness.ConfigError, match=r"RANK=0 and WORLD_SIZE=2 are set, but not both of MASTER_ADDR and MASTER_PORT"
    ):
        harness.init_parallel_env("gloo")


def test_unknown_backend(environment):
    environment()
    with pytest.raises(harness.BackendUnavailable, match=r"^backend=glo is unknown\. Backends are auto, gloo, nccl, bkcl"):
        harness.init_parallel_env("glo")


def test_another_group_than_the_one_remembered(environment, monkeypatch):
    import torch.distributed as dist

    environment()
    left = ParallelEnv()
    monkeypatch.setattr("harness.rank.group._joined", [left])
    monkeypatch.setattr("harness.rank.group._group_exists", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    found = harness.init_parallel_env()
    assert (left.world_size, found.rank, found.world_size) == (1, 1, 2)
    assert harness.init_parallel_env() is found


def test_group_of_a_script_is_left_before_the_interpreter_goes():
    script = (
        "import atexit, harness\n"
        "atexit.register(lambda: print(harness.rank.group._group_exists()))\n"
        "print(harness.init_parallel_env('gloo').world_size, harness.rank.group._group_exists())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["1 True", "False"]


# --- srun --------------------------------------------------------------------------------------------------------------

STEP = {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77"}


def test_environment_of_srun(environment):
    environment(**STEP, SLURM_STEP_TASKS_PER_NODE="2(x2)")
    env = ParallelEnv()
    assert (env.rank, env.local_rank, env.world_size) == (2, 0, 4)


def test_batch_script_is_a_plain_process(environment):
    environment(SLURM_PROCID="0", SLURM_JOB_ID="77", SLURM_NTASKS="4", SLURM_STEP_ID="")
    assert ParallelEnv().world_size == 1


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node7", "node7"),
        ("node[07-09,12],other3", "node07"),
        ("a-1,b-2", "a-1"),
        ("gpu-[3,5]", "gpu-3"),
        ("n1[001-002]", "n1001"),
    ],
)
def test_first_machine_of_a_step(nodes, host):
    found = slurm_rendezvous({**STEP, "SLURM_STEP_NODELIST": nodes, "SLURM_STEP_NUM_NODES": "2"})
    assert found is not None and found[0] == host and 15000 <= found[1] < 30000


def test_rendezvous_of_srun():
    one = {**STEP, "SLURM_JOB_NODELIST": "node7"}
    assert slurm_rendezvous({**one, "SLURM_STEP_NUM_NODES": "1"})[0] == "127.0.0.1"
    assert slurm_rendezvous(one)[1] != slurm_rendezvous({**one, "SLURM_STEP_ID": "4"})[1]
    assert slurm_rendezvous({"SLURM_JOB_ID": "77"}) is None and slurm_rendezvous({}) is None


# --- joining -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_second_call_returns_the_same_and_changes_nothing():
    same, messages, rank, size = spawn(calls.twice, nprocs=2, backend="gloo").return_values()[1]
    assert same and (rank, size) == (1, 2)
    assert messages == [
        "init_parallel_env(backend='nccl') changes nothing: the group exists already, with backend 'gloo'.",
        "prepare_context() is an old name: call init_parallel_env().",
    ]


@pytest.mark.ranks
@pytest.mark.skipif(has_gpu, reason="there is a GPU")
def test_plain_process_is_one_rank_at_once_and_can_join_again():
    assert spawn(calls.plain_process, nprocs=1).return_values() == [(0, 1, 1.0, True, False, "gloo")]


@pytest.mark.ranks
def test_group_of_the_scripts_own_is_adopted():
    assert spawn(calls.adopts, nprocs=2, backend="gloo").return_values() == [(1, 2, "cpu"), (0, 2, "cpu")]


@pytest.mark.ranks
def test_backend_that_contradicts_the_launchers():
    message = r"init_parallel_env\(backend='nccl'\) contradicts the launcher, which was asked for backend=gloo"
    with pytest.raises(harness.ConfigError, match=message):
        spawn(calls.init_with, args=("nccl",), nprocs=1, backend="gloo")


@pytest.mark.ranks
def test_backend_asked_for_in_the_script_alone():
    assert spawn(calls.init_with, args=("gloo",), nprocs=1).return_values() == [
        "ParallelEnv(rank=0, world_size=1, local_rank=0)"
    ]


@pytest.mark.ranks
def test_the_supervisor_speaks_before_a_collective_times_out():
    assert spawn(calls.group_timeout, nprocs=1, backend="gloo", timeout_s=70).return_values() == [100.0]


SCRIPT = """\
import harness
env = harness.init_parallel_env("gloo")
import torch
total = torch.ones(1)
torch.distributed.all_reduce(total)
print(env.rank, env.world_size, env.local_rank, total.item())
"""


@pytest.mark.ranks
def test_script_under_srun_without_a_rendezvous(tmp_path):
    """Two processes with the environment that srun gives; Slurm itself is not needed for that."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = str(os.getpid())
    common = {**without_stale(os.environ), **STEP, "SLURM_JOB_ID": job, "SLURM_STEP_NUM_TASKS": "2", "PYTHONPATH": str(ROOT)}
    common |= {"SLURM_STEP_NODELIST": "nowhere", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [process.communicate(timeout=PATIENCE_S)[0] for process in ranks] == ["0 2 0 2.0\n", "1 2 1 2.0\n"]


# --- bkcl: the path of a vendor's plugin, which torch loads through the entry point torch.backends --------------------

PLUGIN = """\
def autoload():
    import torch.distributed as dist

    def create(store, rank, size, timeout):
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    dist.Backend.register_backend("bkcl", create, devices=["cpu"])
"""

TRAIN = """\
import sys
import harness, torch


def train():
    env = harness.init_parallel_env()
    torch.manual_seed(env.rank)
    model = harness.DataParallel(torch.nn.Linear(3, 1))
    (model(torch.full((2, 3), 1.0 + env.rank)).sum()).backward()
    weights = sum(p.sum().item() for p in model.parameters())
    return torch.distributed.get_backend(), env.device_type, weights, [p.grad.tolist() for p in model.parameters()]


if __name__ == "__main__":
    if "spawn" in sys.argv:
        for value in harness.spawn(train, nprocs=2, backend="bkcl").return_values():
            print(value)
    else:
        print(train())
"""


@pytest.fixture
def plugin(tmp_path):
    """Return the environment of a process that finds an installed plugin which registers bkcl."""
    info = tmp_path / "site" / "kunlun_trial-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kunlun-trial\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nkunlun_trial = kunlun_trial:autoload\n")
    (tmp_path / "site" / "kunlun_trial.py").write_text(PLUGIN)
    (tmp_path / "train.py").write_text(TRAIN)
    return {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'site'}"}


def run(tmp_path, plugin, *arguments):
    done = subprocess.run(
        [sys.executable, *arguments], env=plugin, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.ranks
def test_training_on_a_process_group_named_bkcl(tmp_path, plugin):
    first, second = run(tmp_path, plugin, "train.py", "spawn")
    assert first == second and first.startswith("('bkcl', 'cpu', ") and first.endswith("[[[3.0, 3.0, 3.0]], [2.0]])")
    assert run(tmp_path, plugin, "-m", "harness.launch", "--nprocs=2", "--backend=bkcl", "train.py") == [first]


def test_bkcl_for_a_device_that_is_not_there(tmp_path, plugin):
    (tmp_path / "site" / "kunlun_trial.py").write_text(PLUGIN.replace("cpu", "xpu"))
    command = [sys.executable, "-m", "harness.launch", "--nprocs=2", "--backend=bkcl", "train.py"]
    done = subprocess.run(command, env=plugin, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 1
    instead = "" if has_gpu else "gloo.\n"
    assert f"one XPU per rank: --nprocs=2, but 0 XPUs are visible. Use --backend={instead}" in done.stderr, done.stderr


@pytest.mark.ranks
@pytest.mark.skipif(has_gpu, reason="there is a GPU")
def test_auto_does_not_take_bkcl_without_an_xpu(tmp_path, plugin):
    (line,) = run(tmp_path, plugin, "-m", "harness.launch", "--nprocs=1", "train.py")
    assert line.startswith("('gloo', 'cpu', ")
