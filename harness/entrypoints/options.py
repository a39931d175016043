"""The launch command's line: its options, what they mean, and where the script's own arguments begin."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from harness.errors import ConfigError
from harness.run.plan import BACKENDS

PARAMETER_SERVER = (
    "server_num",
    "worker_num",
    "servers",
    "workers",
    "http_port",
    "heter_workers",
    "heter_worker_num",
    "heter_devices",
    "coordinators",
    "coordinator_num",
    "with_gloo",
    "trainers",
    "trainer_num",
    "gloo_port",
    "run_mode",
)
"""Options of paddle's parameter-server mode; each takes a value."""

COLLECTIVE = ("nproc_per_node", "nprocs", "gpus", "selected_gpus", "devices", "xpus", "nnodes", "node_rank", "max_restarts")
"""Options that only make sense for collective training."""

_BACKEND_COUNTED = {"auto": None, "cpu": "gloo", "gpu": "nccl"}
"""What torchrun's users write in place of a number of ranks -> the backend whose devices, or cores, are counted."""

_FLAGS = ("-m", "--module", "-h", "--help")
_EPILOG = """\
examples:
  python -m harness.launch --nproc_per_node=4 --backend=gloo train.py --lr 0.1
  python -m harness.launch --nproc_per_node=2 --gpus=4,5 --log_dir=logs train.py
  python -m harness.launch --module my_package.train --epochs 3
  python -m harness.launch --nnodes=2 --node_rank=0 --master=10.0.0.1:29500 train.py   (and --node_rank=1 on the other)

In the script, harness.init_parallel_env() joins the ranks; torch.distributed.init_process_group() does too. Options may be
written with dashes or underscores, and are never abbreviated. Everything after the script's name is the script's own.
Rank 0's output is shown as it comes; of the other ranks, warnings are shown, and a failure. --log_dir keeps all of it.
The exit status is that of the rank that failed first: its own code, or 128 + the signal that ended it.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse's own way is to print its usage and to exit with status 2.
        raise ConfigError(f"{message[:1].upper()}{message[1:]}. See python -m harness.launch --help.")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options, with the script as ``script`` and its own arguments as ``arguments``.

    Raises:
        ConfigError: An option is unknown or makes no sense, or there is no script.
    """
    options, rest = split(arguments)
    if rest is None and {"-h", "--help"}.isdisjoint(options):
        raise ConfigError("There is no script to run. Usage: python -m harness.launch [options] script.py [its arguments]")
    # The mode that there is may be said.
    options = [option for option in options if option != "--run_mode=collective"]
    # Before argparse, which knows none of these options.
    refuse_parameter_server(options)
    namespace = _parser().parse_args(options)
    _choose_counted(namespace)
    # There is a script by now: --help, which needs none, has ended the command.
    namespace.script, *namespace.arguments = rest or [""]
    return namespace


def split(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the command's own options, each as one word with underscores, and what follows them; None where nothing does.

    Raises:
        ConfigError: An option is unknown, or lacks its value.
    """
    options: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        # Not left to argparse, which would take the script's own options for the command's.
        if word == "--":
            return options, words or None
        if not word.startswith("-") or word == "-":
            return options, [word, *words]
        if word in _FLAGS:
            options.append(word)
            continue
        name, has_value, value = word.partition("=")
        name = _known(name)
        if not has_value:
            if not words:
                raise ConfigError(f"{name} needs a value: {name}=VALUE.")
            value = words.pop(0)
        options.append(f"{name}={value}")
    return options, None


def _known(name: str) -> str:
    """Return an option's name with underscores.

    Raises:
        ConfigError: There is none of that name.
    """
    # An old option works, but nobody is sent to it.
    works = [f"--{option}" for option in _names() if option != "ips"]
    wanted = "--" + name.lstrip("-").replace("-", "_")
    if name.startswith("--") and wanted in (*works, "--ips", *(f"--{option}" for option in PARAMETER_SERVER)):
        return wanted
    close = difflib.get_close_matches(wanted, works, n=1)
    hint = f"Did you mean {close[0]}?" if close else "See python -m harness.launch --help."
    raise ConfigError(f"There is no option {name}. {hint} The script's own options come after its name.")


def _choose_counted(asked: argparse.Namespace) -> None:
    """Turn a word for the number of ranks into -1, and into the backend that it means.

    Raises:
        ConfigError: Another backend was asked for.
    """
    word = asked.nproc_per_node
    if word not in _BACKEND_COUNTED:
        return
    backend = _BACKEND_COUNTED[word]
    if backend is not None and asked.backend not in ("auto", backend):
        raise ConfigError(f"--nproc_per_node={word} goes with --backend={backend}, not with --backend={asked.backend}.")
    asked.nproc_per_node, asked.backend = -1, backend or asked.backend


def _names() -> list[str]:
    # argparse lists an option's spellings nowhere in public; a test compares them with the help.
    return [text.removeprefix("--") for action in _parser()._actions for text in action.option_strings if text.startswith("--")]


def refuse_parameter_server(options: Sequence[str]) -> None:
    """Refuse parameter-server options: alone they ask for a mode that does not exist here, beside others for two modes at once.

    Raises:
        ConfigError: There are such options.
    """
    given = dict(option.removeprefix("--").partition("=")[::2] for option in options)
    servers = [name for name in PARAMETER_SERVER if name in given]
    if not servers:
        return
    collective = [name for name in COLLECTIVE if name in given]
    if given.get("backend", "auto") != "auto":
        collective.insert(0, f"backend={given['backend']}")
    if collective:
        raise ConfigError(
            f"--{servers[0]} asks for parameter-server mode and --{collective[0]} for collective mode: they exclude each "
            f"other. Drop --{servers[0]}: only collective mode exists here."
        )
    raise ConfigError(
        f"--{servers[0]} asks for parameter-server mode, which does not exist here: only collective mode does. "
        f"Drop --{servers[0]}, and say how many ranks by --nproc_per_node."
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m harness.launch",
        usage="python -m harness.launch [options] script.py [the script's own arguments]",
        description="Run a script in several ranks, each a Python interpreter of its own, and stop them all when one fails.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_usual(parser.add_argument_group("what is run where"))
    _add_watching(parser.add_argument_group("while it runs"))
    _add_machines(parser.add_argument_group("several machines, and restarts (torch's elastic engine)"))
    return parser


def _add_usual(group: argparse._ArgumentGroup) -> None:
    counted = "gpu, cpu: one each; default: auto, every visible accelerator, or else every core that may be used"
    kinds = "default: auto, which is nccl where there are GPUs, and gloo where there is no accelerator"
    shared = "default: auto, the cores shared out, or OMP_NUM_THREADS where that is set"
    _add(
        group,
        "--nproc_per_node",
        "--nprocs",
        type=_count,
        metavar="N",
        help=f"ranks on this machine; {counted}",
    )
    # Without choices=: an unknown one is refused where it is also known what is usable here.
    _add(group, "--backend", default="auto", metavar="NAME", help=f"{', '.join(BACKENDS)}; {kinds}")
    _add(group, "--gpus", "--selected_gpus", metavar="IDS", help="GPUs to use, numbered as in CUDA_VISIBLE_DEVICES: 4,5")
    _add(group, "--xpus", metavar="IDS", help="Kunlun XPUs to use")
    _add(group, "--devices", metavar="IDS", help="devices to use, whatever their type")
    _add(group, "--threads", default="auto", type=_threads, metavar="N", help=f"of the math libraries per rank; {shared}")
    group.add_argument("-m", "--module", action="store_true", help="the script is a module's name, as in python -m")


def _add_watching(group: argparse._ArgumentGroup) -> None:
    kept = "keep what each rank printed, as DIR/rank-N.log; default: nothing is kept"
    silent = "ranks that print nothing for so long count as hung, and are stopped; default: wait for ever"
    _add(group, "--log_dir", metavar="DIR", help=kept)
    _add(group, "--timeout_s", type=float, metavar="SECONDS", help=silent)


def _add_machines(group: argparse._ArgumentGroup) -> None:
    again = "start all ranks again after a failure, so many times; default: 0"
    _add(group, "--max_restarts", default=0, type=_whole, metavar="N", help=again)
    _add(group, "--nnodes", default=1, type=_whole, metavar="N", help="machines; run this command on each; default: 1")
    _add(group, "--node_rank", type=_whole, metavar="K", help="number of this machine, from 0")
    _add(group, "--master", metavar="HOST:PORT", help="where ranks meet; on one machine it may be left out")
    _add(group, "--ips", metavar="HOSTS", help="deprecated: use --nnodes, --node_rank and --master")


def _add(group: argparse._ArgumentGroup, *names: str, **settings: Any) -> None:
    group.add_argument(*names, action=_Once, **settings)


class _Once(argparse.Action):
    """Stores a value; a second, different one is a mistake rather than an answer."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        seen = vars(namespace).setdefault("_seen", {})
        # Values and not texts: 4 and 04 do not contradict each other.
        first, value = seen.setdefault(self.dest, (option_string, values))
        # By identity first: nan differs from itself.
        if value is not values and value != values:
            raise ConfigError(f"{first}={value} and {option_string}={values} contradict each other.")
        setattr(namespace, self.dest, values)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _count(text: str) -> int | str:
    return text if text in _BACKEND_COUNTED else _whole(text)


def _threads(text: str) -> int | str:
    return text if text == "auto" else _whole(text)
