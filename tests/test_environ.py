"""The environment of ranks: who they are, how many threads, how many cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.run.environment import (
    RankEnvironment,
    cgroup_quota,
    common_environment,
    import_path,
    wanted_threads,
    without_stale,
)
from harness.run.plan import RunPlan, Task


def test_plain_process_is_no_rank() -> None:
    assert RankEnvironment.read({"PATH": "/bin"}) is None


def test_torch_variables() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    who = RankEnvironment.read(env)
    assert who == RankEnvironment(5, 1, 8, 4)
    assert who is not None and who.variables() == {**env, "GROUP_RANK": "1"}


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set, but its counterpart is"),
        ({"WORLD_SIZE": "2"}, "RANK is not set, but its counterpart is"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 does not lie in 0 <= RANK < WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 does not lie"),
    ],
)
def test_contradictions_are_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankEnvironment.read(env)


SRUN = {
    **{"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
    **{"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"},
}


def test_srun_variables() -> None:
    assert RankEnvironment.read(SRUN) == RankEnvironment(5, 1, 8, 4)


@pytest.mark.parametrize(
    ("per_node", "node", "expected"),
    [("4,2", "0", 4), ("4,2", "1", 2), ("4(x2),3", "2", 3), ("4(x2),3", "1", 4), ("6", "0", 6)],
)
def test_srun_with_uneven_nodes(per_node: str, node: str, expected: int) -> None:
    who = RankEnvironment.read({**SRUN, "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": node})
    assert who is not None and who.local_world_size == expected


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "batch"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_batch_script_is_no_rank(env: dict[str, str]) -> None:
    assert RankEnvironment.read(env) is None


def test_torch_variables_win_over_srun() -> None:
    who = RankEnvironment.read({**SRUN, "SLURM_PROCID": "0", "RANK": "1", "WORLD_SIZE": "2"})
    assert who == RankEnvironment(1, 1, 2, 2)


def test_stale_values_go_and_others_stay() -> None:
    stale = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME"}
    stale |= {"ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "HARNESS_RUN_DIR", "OMPI_COMM_WORLD_RANK"}
    kept = {"PATH", "SLURM_PROCID", "MY_RANK", "RANKS", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MASTER"}
    assert set(without_stale(dict.fromkeys(stale | kept, "1"))) == kept


def test_common_environment(tmp_path: Path) -> None:
    before = {"RANK": "3", "OMP_NUM_THREADS": "9", "PYTHONPATH": "a:b", "CUDA_VISIBLE_DEVICES": "4,5,6,7", "KEEP": "1"}
    given = dict(before)
    plan = RunPlan(Task("script"), threads=2, devices=("4", "5"), device="cuda", settings={"MINE": "x", "OMP_NUM_THREADS": "8"})
    env = common_environment(given, plan, tmp_path)
    assert given == before
    assert "RANK" not in env
    assert (env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"], env["MINE"], env["KEEP"]) == ("2", "2", "x", "1")
    assert (env["CUDA_VISIBLE_DEVICES"], env["PYTHONHASHSEED"], env["GLOO_SOCKET_IFNAME"]) == ("4,5", "0", "lo")
    assert env["PYTHONPATH"].split(":")[:2] == ["a", "b"]


@pytest.mark.parametrize(("given", "expected"), [(None, "0"), ("random", "0"), ("7", "7")])
def test_hash_seed(given: str | None, expected: str, tmp_path: Path) -> None:
    before = {} if given is None else {"PYTHONHASHSEED": given}
    assert common_environment(before, RunPlan(Task("script")), tmp_path)["PYTHONHASHSEED"] == expected


def test_users_interface_stays(tmp_path: Path) -> None:
    env = common_environment({"GLOO_SOCKET_IFNAME": "eth7"}, RunPlan(Task("script")), tmp_path)
    assert env["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    ("env", "asked", "cores", "ranks", "threads"),
    [
        ({}, "auto", 8, 2, 4),
        ({}, "auto", 2, 4, 1),
        ({}, "auto", 7, 2, 3),
        ({"OMP_NUM_THREADS": "3"}, "auto", 8, 2, 3),
        ({"OMP_NUM_THREADS": "3,2"}, "auto", 8, 2, 3),
        ({"OMP_NUM_THREADS": "0"}, "auto", 8, 2, 4),
        ({"OMP_NUM_THREADS": "nonsense"}, "auto", 8, 2, 4),
        ({"OMP_NUM_THREADS": "3"}, 5, 8, 2, 5),
    ],
)
def test_threads(env: dict[str, str], asked: int | str, cores: int, ranks: int, threads: int) -> None:
    assert wanted_threads(env, asked, cores, ranks) == threads


@pytest.mark.parametrize("asked", [0, -1, "0", "many", 1.5, None])
def test_wrong_threads_are_refused(asked: int | str) -> None:
    with pytest.raises(ValueError, match=r"threads=.* must be auto or at least 1"):
        wanted_threads({}, asked, 8, 2)


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "membership", "quota"),
    [
        ({"cpu.max": "100000 100000\n"}, "0::/\n", 1.0),
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, "0::/a/b\n", 1.5),
        ({"a/cpu.max": "400000 100000\n", "a/b/cpu.max": "50000 100000\n"}, "0::/a/b\n", 0.5),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n", 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n", None),
        (
            {"cpu/docker/x/cpu.cfs_quota_us": "300000\n", "cpu/docker/x/cpu.cfs_period_us": "100000\n"},
            "4:cpu,cpuacct:/docker/x\n9:memory:/docker/x\n",
            3.0,
        ),
        ({"cpu.max": "nonsense\n"}, "0::/\n", None),
        ({}, "0::/gone\n", None),
    ],
)
def test_cgroup_quota(files: dict[str, str], membership: str, quota: float | None, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text(membership)
    assert cgroup_quota(tree(tmp_path / "cgroup", files), tmp_path / "membership") == quota


def test_no_cgroup_at_all(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path / "none", tmp_path / "no membership") is None


def test_the_ranks_search_path_leads_to_this_package_and_not_into_it():
    folder = Path(import_path({}).split(os.pathsep)[-1])
    assert (folder / "harness" / "__init__.py").exists()
