"""The launch command: ``python -m harness.launch [options] script.py [the script's own arguments]``."""

from __future__ import annotations

import argparse
import importlib.machinery
import os
import socket
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.entrypoints.console import Console
from harness.entrypoints.messages import details, summary
from harness.entrypoints.options import parse
from harness.entrypoints.run_job import run_job
from harness.entrypoints.settings import Settings, plan_of
from harness.errors import ConfigError, HarnessError, RankFailed
from harness.launchers import registry
from harness.launchers.base import Launcher
from harness.launchers.signals import Interrupted
from harness.launchers.temp_dir import TempDir
from harness.launchers.torchrun import TorchrunLauncher
from harness.run.folder import RunDir
from harness.run.job import alone_in
from harness.run.launch_methods import method_for_scripts
from harness.run.plan import RunPlan, Task
from harness.run.record import RunResult

_LISTS = {"gpus": "cuda", "xpus": "xpu", "devices": None}
"""Option that lists devices -> their type; None for whichever the backend takes."""
_LOOPBACK = ("127.0.0.1", "localhost")


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    try:
        return _launch(parse(arguments))
    except HarnessError as error:
        print(f"harness.launch: {error}", file=sys.stderr)
        return 1
    except Interrupted as interruption:
        print(f"\nharness.launch: {interruption}: all ranks were stopped.", file=sys.stderr)
        # As a shell says of a command that a signal has ended.
        return 128 + interruption.number
    except BrokenPipeError:
        # Whoever read the output has seen enough: ended by SIGPIPE, as a shell would say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def _launch(asked: argparse.Namespace) -> int:
    task = module_task(asked.script, asked.arguments) if asked.module else script_task(asked.script, asked.arguments)
    plan = make_plan(asked, task)
    # On stderr: stdout is the script's own, and may be piped.
    print(summary(plan), file=sys.stderr, flush=True)
    _tell_unused(asked)
    with _folder(asked.log_dir) as run:
        result = run_job(plan, run, Console(), _launcher(asked))
        return 0 if result.status == "ok" else _report(result, run, asked)


def make_plan(asked: argparse.Namespace, task: Task) -> RunPlan:
    """Return the plan of the options.

    Raises:
        ConfigError: They make no sense, alone or together.
        BackendUnavailable: The backend cannot run here.
    """
    problems = _problems(asked)
    # By themselves: to place ranks by options that contradict each other would add mistakes that are none.
    if problems:
        raise ConfigError(*problems)
    option = next((name for name in _LISTS if getattr(asked, name) is not None), None)
    needs_engine = asked.nnodes > 1 or asked.max_restarts > 0
    settings = Settings(
        task=task,
        door="command",
        nprocs=-1 if asked.nproc_per_node is None else asked.nproc_per_node,
        backend=asked.backend,
        devices=getattr(asked, option) if option is not None else None,
        devices_word=f"--{option}" if option is not None else None,
        device_type=_LISTS[option] if option is not None else None,
        timeout_s=asked.timeout_s,
        threads=asked.threads,
        method=method_for_scripts(needs_engine),
        # `python -m` looks for a module in the current folder, and a script does not look there.
        sys_path=sys.path if asked.module else _path_of_scripts(),
        # With several machines the port is torch's engine's, which gets it as an option of its own.
        master_port=_address(asked.master)[1] if asked.master is not None and asked.nnodes == 1 else None,
        max_restarts=asked.max_restarts,
        num_machines=asked.nnodes,
    )
    return plan_of(settings)


def _problems(asked: argparse.Namespace) -> list[str]:
    given = [name for name in _LISTS if getattr(asked, name) is not None]
    ips = [ip for ip in (asked.ips or "").split(",") if ip]
    checks = [
        (len(given) > 1, f"--{' and --'.join(given)} exclude each other: give one list of devices."),
        (
            any(getattr(asked, name) == "" for name in given),
            f"--{given[0] if given else ''}= is empty: leave it out, or list ids with commas between.",
        ),
        (asked.nnodes < 1, f"--nnodes={asked.nnodes} must be at least 1."),
        (asked.max_restarts < 0, f"--max_restarts={asked.max_restarts} must be 0 or more."),
        (
            len(ips) > 1,
            f"--ips={asked.ips} names {len(ips)} machines: run this command on each of them, with --nnodes={len(ips)} "
            f"--node_rank=K --master={ips[0] if ips else ''}:PORT instead.",
        ),
        *_problems_of_machines(asked),
    ]
    return [sentence for wrong, sentence in checks if wrong]


def _problems_of_machines(asked: argparse.Namespace) -> list[tuple[bool, str]]:
    several = asked.nnodes > 1
    host, port = _address(asked.master) if asked.master is not None else ("", None)
    return [
        (asked.master is not None and port is None, f"--master={asked.master} must be HOST:PORT, as in 127.0.0.1:29500."),
        (
            several and (asked.master is None or asked.node_rank is None),
            f"--nnodes={asked.nnodes} needs --node_rank, this machine's number, and --master=HOST:PORT of machine 0.",
        ),
        (
            asked.node_rank is not None and not 0 <= asked.node_rank < asked.nnodes,
            f"--node_rank={asked.node_rank} does not lie in 0 <= node_rank < nnodes={asked.nnodes}.",
        ),
        (
            not several and asked.master is not None and port is not None and host not in _LOOPBACK,
            f"--master={asked.master}: the ranks of one machine meet on loopback only. "
            f"Use --master=127.0.0.1:{port}, or leave it out.",
        ),
    ]


def _address(master: str) -> tuple[str, int | None]:
    # From the right, because an IPv6 host has colons of its own.
    host, _, port = master.rpartition(":")
    return host, int(port) if host and port.isdigit() and 0 < int(port) < 65536 else None


def script_task(path: str, arguments: Sequence[str]) -> Task:
    """Return the task of running a script.

    Raises:
        ConfigError: It is missing, cannot be read, or is not Python.
    """
    script = Path(path)
    if not script.exists():
        raise ConfigError(f"The script {path!r} does not exist (in {os.getcwd()}).")
    if script.is_dir() and not (script / "__main__.py").exists():
        raise ConfigError(f"The script {path!r} is a folder without a __main__.py.")
    if script.exists() and not (script.is_file() or script.is_dir()):
        raise ConfigError(f"The script {path!r} is a pipe or a device, which only one rank could read. Save it in a file.")
    # An archive, which Python runs by the __main__.py in it, is no source to compile.
    if script.is_file() and not zipfile.is_zipfile(script):
        _require_python(script, path)
    return Task(kind="script", path=path, arguments=tuple(arguments))


def _require_python(script: Path, path: str) -> None:
    try:
        # Here rather than in each rank, where the same mistake would be told N times, after the time to start.
        compile(script.read_bytes(), path, "exec", dont_inherit=True)
    except OSError as error:
        raise ConfigError(f"The script {path!r} cannot be read: {error.strerror}.") from None
    except SyntaxError as error:
        raise ConfigError(f"The script {path!r} is not Python: {error.msg} (line {error.lineno}).") from None
    except ValueError as error:
        # Before Python 3.12, a null byte in the source is this and no SyntaxError.
        raise ConfigError(f"The script {path!r} is not Python: {error}.") from None


def module_task(name: str, arguments: Sequence[str]) -> Task:
    """Return the task of running a module by name.

    Raises:
        ConfigError: There is none of that name. Nothing is imported to find that out.
    """
    path: Sequence[str] | None = None
    for number, part in enumerate(name.split("."), start=1):
        # importlib.util.find_spec would import the packages on the way, which may import torch.
        spec = importlib.machinery.PathFinder.find_spec(".".join(name.split(".")[:number]) if path is None else part, path)
        if spec is None:
            raise ConfigError(f"There is no module {name!r}{_hint_for_file(name)}.")
        # A module that is no package holds nothing: what follows its name is then not found.
        path = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else []
    return Task(kind="module", module=name, arguments=tuple(arguments))


def _hint_for_file(name: str) -> str:
    return ": leave out --module to run a file" if Path(name).exists() else " in Python's search path or the current folder"


def _path_of_scripts() -> list[str]:
    """Return the search path without the folder that ``python -m`` has put first, which is the current one."""
    # With -P or PYTHONSAFEPATH, Python has put no folder there.
    return sys.path if sys.flags.safe_path else sys.path[1:]


@contextmanager
def _folder(log_dir: str | None) -> Iterator[RunDir]:
    if log_dir is not None:
        run = RunDir(log_dir)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log_dir={log_dir} cannot be made: {error.strerror}.") from None
        with alone_in(run.path, "--log_dir"):
            yield run
        return
    folder = TempDir()
    try:
        yield folder.run()
    finally:
        folder.close()


def _launcher(asked: argparse.Namespace) -> Launcher:
    """Return the launcher: torch's engine for several machines and for restarts, and otherwise a process per rank."""
    if asked.nnodes == 1 and asked.max_restarts == 0:
        return registry.launcher("launch")
    rendezvous = []
    if asked.nnodes > 1:
        host, port = _address(asked.master)
        # static: the user has numbered the machines, and torch's other rendezvous numbers them as they come.
        rendezvous = [f"--nnodes={asked.nnodes}", f"--node-rank={asked.node_rank}", "--rdzv-backend=static"]
        rendezvous += [f"--master-addr={host}", f"--master-port={port}"]
        # Machine 0 alone serves the store that the others connect to.
        if asked.node_rank == 0:
            _require_free(int(port or 0), asked.master)
    return TorchrunLauncher(rendezvous)


def _require_free(port: int, master: str) -> None:
    """Refuse a port that is in use: torch's engine would wait for whoever has it.

    Raises:
        ConfigError: It is.
    """
    with socket.socket() as probe:
        # As torch's store binds it: a port that has just been closed is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ConfigError(f"--master={master} cannot be used: {error.strerror}. Choose another port.") from None


def _report(result: RunResult, run: RunDir, asked: argparse.Namespace) -> int:
    """Say on stderr what failed, and return its exit status."""
    # Without --log_dir, the files that the account names are removed as this command ends.
    message = result.account if asked.log_dir is not None else result.message
    if asked.log_dir is None:
        # Rank 0 has shown its own.
        text = details(result, run) if result.failed_rank != 0 or "hung" in result.marks else ""
        print(text, end="\n" if text else "", file=sys.stderr)
    where = f"machine {asked.node_rank} of {asked.nnodes} (its own ranks count from 0): " if asked.nnodes > 1 else ""
    elsewhere = " A rank of another machine may have failed before it: see there." if where and _is_consequence(result) else ""
    print(f"harness.launch: {where}{message}{elsewhere}", file=sys.stderr)
    return RankFailed(message, exit_code=result.exit_code, signal=result.signal).exit_status


def _is_consequence(result: RunResult) -> bool:
    """Return True where the failure that is reported may come from another machine."""
    return any(rank.rank == result.failed_rank and rank.failure and rank.failure.collective for rank in result.ranks)


def _tell_unused(asked: argparse.Namespace) -> None:
    """Say what is not used although somebody may count on it."""
    if asked.ips is not None:
        sentence = (
            "--ips is an old option: leave it out on one machine; for several there are --nnodes, --node_rank and --master."
        )
        print(sentence, file=sys.stderr, flush=True)
    port = os.environ.get("MASTER_PORT")
    if port is not None and asked.master is None:
        sentence = f"MASTER_PORT={port} of the environment is not used; --master=127.0.0.1:{port} would be."
        print(sentence, file=sys.stderr, flush=True)
