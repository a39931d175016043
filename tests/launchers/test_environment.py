"""What every rank gets: variables, folder, modules, threads; and what nobody else gets."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from harness.launchers import registry
from harness.launchers.inline import _tee
from harness.rank.context import recorder
from harness.rank.lifetime import sign
from harness.rank.process import using_temp_dir
from harness.run.environment import usable_cores, wanted_threads
from harness.run.folder import RunDir
from harness.run.launch_methods import TRAITS
from tests.launchers.starting import STARTS, Echo

pytestmark = pytest.mark.ranks

LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def test_variables_folder_modules(any_how: str, echo: Echo, monkeypatch: pytest.MonkeyPatch, odd_path: Path) -> None:
    stale = {"RANK": "5", "LOCAL_RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "3", "ROLE_RANK": "5"}
    stale |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0"}
    stale |= {"TORCHELASTIC_RUN_ID": "old", "TORCHELASTIC_USE_AGENT_STORE": "False", "HARNESS_PARENT": "1"}
    own = {"GLOO_SOCKET_IFNAME": "eth7", "MY_OWN": "a=b, 'c' \"d\" $e", "PYTHONHASHSEED": "random"}
    for name, value in (stale | own).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(odd_path)
    before = dict(os.environ)
    echoed = echo(any_how, {"*": "ok"}, threads=3, folder=odd_path / "run", settings={"FROM_JOB": "1", "MY_OWN2": "x"})
    assert echoed.result.status == "ok", echoed.result.message
    assert dict(os.environ) == before
    told = [echoed.told("echo", rank) for rank in (0, 1)]
    for rank, one in enumerate(told):
        env = one["environ"]
        exact = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
        exact["OMP_NUM_THREADS"] = 3
        assert {name: env.get(name) for name in exact} == {name: str(value) for name, value in exact.items()}
        assert env["MASTER_ADDR"] == "127.0.0.1" and env["MASTER_PORT"] not in ("29500", "0")
        assert {name: env[name] for name in ("GLOO_SOCKET_IFNAME", "MY_OWN", "FROM_JOB", "SLURM_PROCID")} == {
            **{name: own[name] for name in ("GLOO_SOCKET_IFNAME", "MY_OWN")},
            "FROM_JOB": "1",
            "SLURM_PROCID": "0",
        }
        assert (one["cwd"], one["stdin"]) == (str(odd_path), "")
        assert set(map(os.path.abspath, sys.path)) <= set(one["path"])
    assert told[0]["hash"] == told[1]["hash"]
    assert told[0]["environ"]["MASTER_PORT"] == told[1]["environ"]["MASTER_PORT"]


def test_hash_seed_is_the_same_under_every_launcher(echo: Echo) -> None:
    hashes = {how: echo(how, {"*": "ok"}, nprocs=1).told("echo", 0)["hash"] for how in ("spawn", "launch")}
    assert len(set(hashes.values())) == 1


def test_module_in_the_working_folder_hides_none_of_ours(echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("harness", "signal", "ctypes", "selectors"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    for how in ("launch", "torchrun"):
        assert echo(how, {"*": "nothing"}).result.message == ""


@pytest.mark.parametrize("nprocs", [1, 2, 4])
def test_threads_are_shared_out_alike(nprocs: int, echo: Echo) -> None:
    threads = wanted_threads({}, "auto", 4, nprocs)
    assert threads == 4 // nprocs
    seen = {}
    for how in ("spawn", "launch", "torchrun") if nprocs == 2 else ("spawn",):
        echoed = echo(how, {"*": "threads"}, nprocs=nprocs, threads=threads)
        told = [echoed.told("threads", rank) for rank in range(nprocs)]
        assert all(one["torch"] == threads and one["omp"] == str(threads) for one in told)
        assert all(count == min(threads, usable_cores()) for one in told for count in one["blas"])
        seen[how] = told
    assert len({str(told) for told in seen.values()}) == 1


@pytest.mark.parametrize("how", ["spawn", "launch", "torchrun"])
def test_nothing_listens_beyond_loopback(how: str, echo: Echo) -> None:
    echoed = echo(how, {"*": "listen"})
    assert echoed.result.status == "ok", echoed.result.message
    told = [echoed.told("listen", rank) for rank in (0, 1)]
    assert [one["sum"] for one in told] == [2.0, 2.0]
    sockets = {address for one in told for address in one["sockets"]}
    assert sockets and sockets <= LOOPBACK


def test_settings_of_a_job_reach_the_warm_server_and_are_gone_afterwards(echo: Echo) -> None:
    with_setting = echo("spawn", {"*": "ok"}, settings={"ONLY_ONCE": "1"})
    after = echo("spawn", {"*": "ok"})
    assert with_setting.told("echo", 1)["environ"]["ONLY_ONCE"] == "1" and with_setting.told("echo", 1)["torch"]
    assert "ONLY_ONCE" not in after.told("echo", 1)["environ"]


@pytest.mark.parametrize("how", ["spawn", "launch"])
def test_data_loader_workers_leave_nothing(how: str, echo: Echo) -> None:
    echoed = echo(how, {"*": "epoch"})
    assert echoed.result.status == "ok", echoed.result.message


@pytest.mark.parametrize("how", ["launch", "inline"])
def test_sockets_of_multiprocessing(how: str, echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends with the run keeps them in the run's temporary folder; one that goes on, where it always did."""
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(tmp_path))
    echoed = echo(how, {"*": "temporary folders"}, nprocs=1)
    assert echoed.result.status == "ok", echoed.result.message
    assert Path(echoed.told("child", 0)).name.startswith("harness-")
    assert (echoed.told("own", 0) == str(tmp_path)) == (how == "inline")
    assert multiprocessing.current_process()._config["tempdir"] == str(tmp_path)


def test_a_temporary_folder_that_is_gone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "processes").mkdir()
    run, config = RunDir(tmp_path), dict(multiprocessing.current_process()._config)
    run.temp_dir.write_text(str(tmp_path / "gone"))
    with using_temp_dir(run):
        sign()
        assert dict(multiprocessing.current_process()._config) == config
    assert not list((tmp_path / "processes").iterdir())


def test_twenty_starts_leave_nothing(echo: Echo) -> None:
    echo("spawn", {"*": "nothing"})
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(20):
        behaviour, status = ("nothing", "ok") if number % 3 else ("os._exit(7)", "failed")
        assert echo("spawn", {"*": behaviour}).result.status == status
    for how in ("spawn-fork", "launch", "torchrun", "inline"):
        echo(how, {"*": "nothing"})
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors


def test_inline_rank_leaves_no_store(echo: Echo) -> None:
    finders = list(sys.meta_path)
    echo("inline", {"*": "nothing"})
    assert sys.meta_path == finders


def test_inline_rank_is_forgotten(echo: Echo) -> None:
    echo("inline", {"*": "nothing"})
    assert recorder() is None


def test_four_runs_side_by_side(tmp_path: Path) -> None:
    program = (
        "import sys; from tests.launchers.starting import echo_plan; from harness.entrypoints.run_job import run_job;"
        "from harness.run.folder import RunDir\n"
        "print(run_job(echo_plan(sys.argv[1], {'*': 'listen'}), RunDir(sys.argv[2])).status)"
    )
    methods = ["spawn", "launch", "torchrun", "launch"]
    started = [
        subprocess.Popen([sys.executable, "-c", program, how, str(tmp_path / str(number))], stdout=subprocess.PIPE, text=True)
        for number, how in enumerate(methods)
    ]
    assert [process.communicate()[0] for process in started] == ["ok\n"] * len(methods)


@pytest.mark.parametrize("how", ["launch", "inline"])
def test_exit_codes_survive_an_ignored_sigchld(how: str, echo: Echo) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert echo(how, {"*": "sys.exit(3)"}, nprocs=1).result.exit_code == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_all_launchers_are_covered() -> None:
    assert {method for method, _ in STARTS.values()} == set(registry.LAUNCHERS) - {"inline"}
    assert set(TRAITS) <= set(registry.LAUNCHERS)


def test_a_log_handler_made_by_an_inline_rank_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "log").open("w") as log, _tee(log):
        handler = logging.StreamHandler(sys.stdout)
        handler.emit(logging.makeLogRecord({"msg": "in it"}))
    handler.emit(logging.makeLogRecord({"msg": "after it"}))
    assert capsys.readouterr() == ("in it\nafter it\n", "")
    assert (tmp_path / "log").read_text() == "in it\n"


def test_no_loopback_is_said_before_ranks_start(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: socket.socket, address: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    echoed = echo("launch", {"*": "nothing"})
    assert echoed.result.message == "127.0.0.1 cannot be used: Network is unreachable. Bring the interface lo up."
    assert not echoed.run.records(0).exists()


@pytest.mark.parametrize(("length", "is_kept"), [(72, True), (73, False), (120, False)])
def test_sockets_fit_whatever_the_temporary_folder(
    length: int, is_kept: bool, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(tempfile.mkdtemp(dir="/tmp"))
    folder = base / ("x" * (length - len(str(base)) - 1))
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        echoed = echo("launch", {"*": "epoch"} if length == 120 else {"*": "temporary folders"}, nprocs=1)
    assert echoed.result.status == "ok", echoed.result.message
    assert ["is too long: paths of sockets have at most 107 bytes" in str(warning.message) for warning in caught] == (
        [] if is_kept else [True]
    )
    if length < 120:
        assert Path(echoed.told("child", 0)).is_relative_to(folder) == is_kept
        assert len(f"{echoed.told('child', 0)}/listener-12345678") <= 107
    shutil.rmtree(base)
