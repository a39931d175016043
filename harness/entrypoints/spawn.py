"""``harness.spawn``: a function of one's own, called in every rank, and its values and errors back in the caller's hands."""

from __future__ import annotations

import atexit
import difflib
import os
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from harness.entrypoints.console import Console
from harness.entrypoints.exceptions import exception_of
from harness.entrypoints.messages import summary
from harness.entrypoints.pickling import main_of, name_of, pickle_call, require_guard, require_no_group
from harness.entrypoints.run_job import Attempt
from harness.entrypoints.settings import Settings, plan_of
from harness.errors import ConfigError, HarnessError, RankFailed
from harness.launchers import registry
from harness.launchers.base import Process
from harness.launchers.signals import Interrupted
from harness.launchers.temp_dir import TempDir
from harness.run.environment import RUN_DIR
from harness.run.folder import RunDir, read_value, write_whole
from harness.run.plan import RunPlan, Task
from harness.run.record import RunResult

_OPTIONS = ("backend", "gpus", "xpus", "selected_gpus", "start_method", "timeout_s", "threads", "print_config")
_OLD_OPTIONS = {
    "selected_devices": "use gpus='0,1', or xpus='0,1'",
    "started_port": "leave it out: no port has to be chosen, because rank 0 offers one that it has bound",
    "cluster_node_ips": "use python -m harness.launch --nnodes=N --node_rank=K --master=HOST:PORT on each machine",
    "node_ip": "use python -m harness.launch --nnodes=N --node_rank=K --master=HOST:PORT on each machine",
    "use_paddlecloud": "leave it out: the environment of a cluster's job is read by init_parallel_env()",
}
_OF_SEVERAL_MACHINES = ("cluster_node_ips", "node_ip", "use_paddlecloud")
_DEVICE_TYPES = {"gpus": "cuda", "selected_gpus": "cuda", "xpus": "xpu", "selected_devices": None}
"""Option that lists devices -> their type; None where it does not tell."""
# Strong references: a context that its caller drops lives on until _end_all has waited for it.
_unwatched: set[SpawnContext] = set()
# Weak ones: a daemon's context may be dropped, and its finalizer then ends its ranks.
_living: weakref.WeakSet[SpawnContext] = weakref.WeakSet()


class RankProcess:
    """The process of one rank.

    Attributes:
        rank: Its number.
        pid: Its process id.
    """

    def __init__(self, process: Process, rank: int) -> None:
        self.rank = rank
        self.pid = process.pid
        self._process = process

    @property
    def exitcode(self) -> int | None:
        """Its exit code, negative for the signal that ended it; None while it runs."""
        return self._process.poll()

    def is_alive(self) -> bool:
        """Return True while it runs."""
        return self._process.poll() is None

    def __repr__(self) -> str:
        return f"RankProcess(rank={self.rank}, pid={self.pid}, exitcode={self.exitcode})"


class SpawnContext:
    """The ranks of one ``spawn``.

    Attributes:
        processes: In rank order.
    """

    def __init__(self, plan: RunPlan, call: bytes) -> None:
        self._plan = plan
        folder = TempDir()
        self._run = folder.run()
        write_whole(self._run.call, call)
        self._attempt = Attempt(plan, self._run, Console())
        # It must hold nothing that leads to this context, which would then never be dropped.
        self._end = weakref.finalize(self, _clean, self._attempt, folder, os.getpid())
        # Not before _end_all has waited.
        self._end.atexit = False
        _living.add(self)
        self._result: RunResult | None = None
        self._error: BaseException | None = None
        self.processes: Sequence[RankProcess] = ()

    def join(self, timeout: float | None = None) -> bool:
        """Watch the ranks to their end and return True; False if ``timeout`` seconds pass before.

        Only here is rank 0's output shown, and a failed rank found and the others stopped: nobody watches in between.

        Raises:
            Exception: What a rank raised, with its own type where that can be pickled. Its ``__cause__`` has the rank's
                traceback, and it has the attributes of RankFailed: ``rank``, ``pid``, ``exit_code``, ``signal``.
            RankFailed: A rank ended by ``sys.exit``, a signal, KeyboardInterrupt and the like, or before the others.
            RunTimeout: The ranks were silent for ``timeout_s`` seconds.
            KeyboardInterrupt: Ctrl-C; all ranks are gone.
        """
        if self._error is not None:
            raise self._error
        return self._result is not None or self._watch(timeout)

    def return_values(self) -> list[Any]:
        """Return what the function returned in each rank, in rank order, after waiting for it if need be."""
        self.join()
        return [read_value(self._run, rank) for rank in range(self._plan.nprocs)]

    def output(self, rank: int) -> str:
        """Return what a rank has printed so far; those other than rank 0 print to nobody else."""
        path = self._run.log(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def _take_processes(self) -> None:
        self.processes = [RankProcess(process, rank) for rank, process in enumerate(self._attempt.processes)]

    def _watch(self, timeout: float | None) -> bool:
        try:
            result = self._attempt.watch(timeout)
        except Interrupted as interruption:
            self._finish()
            _pass_on(interruption)
        except BaseException as error:
            self._error = error
            self._finish()
            raise
        if result is None:
            return False
        _unwatched.discard(self)
        if result.status != "ok":
            self._error = exception_of(_with_what_is_lost(result, self._run), self._run)
            self._finish()
            raise self._error
        self._result = result
        return True

    def _finish(self) -> None:
        _unwatched.discard(self)
        self._end()


def spawn(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> SpawnContext:
    """Call ``func(*args)`` in each of ``nprocs`` ranks.

    The function gets no rank argument: it calls ``init_parallel_env()``, or ``get_rank()`` after that. It must lie at the top
    level of a module, and the call of ``spawn`` in the main script under ``if __name__ == "__main__":``, because every rank
    loads that script. Each rank gets its own copy of the arguments, tensors included.

    Rank 0's output is shown as it comes. Of the other ranks, ``warnings`` and log records from WARNING on are shown, with the
    rank's number; all that they print is in ``context.output(rank)``.

    Args:
        func: The function; None or anything that can be pickled is what it may return.
        args: Its arguments, as a tuple or list.
        nprocs: Number of ranks; -1 for every visible accelerator, or else every core that this process may use.
        join: Wait for the ranks. Otherwise the context is returned at once, and nobody watches the ranks until its
            ``join()`` is called. Whatever happens, they end with this process.
        daemon: For ``join=False``: True ends the ranks when the context is dropped, and with the program; False has the
            program wait for them at its end, as Python does for processes of its own.
        **options: ``backend`` (``'auto'``, ``'gloo'``, ``'nccl'``, ``'bkcl'``), ``gpus`` or ``xpus`` (absolute device ids,
            ``'4,5'`` or a list; ``selected_gpus`` is the same as ``gpus``), ``start_method`` (``'forkserver'``, ``'spawn'``,
            ``'fork'``), ``timeout_s`` (silence after which ranks count as hung; None waits for ever), ``threads`` of the math
            libraries per rank (``'auto'`` shares out the cores), ``print_config`` (say in one line where the ranks run).

    Returns:
        A context: ``join(timeout=None)``, ``processes``, ``return_values()``, ``output(rank)``.

    Raises:
        ConfigError: The function or an argument cannot reach the ranks, or a setting makes no sense; nothing was started.
        BackendUnavailable: The backend cannot run here with that many ranks.
        Exception: See :meth:`SpawnContext.join`.
    """
    try:
        context = _prepare(func, args, nprocs, options)
    except HarnessError as error:
        # The frames in between are ours.
        raise error.with_traceback(None) from None
    if not (join or daemon):
        _unwatched.add(context)
    # No time to watch is still time to start.
    context._watch(timeout=None if join else 0.0)
    context._take_processes()
    return context


def _prepare(func: Callable[..., Any], args: Sequence[Any], nprocs: int, options: Mapping[str, Any]) -> SpawnContext:
    require_guard()
    tells = _check_options(options)
    call = pickle_call(func, args)
    path, module = main_of(call)
    if path is None and call.refers_to_main:
        raise ConfigError(
            f"spawn() cannot hand {name_of(func)} to its ranks: it was typed into a notebook or prompt, or read from standard "
            "input. Save it in a file, and import it from there."
        )
    task = Task(kind="call", main_path=path, main_module=module)
    settings = _settings(task, nprocs, options)
    if settings.start_method == "fork":
        require_no_group()
    if settings.backend != "gloo" and settings.start_method == "forkserver":
        # If torch has to be asked, this process answers.
        registry.warm_up()
    # In a rank, which may call spawn() itself, the variable is the harness's own.
    if "MASTER_PORT" in os.environ and RUN_DIR not in os.environ:
        sentence = (
            f"MASTER_PORT={os.environ['MASTER_PORT']} of the environment is not used: rank 0 offers a port that it has bound."
        )
        warnings.warn(sentence, RuntimeWarning, stacklevel=3)
    plan = plan_of(settings)
    if tells:
        print(summary(plan), file=sys.stderr, flush=True)
    return SpawnContext(plan, call.content)


def _check_options(options: Mapping[str, Any]) -> bool:
    """Refuse an option that is none or of several machines, warn of an old one; return whether to print what runs where."""
    known = [*_OPTIONS, *_OLD_OPTIONS]
    for name in options:
        if name not in known:
            raise ConfigError(f"spawn() has no option {name}. {_closest(name)}")
    for name in _OF_SEVERAL_MACHINES:
        if options.get(name):
            # A training on one machine is not what was asked for.
            raise ConfigError(f"{name}={options[name]!r}: spawn() starts ranks on this machine alone; {_OLD_OPTIONS[name]}.")
    for name in _OLD_OPTIONS.keys() & options.keys():
        # Up to the caller's own line: past this function, _prepare() and spawn().
        warnings.warn(f"spawn({name}=...) is an old option: {_OLD_OPTIONS[name]}.", FutureWarning, stacklevel=4)
    return bool(options.get("print_config", False))


def _settings(task: Task, nprocs: int, options: Mapping[str, Any]) -> Settings:
    """Return what is asked for.

    Raises:
        ConfigError: Two options list devices, or one lists none.
    """
    given = {name: options[name] for name in _DEVICE_TYPES if options.get(name) is not None}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise ConfigError(f"{first}={given[first]} and {second}={given[second]} exclude each other: give one list of devices.")
    word, devices = next(iter(given.items()), (None, None))
    return Settings(
        task=task,
        door="spawn",
        nprocs=nprocs,
        backend=options.get("backend") or "auto",
        devices=None if word is None else _listed(word, devices),
        devices_word=word,
        device_type=_DEVICE_TYPES[word] if word is not None else None,
        start_method=options.get("start_method") or "forkserver",
        timeout_s=options.get("timeout_s"),
        threads=options.get("threads", "auto"),
        sys_path=sys.path,
    )


def _closest(name: str) -> str:
    everything = ["func", "args", "nprocs", "join", "daemon", *_OPTIONS]
    close = difflib.get_close_matches(name, everything, n=1)
    if close:
        return f"Did you mean {close[0]}?"
    return f"Its options are {', '.join(everything[2:])}."


def _listed(option: str, devices: Any) -> str:
    """Return device ids as text, commas between."""
    try:
        ids = [devices] if isinstance(devices, int) else devices.split(",") if isinstance(devices, str) else list(devices)
    except TypeError:
        raise ConfigError(f"{option}={devices!r} is no list of devices; write ids with commas between, as in '0,1'.") from None
    texts = [str(entry).strip() for entry in ids]
    if not texts or "" in texts:
        raise ConfigError(f"{option}={devices!r} names no device, or an empty one; write ids with commas between, as in '0,1'.")
    return ",".join(texts)


def _with_what_is_lost(result: RunResult, run: RunDir) -> RunResult:
    """Return ``result``, saying so where the exception that failed the run could not be kept with its type."""
    failed = next((rank for rank in result.ranks if rank.rank == result.failed_rank), None)
    if failed is None or failed.failure is None or "hung" in result.marks or run.error(failed.rank).exists():
        return result
    kind = failed.failure.type
    sentence = f"{kind} could not be brought here, as pickle cannot write and read it: `except {kind}` does not catch it."
    return replace(result, message=f"{result.message} {sentence}")


def _pass_on(interruption: Interrupted) -> NoReturn:
    """Let a signal that came while ranks ran do what it does without them."""
    if interruption.number == signal.SIGINT:
        raise KeyboardInterrupt from None
    # The signal's own action ends this process without the exit functions that would do this.
    registry.close_all()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    signal.raise_signal(interruption.number)
    raise RankFailed(f"{interruption}: all ranks were stopped.") from None


def _clean(attempt: Attempt, folder: TempDir, owner: int) -> None:
    """End what runs, and remove the folder; a copy of this process made by fork owns nothing of it."""
    if os.getpid() != owner:
        return
    try:
        attempt.stop()
    finally:
        folder.close()


@atexit.register
def _end_all() -> None:
    """Wait for the ranks that nobody has joined, unless they are daemons; then end what is left."""
    for context in list(_unwatched):
        try:
            context.join()
        except Exception as error:
            # Nobody is left to catch it, and atexit would print it with frames of ours.
            print(f"harness.spawn: ranks that nobody waited for failed: {error}", file=sys.stderr)
    for context in list(_living):
        # Finalizers have been shut down by now.
        if ended := context._end.detach():
            _, clean, arguments, _ = ended
            clean(*arguments)
