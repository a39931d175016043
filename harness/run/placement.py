"""Where ranks run: which backend, how many ranks, on which devices. Decided in the parent, on what a probe saw; pure."""

from __future__ import annotations

import glob
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from harness.errors import BackendUnavailable, ConfigError, Problem
from harness.run.plan import BACKENDS

Probe = Callable[[], "Machine"]

# NVIDIA, any GPU with a render node, Ascend, Kunlun, the kernel's own class for accelerators, AMD's ROCm.
_ACCELERATOR_FILES = tuple(
    f"/dev/{name}" for name in ("nvidia[0-9]*", "dri/renderD*", "davinci[0-9]*", "xpu[0-9]*", "accel*", "kfd")
)


@dataclass(frozen=True)
class Machine:
    """What a process that has torch imported sees.

    Attributes:
        torch: Version of torch; empty where nobody needed to ask.
        groups: Names of the process groups that can be made.
        devices: Type of accelerator -> how many are visible.
        group_devices: Process group -> the types of devices that it says it is for.
    """

    torch: str = ""
    groups: Sequence[str] = ("gloo",)
    devices: Mapping[str, int] = field(default_factory=dict)
    group_devices: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Placement:
    """The answer: ``devices`` are absolute ids in rank order, empty on the CPU."""

    backend: str
    reason: str
    device: str
    nprocs: int
    devices: tuple[str, ...] = ()


def place(backend: str, nprocs: int, devices: str | None, cores: int, environ: Mapping[str, str], probe: Probe) -> Placement:
    """Return where ``nprocs`` ranks run.

    Args:
        backend: ``auto``, ``gloo``, ``nccl`` or ``bkcl``.
        nprocs: Number of ranks; -1 for every visible accelerator, or else every usable core.
        devices: Absolute device ids, with commas between; None for the first visible ones.
        cores: That this process may use.
        probe: Asked only where the answer depends on it, because it costs an import of torch.

    Raises:
        ConfigError: nprocs or the device list makes no sense.
        BackendUnavailable: The backend cannot run here with that many ranks.
    """
    if nprocs != -1 and nprocs < 1:
        sentence = (
            "{nprocs}={count} must be at least 1, or -1 for every visible device (on the CPU: every core this process may use)."
        )
        raise ConfigError(Problem(sentence, count=nprocs))
    if backend not in BACKENDS:
        sentence = "{backend}={name} is unknown. Backends are {known}; usable here: {usable}."
        usable = listed_usable(probe(), environ)
        raise BackendUnavailable(Problem(sentence, name=backend, known=", ".join(BACKENDS), usable=usable))
    # With a list of devices torch is asked all the same: whoever gives one counts on there being some.
    if backend == "gloo" or (backend == "auto" and not devices and not may_have_accelerator()):
        return _on_cpu(backend, nprocs, devices, cores)
    machine = probe()
    name, reason = _choose(backend, machine, environ)
    if name == "gloo":
        return _on_cpu(backend, nprocs, devices, cores)
    kind = "cuda" if name == "nccl" else device_of_bkcl(machine)
    visible = visible_ids(kind, machine.devices.get(kind, 0), environ)
    chosen = _choose_devices(devices, nprocs, visible, kind)
    count = len(chosen) if nprocs == -1 else nprocs
    # bkcl's group may be for the CPU as well: there, ranks share out cores, as with gloo.
    if kind == "cpu":
        return Placement(name, reason, kind, cores if nprocs == -1 else nprocs)
    if count > len(chosen) or count == 0:
        raise BackendUnavailable(_too_few(name, nprocs, kind, len(visible)))
    return Placement(name, reason, kind, count, tuple(chosen[:count]))


def _too_few(backend: str, nprocs: int, kind: str, visible: int) -> Problem:
    return Problem(
        "{backend}={name} needs one {unit} per rank: {nprocs}={count}, but {visible} {units} visible. Use {backend}=gloo"
        + (" or {nprocs}={visible}." if visible else "."),
        name=backend,
        unit=_unit(kind, 1, verb=False),
        count=nprocs,
        visible=visible,
        units=_unit(kind, visible),
    )


def _on_cpu(backend: str, nprocs: int, devices: str | None, cores: int) -> Placement:
    if devices:
        why = "{backend}=gloo runs" if backend == "gloo" else "{backend}=auto found no accelerator, so gloo runs"
        sentence = " ranks on the CPU and cannot honour {devices}={ids}. Drop the list, or use {backend}=nccl."
        raise ConfigError(Problem(why + sentence, ids=devices))
    reason = "auto: no accelerator" if backend == "auto" else "as asked"
    return Placement("gloo", reason, "cpu", cores if nprocs == -1 else nprocs)


def _choose(backend: str, machine: Machine, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the backend's name and why; what was asked for by name is checked, ``auto`` is found out."""
    if backend == "auto":
        return _find_out(machine)
    if backend == "bkcl" and "bkcl" not in machine.groups:
        sentence = (
            "{backend}=bkcl is not available: this torch build has no process group of that name "
            "(Kunlun's PyTorch plugin registers it). Available here: {usable}."
        )
        raise BackendUnavailable(Problem(sentence, usable=listed_usable(machine, environ)))
    if backend == "nccl" and "nccl" not in machine.groups:
        sentence = "{backend}=nccl is not available: this torch build ({torch}) has no NCCL. Available here: {usable}."
        raise BackendUnavailable(Problem(sentence, torch=machine.torch, usable=listed_usable(machine, environ)))
    return backend, "as asked"


def _find_out(machine: Machine) -> tuple[str, str]:
    seen = {kind: count for kind, count in machine.devices.items() if count}
    if "cuda" in seen and "nccl" in machine.groups:
        return "nccl", f"auto: {seen['cuda']} {_unit('cuda', seen['cuda'])} visible"
    if "xpu" in seen and "bkcl" in machine.groups:
        return "bkcl", f"auto: {seen['xpu']} {_unit('xpu', seen['xpu'])} visible"
    if seen:
        # Not gloo instead: an accelerator that goes unused must not pass for one that is absent.
        kind = next(iter(seen))
        sentence = (
            "{backend}=auto is unknown for the accelerator {kind} ({count} visible): this harness knows no process group "
            "for it. Use {backend}=gloo to train on the CPU."
        )
        raise BackendUnavailable(Problem(sentence, kind=kind, count=seen[kind]))
    return "gloo", "auto: no accelerator"


def device_of_bkcl(machine: Machine) -> str:
    """Return the type of device that bkcl's ranks use: XPU, or where none is visible the CPU, if the group is for it too."""
    return "cpu" if not machine.devices.get("xpu") and "cpu" in machine.group_devices.get("bkcl", ()) else "xpu"


def visible_ids(kind: str, count: int, environ: Mapping[str, str]) -> list[str]:
    """Return the absolute ids of the visible devices, in their order."""
    variable = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "XPU_VISIBLE_DEVICES"}.get(kind)
    # What a scheduler has left visible: ordinal N of this process is the Nth of these.
    named = [entry.strip() for entry in environ.get(variable or "", "").split(",") if entry.strip()]
    # CUDA stops at the first id that it does not know, so that fewer may be visible than are named.
    return named[:count] if named else [str(number) for number in range(count)]


def _choose_devices(devices: str | None, nprocs: int, visible: Sequence[str], kind: str) -> list[str]:
    if not devices:
        return list(visible)
    ids = [entry.strip() for entry in str(devices).split(",") if entry.strip()]
    # As texts: an id may be a UUID.
    absent = [entry for entry in ids if entry not in visible]
    if absent:
        seen = ", ".join(visible) or "none"
        sentence = "{devices}={ids}: {absent} is not visible here. Visible: {seen}."
        raise ConfigError(Problem(sentence, ids=devices, absent=absent[0], seen=seen))
    if len(set(ids)) != len(ids):
        raise ConfigError(Problem("{devices}={ids} names a device twice.", ids=devices))
    if nprocs not in (-1, len(ids)):
        sentence = "{devices}={ids} names {number} devices, but {nprocs}={count}. Make them equal."
        raise ConfigError(Problem(sentence, ids=devices, number=len(ids), count=nprocs))
    return ids


def listed_usable(machine: Machine, environ: Mapping[str, str]) -> str:
    """Return the backends that can run here, as a list to read."""
    usable = [name for name in ("gloo", "nccl", "bkcl") if name in machine.groups and _has_device(name, machine)]
    return ", ".join(usable) or "none"


def _has_device(name: str, machine: Machine) -> bool:
    kind = {"gloo": "cpu", "nccl": "cuda"}.get(name) or device_of_bkcl(machine)
    return kind == "cpu" or machine.devices.get(kind, 0) > 0


def may_have_accelerator() -> bool:
    """Return True where a device file or an installed torch plugin makes it worth asking torch."""
    # Asking torch costs an import of seconds, which a machine without any such file is spared.
    if any(glob.glob(pattern) for pattern in _ACCELERATOR_FILES):
        return True
    # torch loads, when it is imported, what is announced here, and that may bring a device of its own.
    return bool(importlib.metadata.entry_points(group="torch.backends"))


def _unit(kind: str, count: int, verb: bool = True) -> str:
    name = "GPU" if kind == "cuda" else kind.upper()
    plural = name if count == 1 else f"{name}s"
    return f"{plural} {'is' if count == 1 else 'are'}" if verb else plural
