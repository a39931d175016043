"""A model's weights alone, for whoever uses it: full, without prefixes, readable without harness."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from harness.errors import ConfigError
from harness.run.checkpoint_file import find_weights, is_whole

_PREFIXES = ("module.", "_orig_mod.")
"""What DDP and ``torch.compile`` put before every name of a model that they wrap."""


def save_weights(state: Mapping[str, Tensor], path: Path) -> Path:
    """Write a model's ``state_dict()``, each tensor once where several names share it, and return the file.

    It is ``path``, which ends in ``.safetensors``; where that format cannot hold a tensor (complex128, sparse), the same with
    ``.pt``, as ``torch.save`` writes it.
    """
    other = path.with_suffix(".pt")
    tensors, aliases = _once(state)
    try:
        _write(path, lambda aside: save_file(tensors, str(aside), metadata={"format": "pt", **aliases}))
    except (KeyError, ValueError, SafetensorError):
        _write(other, lambda aside: torch.save(dict(state), aside))
        path.unlink(missing_ok=True)
        return other
    other.unlink(missing_ok=True)
    return path


def _once(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return name -> tensor, each once, and further name -> that name, as ``safetensors.torch.load_model`` reads them."""
    names: dict[tuple[Any, ...], str] = {}
    aliases = {name: first for name, tensor in state.items() if (first := names.setdefault(_place(tensor), name)) != name}
    return {name: _own(tensor.detach()) for name, tensor in state.items() if name not in aliases}, aliases


def _own(tensor: Tensor) -> Tensor:
    """Return a tensor that has its memory to itself, as the format demands: a view of other memory is copied."""
    if tensor.layout != torch.strided or (tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _write(path: Path, write: Any) -> None:
    aside = path.with_name(f".{path.name}.aside")
    try:
        write(aside)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
            # As any other file of the job: safetensors makes its own for the owner alone.
            os.fchmod(file.fileno(), 0o666 & ~_umask())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _umask() -> int:
    """Return this process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def load_weights(model: nn.Module, source: str | Path, partial: bool = False) -> str:
    """Put weights into a model, by their file or a job's folder, and return in a sentence what was taken over.

    Args:
        partial: Whether to leave out what has no counterpart of the same name and shape, on either side.

    Raises:
        ConfigError: There are none, they are of another model, or, with ``partial``, none matches.
    """
    file = find_weights(Path(source))
    weights, state = read_weights(file), model.state_dict()
    matching = {name: value for name, value in weights.items() if name in state and state[name].shape == value.shape}
    problems = list(_differences(weights, state, matching))
    if problems and (not partial or not matching):
        hint = "" if partial else " weights_partial=true takes over what matches."
        raise ConfigError(f"weights={source}: they are of another model: {'; '.join(problems[:5])}.{hint}")
    model.load_state_dict(matching, strict=False)
    left_out = f", and not: {'; '.join(problems[:5])}" if problems else ""
    return f"Weights of {file}: {len(matching)} of the model's {len(state)} tensors taken over{left_out}."


def _differences(weights: Mapping[str, Tensor], state: Mapping[str, Tensor], matching: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield in words what has no counterpart; a name that shares its tensor with one that has needs none."""
    covered = {_place(state[name]) for name in matching}
    for name, tensor in state.items():
        if name not in weights and _place(tensor) not in covered:
            yield f"'{name}' is missing there"
        elif name in weights and name not in matching:
            yield f"'{name}' is {list(weights[name].shape)} there and {list(tensor.shape)} here"
    yield from (f"'{name}' is unknown here" for name in weights if name not in state)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two names of one tensor have in common; an empty tensor, or one of a sparse layout, is like no other."""
    if tensor.layout != torch.strided or not tensor.numel():
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def export(source: Path, target: Path) -> Path:
    """Write the weights of a job's folder, its checkpoint among them, to a file, and return that; torch alone is needed.

    Raises:
        ConfigError: There are none there.
    """
    return save_weights(read_weights(find_weights(source)), target)


def read_weights(file: Path) -> dict[str, Tensor]:
    """Return name -> tensor, on the CPU, of a ``.safetensors``, a state dictionary of torch's, or a checkpoint; data alone.

    Raises:
        ConfigError: It is none of these.
    """
    try:
        tensors = _from_safetensors(file) if file.suffix == ".safetensors" else _from_torch(file)
    except Exception as error:  # whatever damaged bytes, or a pickle that is no data, come to
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"weights={file} cannot be read: {reason}") from None
    if not tensors or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ConfigError(f"weights={file} holds no weights: neither tensors by name, nor a checkpoint.")
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
    return tensors


def _from_safetensors(file: Path) -> dict[str, Tensor]:
    with safe_open(str(file), framework="pt") as content:
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        # Names that share a tensor with one that was written.
        aliases = {name: other for name, other in (content.metadata() or {}).items() if other in tensors}
    return tensors | {name: tensors[other] for name, other in aliases.items()}


def _from_torch(file: Path) -> dict[str, Any]:
    if not is_whole(file):
        raise ConfigError("it is damaged, or something else has written it.")
    content = torch.load(file, map_location="cpu", weights_only=True)
    for key in ("model", "state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    return dict(content) if isinstance(content, Mapping) else {}
