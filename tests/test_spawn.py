"""The function API: what it takes, what it gives back, and how it fails."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import harness
from harness import BackendUnavailable, ConfigError, RankFailed, RunTimeout
from harness.entrypoints.exceptions import RankTraceback
from harness.entrypoints.pickling import pickled
from harness.entrypoints.settings import Settings, plan_of
from harness.entrypoints.spawn import spawn
from harness.launchers import registry
from harness.run.plan import Task
from tests import calls
from tests.processes import PATIENCE_S, alive, descendants, scaled, wait_until

ROOT = Path(__file__).resolve().parent.parent
has_gpu = os.path.exists("/dev/nvidia0")


def run_script(path: Path, *arguments: str, **settings) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings.pop("environment", {})}
    command = [sys.executable, *arguments, str(path)] if path.name != "-" else [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **settings)


# --- refused before any rank starts ------------------------------------------------------------------------------------


def test_lambda():
    with pytest.raises(ConfigError, match=r"^spawn\(\) cannot hand <lambda> to its ranks: it is a lambda\. Define it with def"):
        spawn(lambda: 1, nprocs=2)


def test_nested_function():
    def inner():
        pass

    with pytest.raises(ConfigError, match=r"cannot hand inner to its ranks: it is defined inside another function\."):
        spawn(inner, nprocs=2)


def test_argument_that_cannot_be_pickled():
    with pytest.raises(ConfigError, match=r"cannot hand args\[1\] \(a lock\) to its ranks: it cannot be pickled"):
        spawn(calls.echo, args=(1, threading.Lock()), nprocs=2)


@pytest.mark.parametrize("args", [5, "abc", {"a": 1}])
def test_args_that_are_no_tuple(args):
    with pytest.raises(ConfigError, match=r"must be a tuple of the function's arguments: args=\("):
        spawn(calls.echo, args=args, nprocs=2)


def test_function_that_expects_a_rank():
    with pytest.raises(ConfigError, match=r"wait_for\(path\) cannot be called with the 0 arguments.*spawn\(\) adds no rank"):
        spawn(calls.wait_for, nprocs=2)


def test_something_that_is_no_function():
    with pytest.raises(ConfigError, match=r"needs a function as its first argument, and got 5"):
        spawn(5, nprocs=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nprocs": 0}, r"^nprocs=0 must be at least 1, or -1 for every visible device"),
        ({"nprocs": -2}, r"^nprocs=-2 must be at least 1, or -1"),
        ({"nprocs": 1.5}, r"^nprocs=1\.5 must be a whole number"),
        ({"nprocs": True}, r"^nprocs=True must be a whole number"),
        ({"backend": "gloo", "gpus": "0", "nprocs": 1}, r"backend=gloo runs ranks on the CPU and cannot honour gpus=0"),
        ({"backend": "gloo", "selected_gpus": "0", "nprocs": 1}, r"cannot honour selected_gpus=0"),
        ({"backend": "gloo", "xpus": "0", "nprocs": 1}, r"cannot honour xpus=0"),
        ({"backend": "nccl", "xpus": "0", "nprocs": 1}, r"xpus=0 goes with backend=bkcl, not with backend=nccl"),
        ({"backend": "bkcl", "gpus": "0", "nprocs": 1}, r"gpus=0 goes with backend=nccl, not with backend=bkcl"),
        ({"gpus": "0", "xpus": "0", "nprocs": 1}, r"gpus=0 and xpus=0 exclude each other"),
        ({"gpus": "", "nprocs": 1}, r"gpus='' names no device, or an empty one"),
        ({"gpus": "0,,1", "nprocs": 2}, r"gpus='0,,1' names no device, or an empty one"),
        ({"start_method": "thread", "nprocs": 1}, r"start_method=thread is unknown; use forkserver, spawn, fork\."),
        ({"timeout_s": 0, "nprocs": 1}, r"timeout_s=0 must be above 0, or None\."),
        ({"threads": 0, "nprocs": 1}, r"threads=0 must be auto or at least 1"),
        ({"threads": "many", "nprocs": 1}, r"threads='many' must be auto or at least 1"),
        ({"threads": 100000, "nprocs": 1}, r"threads=100000 must be at most 4096"),
        ({"timeout_s": float("inf"), "nprocs": 1}, r"timeout_s=inf must be at most 1000000000"),
        ({"nprocs": 100000}, r"nprocs=100000 must be at most 4096"),
        ({"nproc": 2}, r"^spawn\(\) has no option nproc\. Did you mean nprocs\?$"),
        ({"time_out": 2}, r"Did you mean timeout_s\?"),
        ({"zzz": 2}, r"^spawn\(\) has no option zzz\. Its options are nprocs, join, daemon, backend, gpus"),
    ],
)
def test_settings_that_make_no_sense(options, message):
    with pytest.raises(ConfigError, match=message):
        spawn(calls.echo, **options)


def test_several_mistakes_are_named_together():
    with pytest.raises(ConfigError, match=r"(?s)^2 settings need mending:.*start_method=x.*timeout_s=-1"):
        spawn(calls.echo, nprocs=1, start_method="x", timeout_s=-1)


@pytest.mark.skipif(has_gpu, reason="there is a GPU")
@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("nccl", r"^backend=nccl .*(Available here: gloo\.|Use backend=gloo)"),
        ("bkcl", r"^backend=bkcl is not available: .*Available here: gloo\."),
        ("glo", r"^backend=glo is unknown\. Backends are auto, gloo, nccl, bkcl; usable here: gloo\."),
    ],
)
def test_backends_that_cannot_run_here(backend, message):
    with pytest.raises(BackendUnavailable, match=message):
        spawn(calls.echo, nprocs=1, backend=backend)


@pytest.mark.skipif(has_gpu, reason="there is a GPU")
def test_devices_that_are_not_there_name_the_option():
    with pytest.raises(ConfigError, match=r"cannot honour gpus=4,5"):
        spawn(calls.echo, nprocs=2, gpus=[4, 5])


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("selected_devices", "use gpus='0,1', or xpus='0,1'"),
        ("started_port", "no port has to be chosen"),
        ("use_paddlecloud", "read by init_parallel_env"),
    ],
)
def test_old_names_warn_and_say_what_replaces_them(name, advice):
    value = {"selected_devices": None, "use_paddlecloud": False}.get(name, "x")
    message = rf"^spawn\({name}=\.\.\.\) is an old option: .*{advice}"
    with pytest.warns(FutureWarning, match=message) as caught, pytest.raises(ConfigError):
        spawn(calls.echo, nprocs=0, **{name: value})
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("cluster_node_ips", "a,b", "use python -m harness.launch --nnodes=N"),
        ("node_ip", "a", "use python -m harness.launch --nnodes=N"),
        ("use_paddlecloud", True, "leave it out: .*read by init_parallel_env"),
    ],
)
def test_several_machines_are_refused(name, value, advice):
    with pytest.raises(ConfigError, match=rf"^{name}={value!r}: spawn\(\) starts ranks on this machine alone; {advice}"):
        spawn(calls.echo, nprocs=1, **{name: value})


def test_only_a_reference_to_the_main_module_is_one():
    def refers_to_main(function, *args):
        return pickled((function, args)).refers_to_main

    assert not refers_to_main(calls.echo, "/x/__main__", "__main__", "echo", b"__main__")
    typed = type("Typed", (), {"__module__": "__main__"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["__main__"], "Typed", typed, raising=False)
        assert refers_to_main(typed) and refers_to_main(calls.echo, typed())
        assert refers_to_main(calls.echo, "__main__", typed)


def test_no_rank_was_started_by_any_refusal():
    before = descendants(os.getpid())
    with pytest.raises(ConfigError):
        spawn(lambda: 1, nprocs=2)
    assert descendants(os.getpid()) == before


def test_placement_of_devices(monkeypatch):
    monkeypatch.setattr(registry, "machine", lambda: machine_with(cuda=4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    for settings, devices in [
        ({"nprocs": 2}, ("4", "5")),
        ({}, ("4", "5", "6", "7")),
        ({"nprocs": 2, "devices": "7,4"}, ("7", "4")),
    ]:
        assert planned(**settings).devices == devices
    with pytest.raises(ConfigError, match=r"gpus=3: 3 is not visible here\. Visible: 4, 5, 6, 7\."):
        planned(nprocs=1, devices="3")
    with pytest.raises(ConfigError, match=r"gpus=4,5 names 2 devices, but nprocs=3"):
        planned(nprocs=3, devices="4,5")
    with pytest.raises(BackendUnavailable, match=r"nprocs=5, but 4 GPUs are visible\. Use backend=gloo or nprocs=4\."):
        planned(nprocs=5)


def planned(**settings):
    return plan_of(Settings(Task(kind="call"), "spawn", backend="nccl", **settings))


def machine_with(**devices):
    from harness.run.placement import Machine

    return Machine("2.13.0", ("gloo", "nccl"), devices)


def test_machine_is_asked_once():
    assert registry.machine() is registry.machine()


# --- what ranks get, and give back -------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_returns_values_of_all_ranks_in_order():
    context = spawn(calls.rank_and_size, nprocs=3)
    assert context.return_values() == [(0, 3), (1, 3), (2, 3)]
    assert [process.exitcode for process in context.processes] == [0, 0, 0]
    assert [process.rank for process in context.processes] == [0, 1, 2]
    assert not any(process.is_alive() for process in context.processes)
    assert context.join() is True


@pytest.mark.ranks
def test_ranks_that_are_done_at_once_wait_for_those_that_still_join(monkeypatch):
    """Without it, one of ten such runs fails: connections are closed while others are still being made."""
    name = "TORCH_DIST_INIT_BARRIER"
    assert spawn(calls.environment, args=(name,), nprocs=1).return_values() == [{name: "1"}]
    monkeypatch.setenv(name, "0")
    assert spawn(calls.environment, args=(name,), nprocs=1).return_values() == [{name: "0"}]


@pytest.mark.ranks
def test_arguments_and_types_survive():
    values = spawn(calls.echo, args=(1, "a", None, {"k": (1, 2)}, calls.Point(3)), nprocs=1).return_values()
    assert values == [(1, "a", None, {"k": (1, 2)}, calls.Point(3))]
    assert spawn(calls.point, nprocs=2).return_values() == [calls.Point(0), calls.Point(1)]
    assert spawn(functools.partial(calls.keyword_only, b=2), args=[1], nprocs=1).return_values() == [(1, 2)]


@pytest.mark.ranks
def test_large_values_come_back():
    sizes = [len(value) for value in spawn(calls.large, args=(2**20,), nprocs=2).return_values()]
    assert sizes == [2**20, 2**20]
    tensors = spawn(calls.tensor_of, args=(24,), nprocs=2).return_values()
    assert [tensor.shape[0] for tensor in tensors] == [24 * 2**18] * 2
    assert [tensor[-1].item() for tensor in tensors] == [0.0, 1.0]


@pytest.mark.ranks
def test_each_rank_gets_its_own_copy_of_a_tensor():
    import torch

    tensor = torch.zeros(2)
    assert spawn(calls.add_one, args=(tensor,), nprocs=2).return_values() == [[1.0, 1.0], [1.0, 1.0]]
    assert tensor.tolist() == [0.0, 0.0]


@pytest.mark.ranks
def test_two_spawns_of_one_process_know_nothing_of_each_other(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "7")
    before = dict(os.environ)
    with pytest.warns(RuntimeWarning, match=r"^MASTER_PORT=29500 of the environment is not used: ") as caught:
        assert spawn(calls.rank_and_size, nprocs=2).return_values() == [(0, 2), (1, 2)]
    assert [warning.filename for warning in caught] == [__file__]
    monkeypatch.delenv("MASTER_PORT")
    del before["MASTER_PORT"]
    assert spawn(calls.rank_and_size, nprocs=3).return_values() == [(0, 3), (1, 3), (2, 3)]
    with pytest.raises(calls.Custom):
        spawn(calls.on_rank_1, args=("raise",), nprocs=2)
    assert spawn(calls.rank_and_size, nprocs=2).return_values() == [(0, 2), (1, 2)]
    assert dict(os.environ) == before


@pytest.mark.ranks
@pytest.mark.parametrize("start_method", ["forkserver", "fork", "spawn"])
def test_start_methods(start_method):
    assert spawn(calls.echo, args=(1,), nprocs=2, start_method=start_method).return_values() == [(1,), (1,)]


@pytest.mark.ranks
def test_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert spawn(calls.threads, nprocs=1, threads=3).return_values() == [(3, "3")]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert spawn(calls.threads, nprocs=1).return_values() == [(2, "2")]
    assert spawn(calls.threads, nprocs=1, threads=1).return_values() == [(1, "1")]


@pytest.mark.ranks
def test_default_number_of_ranks_is_the_usable_cores():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert spawn(calls.rank_and_size).return_values() == [(0, 1)] if not has_gpu else True
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.ranks
def test_print_config_says_where_ranks_run(capfd):
    spawn(calls.echo, nprocs=1, backend="gloo", threads=1, print_config=True)
    assert capfd.readouterr().err == "1 rank on cpu, backend gloo (as asked), 1 thread each, started by spawn\n"


@pytest.mark.ranks
def test_rank_0_is_heard_and_of_the_others_warnings(capfd):
    context = spawn(calls.say_things, nprocs=2)
    shown = capfd.readouterr()
    assert "printed by 0" in shown.out and "printed by 1" not in shown.out
    assert "[rank 1] UserWarning: warned by 1" in shown.err and "[rank 1] ERROR: logged by 1" in shown.err
    assert "whispered" not in shown.out + shown.err
    assert "printed by 1" in context.output(1)


@pytest.mark.ranks
def test_lines_that_were_not_flushed_are_kept(capfd):
    with pytest.raises(RankFailed, match="rank 0 of 2 ended with exit code 3"):
        spawn(calls.chatter, nprocs=2)
    assert capfd.readouterr().out.splitlines() == [f"line {number}" for number in range(1000)]


@pytest.mark.ranks
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_values_of_a_spawn_within_a_rank(start_method):
    assert spawn(calls.spawn_in_spawn, nprocs=1, start_method=start_method).return_values() == [[(0, 2), (1, 2)]]


# --- without waiting ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_join_false_returns_at_once(tmp_path):
    context = spawn(calls.wait_for, args=(str(tmp_path / "go"),), nprocs=2, join=False)
    assert [process.is_alive() for process in context.processes] == [True, True]
    assert context.join(timeout=0.05) is False
    (tmp_path / "go").touch()
    assert context.join(timeout=PATIENCE_S) is True
    assert context.return_values() == [True, True]


@pytest.mark.ranks
def test_two_contexts_at_once(tmp_path):
    first = spawn(calls.wait_for, args=(str(tmp_path / "go"),), nprocs=1, join=False)
    assert spawn(calls.echo, args=(2,), nprocs=1).return_values() == [(2,)]
    (tmp_path / "go").touch()
    assert first.return_values() == [True]


@pytest.mark.ranks
def test_daemon_ranks_end_with_their_context(tmp_path):
    context = spawn(calls.wait_for, args=(str(tmp_path / "never"),), nprocs=2, join=False, daemon=True)
    pids = [process.pid for process in context.processes]
    assert all(map(alive, pids))
    del context
    assert wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.ranks
def test_failure_is_found_at_join_and_again():
    context = spawn(calls.on_rank_1, args=("raise",), nprocs=2, join=False)
    for _ in range(2):
        with pytest.raises(calls.Custom, match="bad batch"):
            context.join()


# --- failure -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_exception_keeps_its_type_and_tells_where():
    with pytest.raises(calls.Custom, match=r"^bad batch") as caught:
        spawn(calls.on_rank_1, args=("raise",), nprocs=2)
    error = caught.value
    assert (error.rank, error.exit_code, error.signal) == (1, 1, None) and error.pid > 0
    assert isinstance(error.__cause__, RankTraceback)
    assert 'calls.py", line' in str(error.__cause__) and "raise Custom" in str(error.__cause__)
    assert "harness/rank/process.py" not in str(error.__cause__)
    assert error.__notes__[0].startswith("rank 1 of 2 failed: Custom: bad batch (") and "rank-1.log" not in error.__notes__[0]


@pytest.mark.ranks
def test_our_own_mistakes_come_without_a_traceback():
    with pytest.raises(ConfigError, match=r"^Mend this\.$") as caught:
        spawn(calls.on_rank_1, args=("config",), nprocs=2)
    assert caught.value.__cause__ is None and caught.value.rank == 1


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "message", "code", "number"),
    [
        ("picky", r"^rank 1 of 2 failed: Picky: 1 and 2 \(.*Picky could not be brought here.*`except Picky` does not", 1, None),
        ("interrupt", r"^rank 1 of 2 failed: KeyboardInterrupt", 1, None),
        ("exit 7", r"^rank 1 of 2 called sys\.exit\(7\)", 7, None),
        ("os exit", r"^rank 1 of 2 ended with exit code 7", 7, None),
        ("kill", r"^rank 1 of 2 was killed by signal 9 \(SIGKILL\)", None, 9),
        ("exit 0", r"^rank 1 of 2 exited with status 0", 1, None),
    ],
)
def test_ends_of_a_rank(what, message, code, number):
    with pytest.raises(RankFailed, match=message) as caught:
        spawn(calls.on_rank_1, args=(what,), nprocs=2)
    error = caught.value
    assert (error.rank, error.exit_code, error.signal) == (1, code, number)
    assert "harness-" not in str(error)
    if what == "os exit":
        assert "last words" in str(error.__cause__)


@pytest.mark.ranks
def test_ranks_that_cannot_join_say_why(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    with pytest.raises(RuntimeError, match="nope0") as caught:
        spawn(calls.rank_and_size, nprocs=2, backend="gloo")
    assert "failed: RuntimeError" in caught.value.__notes__[0]


@pytest.mark.ranks
def test_silence_is_a_hang():
    timeout_s = scaled(2)
    message = rf"was silent for {timeout_s:g} s \(timeout_s\).*Rank 1 did not arrive where the others waited\."
    with pytest.raises(RunTimeout, match=message) as caught:
        spawn(calls.on_rank_1, args=("hang",), nprocs=2, timeout_s=timeout_s)
    assert "calls.py" in str(caught.value.__cause__) and "in fatal" in str(caught.value.__cause__)


@pytest.mark.ranks
def test_value_that_cannot_be_pickled():
    with pytest.raises(ConfigError, match=r"^what cannot_return returned \(a lock\) cannot be pickled, so it cannot reach"):
        spawn(calls.cannot_return, nprocs=2)


# --- scripts -----------------------------------------------------------------------------------------------------------

NO_GUARD = """\
import harness
def train():
    pass
harness.spawn(train, nprocs=2)
"""

WRONG_GUARD = """\
import harness
def train():
    pass
if __name__ != "nothing":
    harness.spawn(train, nprocs=2)
"""

GUARDED = """\
import harness, resource, sys, threading, torch
from tests import calls
class Value:
    pass
def train(value):
    return value, harness.init_parallel_env().rank, __name__, sys.argv[1:]
def end():
    threading.Event().wait(0.2)
    print("done")
if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    values = harness.spawn(train, args=(Value(),), nprocs=2).return_values()
    assert all(isinstance(value[0], Value) for value in values)
    print([value[1:] for value in values])
    many = [torch.ones(2)] * 1 + [torch.ones(2) for _ in range(499)]
    print(harness.spawn(calls.sum_of, args=(many,), nprocs=2).return_values())
    print(harness.spawn(calls.start_a_process_by_spawn, nprocs=2, backend="gloo").return_values())
    context = harness.spawn(end, nprocs=1, join=False)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("text", [NO_GUARD, WRONG_GUARD])
def test_missing_main_guard(tmp_path, text):
    script = tmp_path / "app.py"
    script.write_text(text)
    done = run_script(script)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert 'ConfigError: Put the call of spawn() under `if __name__ == "__main__":` in app.py' in message
    assert len(done.stderr.splitlines()) <= 8 and done.stdout == ""


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["stdin", "-c"])
def test_function_typed_in(how):
    text = 'import harness\ndef train(): pass\nif __name__ == "__main__": harness.spawn(train, nprocs=2)\n'
    done = run_script(Path("-"), "-", input=text) if how == "stdin" else run_script(Path("-"), "-c", text)
    assert done.returncode == 1
    assert "spawn() cannot hand train to its ranks: it was typed into a notebook or prompt" in done.stderr.splitlines()[-1]


@pytest.mark.ranks
def test_script_in_an_odd_place(odd_path):
    """Types of the script reach its ranks, which may start processes; 64 files do for 500 tensors; ranks outlive the script."""
    script = odd_path / "my app.py"
    script.write_text(GUARDED)
    done = run_script(script)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[:2]) == (0, ["[(0, '__mp_main__', []), (1, '__mp_main__', [])]", "[1000.0, 1000.0]"]), (
        done.stderr
    )
    assert lines[-2:] == ["[0, 0]", "done"], done.stdout


@pytest.mark.ranks
def test_module_run_by_name_and_its_relative_imports(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("number = 5")
    text = "import harness\nfrom .other import number\ndef f(): return number\n"
    (package / "app.py").write_text(text + 'if __name__ == "__main__": print(harness.spawn(f, nprocs=2).return_values())\n')
    done = run_script(Path("-"), "-m", "pkg.app", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[5, 5]\n"), done.stderr


@pytest.mark.ranks
def test_main_of_a_package_is_not_run_in_ranks(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    text = "import harness\ndef f(): return 5\ndef main(): print(harness.spawn(f, nprocs=2).return_values())\n"
    (package / "cli.py").write_text(text)
    (package / "__main__.py").write_text("from pkg.cli import main\nmain()\n")
    done = run_script(Path("-"), "-m", "pkg", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[5, 5]\n"), done.stderr


WAITS = """\
import harness, sys
from tests import calls
if __name__ == "__main__":
    harness.spawn(calls.pid_then_wait, args=(sys.argv[1],), nprocs=2)
"""


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signals_to_the_parent_leave_nothing(tmp_path, number):
    script, folder = tmp_path / "app.py", tmp_path / "pids"
    script.write_text(WAITS)
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    # As a shell starts a job in the background: with SIGINT ignored.
    command = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, str(script), str(folder)]
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert wait_until(lambda: (folder / "0").exists() and (folder / "1").exists())
        children = descendants(parent.pid)
        assert {int((folder / name).read_text()) for name in "01"} <= children
        parent.send_signal(number)
        parent.wait(timeout=PATIENCE_S)
    finally:
        parent.kill()
        parent.wait()
    assert parent.returncode == -number
    assert wait_until(lambda: not any(map(alive, children)), scaled(5)), "ranks are left"
    assert wait_until(lambda: not list(tmp_path.glob("harness-*")))


HAS_CHILDREN = """\
import harness, multiprocessing, subprocess, sys, time
from pathlib import Path
from harness.launchers import registry
from tests import calls
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    context = harness.spawn(calls.pid_then_wait, args=(str(folder),), nprocs=2, join=False)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    other = subprocess.Popen(["sleep", "600"], pass_fds=[registry.launcher("spawn").warm().fileno()])
    (folder / "children").write_text(f"{child.pid} {other.pid}")
    time.sleep(600)
"""


@pytest.mark.ranks
def test_children_of_a_killed_parent_keep_nothing_alive(tmp_path):
    script, folder = tmp_path / "app.py", tmp_path / "pids"
    script.write_text(HAS_CHILDREN)
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, str(script), str(folder)], env=environment)
    theirs = []
    try:
        assert wait_until(lambda: all((folder / name).exists() for name in ("0", "1", "children")))
        theirs = [int(pid) for pid in (folder / "children").read_text().split()]
        ours = descendants(parent.pid) - set(theirs)
        parent.kill()
        parent.wait()
        assert wait_until(lambda: not any(map(alive, ours)), scaled(5)), "ranks are left"
        assert wait_until(lambda: not list(tmp_path.glob("harness-*")), scaled(5))
        assert all(map(alive, theirs))
    finally:
        for pid in theirs:
            os.kill(pid, signal.SIGKILL)
        parent.kill()
        parent.wait()


@pytest.mark.ranks
def test_daemon_ranks_end_with_the_program(tmp_path):
    script = tmp_path / "app.py"
    script.write_text(
        "import harness\ndef f():\n    import threading\n    threading.Event().wait()\n"
        'if __name__ == "__main__":\n    context = harness.spawn(f, nprocs=1, join=False, daemon=True)\n'
    )
    done = run_script(script)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.ranks
@pytest.mark.parametrize(("method", "optimized"), [("forkserver", []), ("spawn", ["-O"])])
def test_flags_of_the_interpreter_reach_the_ranks(tmp_path, method, optimized):
    """All by one list of flags; -O would have a server compile torch anew."""
    script = tmp_path / "app.py"
    script.write_text(
        "import harness, sys\n\ndef f():\n    assert not sys.flags.optimize\n"
        "    return sys.flags.optimize, sys.warnoptions, sys._xoptions\n\n"
        f"if __name__ == '__main__':\n    print(harness.spawn(f, nprocs=1, start_method={method!r}).return_values())\n"
    )
    done = run_script(script, *optimized, "-W", "error::UserWarning", "-X", "utf8")
    assert done.stdout == f"[({len(optimized)}, ['error::UserWarning'], {{'utf8': True}})]\n", done.stderr


def test_public_names_and_defaults():
    import inspect

    parameters = inspect.signature(harness.spawn).parameters
    assert {name: p.default for name, p in parameters.items() if p.default is not p.empty} == {
        "args": (),
        "nprocs": -1,
        "join": True,
        "daemon": False,
    }
    settings = Settings(Task(kind="call"), "spawn")
    assert (settings.nprocs, settings.backend, settings.devices) == (-1, "auto", None)
    assert (settings.start_method, settings.timeout_s, settings.threads) == ("forkserver", None, "auto")


@pytest.mark.ranks
def test_only_the_ranks_own_process_says_how_it_ended():
    assert spawn(calls.comes_back_forked, nprocs=2, backend="gloo").return_values() == ["parent", "parent"]


@pytest.mark.ranks
def test_an_endless_message_is_cut_where_it_is_recorded(tmp_path):
    from harness.run.recorder import MESSAGE_LENGTH, failure_of

    try:
        calls.fail_at_length()
    except RuntimeError as error:
        failure = failure_of(error)
    assert len(failure.message) < MESSAGE_LENGTH + 100
    assert "1000015 characters in all" in failure.message
    failure.message.encode("utf-8")
    failure.traceback.encode("utf-8")


@pytest.mark.ranks
def test_ranks_outlive_the_thread_that_started_them(tmp_path):
    contexts = []

    def start():
        call = (calls.tell_and_wait_for, (str(tmp_path), str(tmp_path / "go")))
        contexts.append(spawn(*call, nprocs=2, start_method="spawn", join=False))
        for rank in range(2):
            calls.wait_for(str(tmp_path / f"here-{rank}"))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    (tmp_path / "go").touch()
    contexts[0].join()
    assert contexts[0].return_values() == [True, True]


def test_threads_each_have_a_run():
    def one(number):
        return [harness.spawn(calls.give, args=(number,), nprocs=2, backend="gloo").return_values() for _ in range(3)]

    registry.close_all()
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(one, range(4))) == [[[number] * 2] * 3 for number in range(4)]


@pytest.mark.ranks
def test_a_forked_process_has_a_server_of_its_own():
    harness.spawn(calls.give, args=(0,), nprocs=2, backend="gloo")
    before = registry.launcher("spawn")
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=calls.spawn_in_a_fork, args=(answers, id(before)))
    child.start()
    child.join()
    assert answers.get() == (True, [1, 1])
    assert harness.spawn(calls.give, args=(2,), nprocs=2, backend="gloo").return_values() == [2, 2]


@pytest.mark.ranks
def test_a_warm_server_that_somebody_has_ended_is_replaced():
    harness.spawn(calls.give, args=(0,), nprocs=2, backend="gloo")
    server = registry.launcher("spawn").warm()
    os.kill(server._child.pid, signal.SIGKILL)
    server._child.wait()
    assert harness.spawn(calls.give, args=(1,), nprocs=2, backend="gloo").return_values() == [1, 1]


@pytest.mark.ranks
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_a_rank_that_leaves_before_it_joins_strands_nobody(start_method):
    # One of the two may not have come as far as to wait when the others' wait is ended.
    with pytest.raises(
        RankFailed, match=r"rank 1 of 3 ended without joining the group\. Rank(s 0 and 2| 0| 2) waited for it"
    ) as caught:
        harness.spawn(calls.leaves_before_joining, nprocs=3, backend="gloo", start_method=start_method)
    assert caught.value.rank == 1
