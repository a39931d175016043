"""The launch command: its line, what it refuses, what scripts get, and its exit status."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness.entrypoints import launch_command, options
from harness.entrypoints.console import Console
from harness.entrypoints.options import parse, split
from harness.errors import COMMAND, WORDS, BackendUnavailable, ConfigError, HarnessError, Problem, aside
from harness.rank import store
from harness.run.folder import RunDir
from harness.run.job import alone_in
from tests.processes import PATIENCE_S, alive, descendants, scaled, wait_until

ROOT = Path(__file__).resolve().parent.parent
has_gpu = os.path.exists("/dev/nvidia0")

TELLS = """\
import json, os, sys
told = {"argv": sys.argv, "name": __name__, "path": sys.path[0], "cwd": os.getcwd(), "stdin": sys.stdin.read()}
told["env"] = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")}
print(json.dumps(told))
sys.exit()
"""


def run(*arguments: object, **settings) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **settings.pop("environment", {})}
    command = [sys.executable, "-m", "harness.launch", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False, **settings)


def plan(*arguments: str):
    """Return the plan of a command's line, without running it."""
    asked = parse([*arguments, "script.py"])
    return launch_command.make_plan(asked, launch_command.Task(kind="script", path="script.py"))


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TELLS)
    return path


# --- the line ----------------------------------------------------------------------------------------------------------


def test_defaults():
    asked = vars(parse(["train.py"]))
    assert asked == {
        "script": "train.py",
        "arguments": [],
        "nproc_per_node": None,
        "backend": "auto",
        "gpus": None,
        "xpus": None,
        "devices": None,
        "threads": "auto",
        "module": False,
        "log_dir": None,
        "timeout_s": None,
        "max_restarts": 0,
        "nnodes": 1,
        "node_rank": None,
        "master": None,
        "ips": None,
    }


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--nproc_per_node=3", "nproc_per_node", 3),
        ("--nproc-per-node 3", "nproc_per_node", 3),
        ("--nprocs -1", "nproc_per_node", -1),
        ("--backend gloo", "backend", "gloo"),
        ("--gpus=4,5", "gpus", "4,5"),
        ("--selected_gpus=4,5", "gpus", "4,5"),
        ("--selected-gpus 4,5", "gpus", "4,5"),
        ("--devices 0", "devices", "0"),
        ("--xpus 0,1", "xpus", "0,1"),
        ("--log-dir logs", "log_dir", "logs"),
        ("--module", "module", True),
        ("-m", "module", True),
        ("--timeout_s=2.5", "timeout_s", 2.5),
        ("--threads auto", "threads", "auto"),
        ("--threads 2", "threads", 2),
        ("--max-restarts 3", "max_restarts", 3),
        ("--nnodes 2", "nnodes", 2),
        ("--node_rank 1", "node_rank", 1),
        ("--master 127.0.0.1:29500", "master", "127.0.0.1:29500"),
        ("--ips 127.0.0.1", "ips", "127.0.0.1"),
        ("--nprocs 2 --nproc_per_node=2", "nproc_per_node", 2),
        # As torchrun's users write it.
        ("--nproc-per-node=auto", "nproc_per_node", -1),
        ("--nproc-per-node=cpu", "backend", "gloo"),
        ("--nproc-per-node=gpu --backend=nccl", "backend", "nccl"),
        ("--log_dir=logs --run-mode=collective", "log_dir", "logs"),
    ],
)
def test_options(line, name, value):
    assert vars(parse([*line.split(), "train.py", "--own"]))[name] == value


def test_every_option_is_in_the_help_and_has_a_test():
    (marks,) = (mark for mark in test_options.pytestmark if mark.name == "parametrize")
    tested = {line.split()[0].partition("=")[0].replace("-", "_").strip("_") for line, _, _ in marks.args[1]}
    names = set(options._names()) - {"help"}
    assert names <= tested
    text = options._parser().format_help()
    assert all(f"--{name}" in text for name in names)
    assert all(word in text for word in ("rank-N.log", "init_parallel_env", "exit status", "examples:"))


@pytest.mark.parametrize(
    "own",
    [
        ["--nprocs", "3", "--backend=nccl", "--nproc", "--help", "-m"],
        ["--", "--lr", "0.1", "--"],
        ["", "a b", 'it\'s "x"', "-", "--x=", "$HOME", "\\n"],
        ["--lr"],
    ],
)
def test_the_scripts_arguments_are_its_own(own):
    asked = parse(["--nprocs=2", "train.py", *own])
    assert (asked.script, asked.arguments, asked.nproc_per_node) == ("train.py", own, 2)
    assert split(["--nprocs", "2", "--", "--odd.py", *own]) == (["--nprocs=2"], ["--odd.py", *own])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nproc 2 train.py", r"^There is no option --nproc\. Did you mean --nprocs\? The script's own options come after"),
        ("--backen=gloo train.py", r"Did you mean --backend\?"),
        ("-n 2 train.py", r"^There is no option -n\."),
        ("--server_nums=1 train.py", r"^There is no option --server_nums\. See"),
        ("--nproc_per_node=gpu --backend=gloo train.py", r"gpu goes with --backend=nccl, not with --backend=gloo\.$"),
        ("--zzz train.py", r"^There is no option --zzz\. See python -m harness\.launch --help"),
        ("--nprocs", r"^--nprocs needs a value: --nprocs=VALUE\.$"),
        ("--nprocs=two train.py", r"'two' is not a whole number\. See python -m harness\.launch --help\.$"),
        ("--timeout_s=x train.py", r"invalid float value: 'x'"),
        ("--threads=x train.py", r"'x' is not a whole number"),
        ("--nprocs=2 --nproc_per_node=3 train.py", r"^--nprocs=2 and --nproc_per_node=3 contradict each other\.$"),
        ("--gpus=0 --selected_gpus=1 train.py", r"^--gpus=0 and --selected_gpus=1 contradict each other\.$"),
        ("", r"^There is no script to run\. Usage: python -m harness\.launch \[options\] script\.py"),
        ("--nprocs=2", r"^There is no script to run\."),
        ("--nprocs=2 --", r"^There is no script to run\."),
    ],
)
def test_lines_that_make_no_sense(line, message):
    with pytest.raises(ConfigError, match=message):
        parse(line.split())


@pytest.mark.parametrize("name", options.PARAMETER_SERVER)
def test_parameter_server_mode_is_refused_honestly(name):
    message = rf"^--{name} asks for parameter-server mode, which does not exist here: only collective mode does\. Drop --{name}"
    with pytest.raises(ConfigError, match=message):
        parse([f"--{name}=1", "--log_dir=x", "train.py"])
    with pytest.raises(ConfigError, match=message):
        parse([f"--{name.replace('_', '-')}", "1", "--backend=auto", "train.py"])


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--server_num=1 --backend=gloo", "--backend=gloo"),
        ("--backend=nccl --server_num=1", "--backend=nccl"),
        ("--backend=bkcl --server_num=1", "--backend=bkcl"),
        ("--nproc_per_node=2 --server_num=1", "--nproc_per_node"),
        ("--gpus=0 --server_num=1", "--gpus"),
        ("--nnodes=2 --server_num=1", "--nnodes"),
    ],
)
def test_both_modes_at_once_are_refused(line, named):
    with pytest.raises(ConfigError, match=rf"^--server_num asks for parameter-server mode and {named} for collective mode"):
        parse([*line.split(), "train.py"])


def test_parameter_server_options_of_the_script_are_its_own():
    assert parse(["train.py", "--server_num=1"]).arguments == ["--server_num=1"]


# --- the plan ----------------------------------------------------------------------------------------------------------


def test_plan():
    one = plan("--nprocs=3", "--backend=gloo", "--threads=2", "--timeout_s=9", "--master=localhost:29500")
    assert (one.nprocs, one.backend, one.device, one.threads, one.timeout_s) == (3, "gloo", "cpu", 2, 9.0)
    assert (one.method, one.master_port, one.max_restarts, one.num_machines) == ("launch", 29500, 0, 1)
    assert one.sys_path == tuple(map(os.path.abspath, sys.path[1:]))


def test_restarts_and_machines_run_on_torchs_engine():
    assert plan("--nprocs=1", "--max_restarts=2").method == "torchrun"
    several = plan("--nprocs=1", "--nnodes=2", "--node_rank=0", "--master=10.0.0.1:29500")
    assert (several.method, several.num_machines, several.master_port) == ("torchrun", 2, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--nprocs=0", r"^--nprocs=0 must be at least 1, or -1"),
        ("--nprocs=1 --gpus=0 --backend=gloo", r"cannot honour --gpus=0"),
        ("--nprocs=1 --xpus=0 --backend=gloo", r"cannot honour --xpus=0"),
        ("--nprocs=1 --devices=0 --backend=gloo", r"cannot honour --devices=0"),
        ("--gpus=0 --xpus=0", r"^--gpus and --xpus exclude each other"),
        ("--gpus=0 --devices=0", r"^--gpus and --devices exclude each other"),
        ("--nprocs=1 --gpus=", r"^--gpus= is empty: leave it out"),
        ("--nprocs=1 --xpus=0 --backend=nccl", r"^--xpus=0 goes with --backend=bkcl"),
        ("--nprocs=1 --timeout_s=0", r"timeout_s=0\.0 must be above 0, or left out\."),
        ("--nprocs=1 --timeout_s=nan", r"^--timeout_s=nan must be above 0, or left out\.$"),
        ("--nprocs=1 --timeout_s=1e300", r"^--timeout_s=1e\+300 must be at most 1000000000, or left out\.$"),
        ("--nprocs=100000", r"^--nprocs=100000 must be at most 4096\.$"),
        ("--nprocs=1 --threads=100000", r"^--threads=100000 must be at most 4096"),
        ("--nprocs=1 --threads=0", r"threads=0 must be auto or at least 1"),
        ("--nnodes=0", r"--nnodes=0 must be at least 1"),
        ("--max_restarts=-1", r"--max_restarts=-1 must be 0 or more"),
        ("--nnodes=2", r"--nnodes=2 needs --node_rank, this machine's number, and --master=HOST:PORT of machine 0"),
        ("--nnodes=2 --node_rank=2 --master=a:1", r"--node_rank=2 does not lie in 0 <= node_rank < nnodes=2"),
        ("--node_rank=1", r"--node_rank=1 does not lie in 0 <= node_rank < nnodes=1"),
        ("--master=29500", r"--master=29500 must be HOST:PORT"),
        ("--master=127.0.0.1:0", r"--master=127\.0\.0\.1:0 must be HOST:PORT"),
        ("--master=10.0.0.1:29500", r"meet on loopback only\. Use --master=127\.0\.0\.1:29500, or leave it out\."),
        ("--ips=a,b", r"--ips=a,b names 2 machines: .* --nnodes=2 --node_rank=K --master=a:PORT"),
    ],
)
def test_settings_that_make_no_sense(line, message):
    with pytest.raises(ConfigError, match=message):
        plan(*line.split())


@pytest.mark.skipif(has_gpu, reason="there is a GPU")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--backend=nccl", r"^--backend=nccl .*(Available here: gloo\.|Use --backend=gloo)"),
        ("--backend=bkcl", r"^--backend=bkcl is not available"),
        ("--backend=glo", r"^--backend=glo is unknown"),
    ],
)
def test_backends_that_cannot_run_here(line, message):
    with pytest.raises(BackendUnavailable, match=message):
        plan("--nprocs=1", line)


def test_messages_name_settings_as_they_are_typed():
    said = Problem("{backend}=nccl: {nprocs}={count}, but {name}. Use {nprocs}=1.", count=4, name="nprocs={nprocs}")
    error = pickle.loads(pickle.dumps(ConfigError(said)))
    assert (said.settings, str(error)) == (
        ["backend", "nprocs", "nprocs"],
        "backend=nccl: nprocs=4, but nprocs={nprocs}. Use nprocs=1.",
    )
    assert error.in_words(COMMAND) == "--backend=nccl: --nprocs=4, but nprocs={nprocs}. Use --nprocs=1."
    assert [aside(words, "grace_s") for words in WORDS.values()] == [" (launcher.grace_s)", "", ""]


# --- the script --------------------------------------------------------------------------------------------------------


def test_scripts_that_are_none(tmp_path):
    cases = {
        "absent.py": (None, "does not exist"),
        "run.sh": (b"if [ -z $x ]; then echo; fi\n", "is not Python: invalid syntax (line 1)"),
        "binary": (b"\x7fELF\0\0\0", "is not Python"),
        "latin.py": (b"x = '\xe9'\n", "is not Python"),
    }
    for name, (content, message) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            launch_command.script_task(str(tmp_path / name), [])
        assert str(caught.value).startswith(f"The script {str(tmp_path / name)!r} ") and message in str(caught.value)
    with pytest.raises(ConfigError, match=r"is a folder without a __main__\.py"):
        launch_command.script_task(str(tmp_path), [])


def test_script_in_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"is a pipe or a device, which only one rank could read\. Save it in a file"):
        launch_command.script_task(str(tmp_path / "pipe"), [])


def test_script_that_cannot_be_read(script, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"cannot be read: Permission denied\."):
        launch_command.script_task(str(script), [])


def test_modules(tmp_path, monkeypatch):
    package = tmp_path / "pkg" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "pkg" / "__init__.py").write_text("raise RuntimeError('imported in the parent')")
    (package / "train.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert launch_command.module_task("pkg.inner.train", ["x"]).module == "pkg.inner.train"
    for name in ("pkg.nothing", "nothing.at.all", "pkg.inner.train.deeper"):
        with pytest.raises(ConfigError, match=f"^There is no module '{name}' in Python's search path or the current folder"):
            launch_command.module_task(name, [])
    monkeypatch.chdir(package)
    with pytest.raises(ConfigError, match=r"^There is no module 'train\.py': leave out --module to run a file\."):
        launch_command.module_task("train.py", [])


def test_the_option_that_was_left_out_is_not_blamed(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_HOST", "192.0.2.1")
    for wanted, message in [
        (None, r"^rank 0 cannot listen on 192\.0\.2\.1"),
        (29500, r"^--master=192\.0\.2\.1:29500 cannot be"),
    ]:
        with pytest.raises(HarnessError, match=message):
            store._own_store(RunDir(tmp_path), wanted)


@pytest.mark.ranks
def test_what_a_script_gets(script, tmp_path):
    own = ["--nprocs", "3", "--", "", "a b", "--help"]
    before = {"MASTER_PORT": "29500", "RANK": "7", "WORLD_SIZE": "9"}
    done = run(
        "--nproc-per-node=2", "--backend=gloo", "--threads=3", script, *own, environment=before, input="typed", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    port = told["env"].pop("MASTER_PORT")
    assert told == {
        "argv": [str(script), *own],
        "name": "__main__",
        "path": str(tmp_path),
        "cwd": str(tmp_path),
        "stdin": "",
        "env": {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "3"},
    }
    assert port not in ("29500", None)
    assert done.stderr.splitlines() == [
        "2 ranks on cpu, backend gloo (as asked), 3 threads each, started by launch",
        "MASTER_PORT=29500 of the environment is not used; --master=127.0.0.1:29500 would be.",
    ]


@pytest.mark.ranks
def test_module_folder_and_archive(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("number = 5")
    (package / "__main__.py").write_text("import sys\nfrom pkg.other import number\nprint(number, sys.argv[1:])")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", "import sys\nprint('archive', sys.argv[1:])")
    assert run("--nprocs=1", "-m", "pkg", "--x", cwd=tmp_path).stdout == "5 ['--x']\n"
    assert (
        run("--nprocs=1", "pkg", "--x", cwd=tmp_path, environment={"PYTHONPATH": f"{ROOT}:{tmp_path}"}).stdout == "5 ['--x']\n"
    )
    assert run("--nprocs=1", "app.pyz", "--x", cwd=tmp_path).stdout == "archive ['--x']\n"


@pytest.mark.ranks
def test_log_dir_keeps_what_each_rank_said_in_the_last_run(tmp_path, odd_path):
    script, logs = odd_path / "my train.py", odd_path / "logs"
    script.write_text("import os\nprint('rank', os.environ['RANK'])\n")
    for _ in range(2):
        done = run("--nprocs=2", f"--log_dir={logs}", script)
        assert (done.returncode, done.stdout) == (0, "rank 0\n"), done.stderr
    assert sorted(path.name for path in logs.iterdir()) == [
        *("plan.json", "rank-0.jsonl", "rank-0.log", "rank-1.jsonl", "rank-1.log", "result.json"),
    ]
    assert (logs / "rank-1.log").read_text() == "rank 1\n"
    assert json.loads((logs / "result.json").read_text())["status"] == "ok"


def test_log_dir_of_a_run_that_goes_on_is_refused(script, tmp_path):
    with alone_in(tmp_path / "logs"):
        done = run("--nprocs=1", f"--log_dir={tmp_path / 'logs'}", script)
    assert done.returncode == 1 and done.stderr.endswith("wait for it, or choose another folder with --log_dir=FOLDER.\n")
    assert done.stdout == ""


def test_log_dir_that_cannot_be_made(script, tmp_path):
    done = run("--nprocs=1", f"--log_dir={script}", script)
    assert done.returncode == 1 and f"harness.launch: --log_dir={script} cannot be made: File exists." in done.stderr


def test_a_console_that_lacks_a_character(capsys):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(stream).output("snow \u2603")
    assert stream.buffer.getvalue() == b"snow \\u2603\n"


def test_refusals_are_one_line_and_exit_status_1(tmp_path):
    done = run("--nproc=2", "train.py")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)
    assert done.stderr.startswith("harness.launch: There is no option --nproc.")
    helped = run("--help")
    assert helped.returncode == 0 and helped.stdout.startswith("usage: python -m harness.launch [options] script.py")


# --- failure -----------------------------------------------------------------------------------------------------------

FAILS = """\
import os, signal, sys, threading
if os.environ["RANK"] == "0":
    for number in range(1000):
        sys.stdout.write(f"line {number}\\n")
if os.environ["RANK"] != os.environ["WHO"]:
    threading.Event().wait()
exec(os.environ["WHAT"])
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "who", "status", "message"),
    [
        ("sys.exit(7)", "1", 7, "rank 1 of 2 called sys.exit(7). Rank 0 was stopped."),
        ("os._exit(7)", "0", 7, "rank 0 of 2 ended with exit code 7, without a word of why. Rank 1 was stopped."),
        ("os.kill(os.getpid(), 9)", "1", 137, "rank 1 of 2 was killed by signal 9 (SIGKILL). The kernel does so"),
        ("raise ValueError('x')", "1", 1, "rank 1 of 2 failed: ValueError: x ("),
        ("raise KeyboardInterrupt", "1", 1, "rank 1 of 2 failed: KeyboardInterrupt: "),
        ("sys.exit('a sentence')", "1", 1, "rank 1 of 2 called sys.exit('a sentence'). Rank 0 was stopped."),
    ],
)
def test_exit_status_is_that_of_the_rank_that_failed_first(tmp_path, what, who, status, message):
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    done = run("--nprocs=2", script, environment={"WHAT": what, "WHO": who, "TMPDIR": str(tmp_path)})
    assert done.returncode == status
    assert done.stderr.splitlines()[-1].startswith(f"harness.launch: {message}")
    assert done.stdout.splitlines()[:1000] == [f"line {number}" for number in range(1000)] or who == "1"
    assert ("Traceback (most recent call last)" in done.stderr) == what.startswith("raise")
    assert "harness-" not in done.stderr and not list(tmp_path.glob("harness-*"))


LEAVES = """\
import sys
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    sys.exit(0)
dist.barrier()
"""


@pytest.mark.ranks
def test_a_rank_that_leaves_the_others_waiting_is_no_success(tmp_path):
    script = tmp_path / "leaves.py"
    script.write_text(LEAVES)
    done = run("--nprocs=2", script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("harness.launch: rank 1 of 2 finished while others waited for it."), (
        done.stderr
    )


@pytest.mark.ranks
def test_silence_names_the_option(tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text("import threading\nthreading.Event().wait()\n")
    timeout_s = scaled(1)
    done = run("--nprocs=1", f"--timeout_s={timeout_s}", script)
    assert done.returncode == 1
    assert f"rank 0 of 1 was silent for {timeout_s:g} s (--timeout_s); all ranks were stopped." in done.stderr
    assert "hangs.py" in done.stderr


WAITS = """\
import os, sys, threading
path = os.path.join(sys.argv[1], os.environ["RANK"])
open(path + ".tmp", "w").write(str(os.getpid()))
os.replace(path + ".tmp", path)
threading.Event().wait()
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_signals_to_the_command_leave_nothing(tmp_path, number, status):
    script, pids = tmp_path / "waits.py", tmp_path / "pids"
    script.write_text(WAITS)
    pids.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "harness.launch", "--nprocs=2", str(script), str(pids)]
    # As a shell starts a job in the background: with SIGINT ignored.
    parent = subprocess.Popen(
        ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh", *command], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        assert wait_until(lambda: (pids / "0").exists() and (pids / "1").exists())
        children = descendants(parent.pid)
        parent.send_signal(number)
        assert parent.wait(timeout=PATIENCE_S) == status
    finally:
        parent.kill()
        parent.wait()
    assert {int((pids / name).read_text()) for name in "01"} <= children
    assert wait_until(lambda: not any(map(alive, children)), scaled(5))
    assert wait_until(lambda: not list(tmp_path.glob("harness-*")))


@pytest.mark.ranks
def test_a_reader_that_has_seen_enough(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("while True:\n    print('line')\n")
    command = [sys.executable, "-m", "harness.launch", "--nprocs=1", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "line\n"
        parent.stdout.close()
        assert parent.wait(timeout=PATIENCE_S) == 141
        assert "Traceback" not in parent.stderr.read()


# --- rendezvous, restarts, machines ------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.ranks
def test_master_on_one_machine_is_honoured(script):
    port = free_port()
    done = run("--nprocs=2", f"--master=127.0.0.1:{port}", script, environment={"MASTER_PORT": "1"})
    assert json.loads(done.stdout)["env"]["MASTER_PORT"] == str(port), done.stderr
    assert "MASTER_PORT" not in done.stderr


@pytest.mark.ranks
def test_master_that_is_taken(script):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--nprocs=2", f"--master=127.0.0.1:{port}", script)
    assert done.returncode == 1
    assert f"--master=127.0.0.1:{port} cannot be used: Address already in use. Leave it out" in done.stderr


def test_master_of_several_machines_that_is_taken(script):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--nprocs=1", "--nnodes=2", "--node_rank=0", f"--master=127.0.0.1:{port}", script)
    assert done.returncode == 1
    assert f"--master=127.0.0.1:{port} cannot be used: Address already in use. Choose another port." in done.stderr


def test_ips_is_an_old_option(script):
    done = run("--nprocs=1", "--ips=127.0.0.1", script)
    assert done.returncode == 0 and "--ips is an old option" in done.stderr


RESTARTS = """\
import os, sys
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print("attempt", attempt, flush=True)
if attempt == "0" and rank == "1":
    raise ValueError("the first time")
if sys.argv[1] != "0":
    os._exit(int(sys.argv[1]))
"""


@pytest.mark.ranks
@pytest.mark.parametrize("code", [0, 9])
def test_restarts(tmp_path, code):
    script = tmp_path / "train.py"
    script.write_text(RESTARTS)
    done = run("--nprocs=2", "--max_restarts=1", script, code)
    assert (done.returncode, done.stdout) == (code, "attempt 0\nattempt 1\n"), done.stderr


MEETS = """\
import os, sys
import harness
env = harness.init_parallel_env("gloo")
import torch
total = torch.full((1,), float(env.rank))
torch.distributed.all_reduce(total)
print(env.rank, env.local_rank, env.world_size, total.item())
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_two_machines(tmp_path):
    script, port = tmp_path / "train.py", free_port()
    script.write_text(MEETS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "harness.launch", "--nprocs=1", "--nnodes=2", f"--master=127.0.0.1:{port}"]
    machines = [
        subprocess.Popen([*command, f"--node_rank={k}", str(script)], env=environment, stdout=subprocess.PIPE, text=True)
        for k in range(2)
    ]
    assert [machine.communicate(timeout=PATIENCE_S)[0] for machine in machines] == ["0 0 2 1.0\n", "1 0 2 1.0\n"]
    assert [machine.returncode for machine in machines] == [0, 0]
