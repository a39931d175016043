"""The configuration of ``run.py`` and of the plugin: schema, help and options, made of what ``harness/run`` declares."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, get_args

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from harness.run.faults import FAULTS
from harness.run.launch_settings import LaunchSettings, SweepSettings
from harness.run.plan import BACKENDS, TIERS, TrainPlan
from harness.run.setting import Setting, setting, settings_of

GROUPS = {
    "launcher": "How ranks start.",
    "backend": "Device and process group.",
    "recipe": "",
    "compare": "How the ranks' training is verified, before it starts.",
    "fault": "A fault to inject into the ranks, to see that the checks catch it.",
    "report": "What shows the results.",
}
"""Group of options -> its line of ``--help``, in the order of ``--cfg job``; a recipe's names its class."""

SCHEMA = "harness_schema"
"""What a configuration of ``run.py``, or one like it, has first among its defaults."""


def declared() -> list[Setting]:
    """Return the settings of ``run.py``, in the order of ``--help``."""
    return [setting for declaration in (LaunchSettings, TrainPlan, SweepSettings) for setting in settings_of(declaration)]


def places() -> dict[str, list[Setting]]:
    """Return what stands at the root of the configuration: groups, each with what it holds, then single settings."""
    found: dict[str, list[Setting]] = {group: [] for group in GROUPS}
    for each in declared():
        found.setdefault(each.path.partition(".")[0], []).append(each)
    return found


def _parts(place: Sequence[Setting]) -> dict[str, Setting]:
    """Return key -> setting of what is a group, or settings that are one value of a plan; nothing for a single setting."""
    declaration = place[0].schema
    # A group that is one value of a plan, as ddp, is declared by a class of its own.
    if isinstance(declaration, type) and dataclasses.is_dataclass(declaration):
        return {each.name: each for each in settings_of(declaration)}
    return {key: each for each in place if (key := each.path.partition(".")[2])}


# --- schema --------------------------------------------------------------------------------------------------------------


def _dataclass(name: str, fields: Iterable[tuple[str, Any, Any]]) -> Any:
    """Return a dataclass with fields of a name, a type and a default; whatever Hydra cannot check may be anything."""
    typed = [(key, _checked(kind), setting(default)) for key, kind, default in fields]
    # Configurations are pickled for the ranks, which find a class by its module and its name there.
    globals()[name] = dataclasses.make_dataclass(name, typed, namespace={"__module__": __name__})
    return globals()[name]


def _checked(kind: Any) -> Any:
    # OmegaConf takes unions of plain types alone, and no abstract containers such as Mapping.
    plain = set(get_args(kind) or (kind,)) <= {bool, int, float, str, type(None)}
    return kind if plain or dataclasses.is_dataclass(kind) else Any


def _field(name: str, place: Sequence[Setting]) -> tuple[str, Any, Any]:
    parts = [(key, part.type, part.schema) for key, part in _parts(place).items()]
    if not parts:
        return name, place[0].type, place[0].schema
    group = _dataclass(f"{name.title()}Conf", parts)
    return name, group, group


Conf = _dataclass("Conf", [_field(name, place) for name, place in places().items()])
"""The whole configuration of ``run.py``."""


PluginConf = _dataclass(
    "PluginConf",
    [
        ("_target_", str, "hydra_plugins.harness_launcher.HarnessLauncher"),
        ("_recursive_", bool, False),  # a recipe's _target_ is for the ranks to make
        *((each.name, each.type, each.default) for each in [*settings_of(LaunchSettings), *settings_of(SweepSettings)]),
        ("train", Any, None),  # settings of the harness's own training loop; null for anybody else's task
        ("choices", Any, None),  # name of a column -> chosen option, for the tables
    ],
)
"""``hydra/launcher=harness`` in any Hydra app: start the app's function in every rank."""


def handed_on() -> dict[str, Any]:
    """Return what the plugin gets of a configuration of ``run.py``: each setting, from where it stands."""
    values = {each.name: f"${{{each.path}}}" for each in declared()}
    # Under one key, which is null for anybody else's task: the plugin serves any app.
    training = {each.name: values.pop(each.name) for each in settings_of(TrainPlan)}
    return {"hydra": {"launcher": {**values, "train": training}}}


# --- help ----------------------------------------------------------------------------------------------------------------


# OmegaConf gives the whole configuration to a resolver that has a keyword of this very name.
def help_text(*, _root_: DictConfig) -> str:
    """Return the body of ``--help``: each setting with its value as composed and what it does."""
    # Before any is filled: settings of one heading, as Proof, come from several declarations.
    headings: dict[str, list[str]] = {each.heading: [] for each in declared()}
    for name, place in places().items():
        headings[place[0].heading] += _help_of(name, place, _root_)
    return "\n".join(line for heading, lines in headings.items() for line in ("", heading, *lines))


def _help_of(name: str, place: Sequence[Setting], root: DictConfig) -> list[str]:
    value = OmegaConf.select(root, name)
    if not OmegaConf.is_config(value):
        return [_line(f"{name}={_shown(value)}", place[0].text)]
    chosen, parts = OmegaConf.select(root, f"hydra.runtime.choices.{name}"), _parts(place)
    # A recipe's arguments are declared nowhere: the comments in its YAML are their help.
    texts = {key: part.text for key, part in parts.items()} or _comments(root, name, chosen)
    title = GROUPS.get(name, _first_line(place[0].schema)) or f"{value.get('_target_', '')}: what is trained"
    lines = [_line(name if chosen is None else f"{name}={chosen}", title)]
    hidden = {"_target_", *(key for key, part in parts.items() if not part.text)}
    for key in value:
        if key not in hidden and not OmegaConf.is_config(value[key]):
            lines.append(_line(f"  {name}.{key}={_shown(value[key])}", texts.get(key) or ""))
    return lines


def _first_line(declaration: Any) -> str:
    return (declaration.__doc__ or "").partition("\n")[0]


def _comments(root: DictConfig, group: str, option: str) -> dict[str, str]:
    """Return key -> comment of a group's option, from the first folder of the search path that has its file."""
    for source in OmegaConf.select(root, "hydra.runtime.config_sources") or []:
        path = Path(str(source.path)) / group / f"{option}.yaml"
        if source.schema == "file" and path.exists():
            # By a pattern, because a YAML parser drops comments.
            found = re.findall(r"^\s*(\w+):[^#\n]*#\s*(.+)$", path.read_text(), re.MULTILINE)
            return dict(found)
    return {}


def _line(left: str, right: str) -> str:
    return f"  {left:<36} {right}".rstrip()


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- options -------------------------------------------------------------------------------------------------------------


@functools.cache
def nodes() -> dict[str, Any]:
    """Return path -> content of what stands in place of files of ``conf/``: schema, and options that are names in the code."""
    # Not at the top: this file is imported at each start of any Hydra app, and few of these start a rank.
    from harness.launchers.registry import LAUNCHERS

    sizes = {name: {} if fault.size is None else {"size": float(fault.size)} for name, fault in FAULTS.items()}
    return {
        SCHEMA: Conf,
        "harness_plugin": handed_on(),
        **{f"launcher/{name}": {"name": name} for name in LAUNCHERS},
        **{f"backend/{name}": {"name": name} for name in BACKENDS},
        **{f"compare/{name}": {"tier": name} for name in TIERS},
        "fault/none": {"name": None},
        **{f"fault/{name}": {"name": name, **size} for name, size in sizes.items()},
    }


def has_schema(folder: str) -> bool:
    """Return True for a folder, or package, with a configuration of ``run.py``: one that has the schema among its defaults."""
    # Hydra names a folder inside a package by pkg://; any other, with file:// or without, is a path.
    scheme, _, place = folder.rpartition("://")
    try:
        path = resources.files(place.replace("/", ".")) if scheme == "pkg" else Path(place)
        # By its bytes: asked at each start of a Hydra app, before anything is composed.
        return any(SCHEMA.encode() in file.read_bytes() for file in path.iterdir() if file.name.endswith(".yaml"))
    except (ImportError, OSError, ValueError):
        # Hydra has a sentence of its own for a folder that is not there.
        return False


# --- what Hydra asks -----------------------------------------------------------------------------------------------------


# OmegaConf calls a resolver anew at each access, and each has to get the same answer.
_own_folders: dict[str, str] = {}


def own_folder(path: str) -> str:
    """Return ``path``, or with a number behind it, as a new folder that no other command has: the same one at every call.

    Raises:
        SystemExit: No folder can be made there.
    """
    if path not in _own_folders:
        taken, number = path, 1
        while True:
            try:
                # Made and not just looked for: of two commands of one second, the system lets one alone make it.
                Path(taken).mkdir(parents=True)
                break
            except FileExistsError:
                number += 1
                taken = f"{path}-{number}"
            except OSError as error:
                # Within an interpolation any other exception would come out as pages of Hydra's and OmegaConf's frames.
                sys.exit(f"{path} cannot be made: {error.strerror}. hydra.sweep.dir=FOLDER takes another.")
        _own_folders[path] = taken
    return _own_folders[path]


def incomplete(error: OmegaConfBaseException) -> str:
    """Return what to say of a setting that is missing, or that refers to what is."""
    return f"The configuration is incomplete: {str(error).splitlines()[0]} ({error.full_key}). No rank was started."


def register() -> None:
    """Put the plugin where Hydra finds it."""
    store = ConfigStore.instance()
    # Hydra ignores launchers outside of a multirun; the callback notices.
    node = {
        "hydra": {
            "launcher": PluginConf,
            "callbacks": {"harness": {"_target_": "hydra_plugins.harness_launcher.NeverBypassed"}},
        }
    }
    store.store(group="hydra/launcher", name="harness", node=node, package="_global_", provider="harness")
    # OmegaConf refuses a name that it already has, and this may be called again in one process.
    OmegaConf.register_new_resolver("harness_help", help_text, replace=True)
    OmegaConf.register_new_resolver("harness_own_folder", own_folder, replace=True)
