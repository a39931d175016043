"""Which types a computation narrows its numbers to of its own accord, beside what the run's precision says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from harness.training.batch import tensors_in

_READS = {"tolist", "numpy", "__array__", "__dlpack__", "data_ptr"}
"""Methods by which numbers leave torch unseen: to Python, to numpy, to kernels that others launch."""


class Narrowing(TorchDispatchMode):
    """Follows numbers that an operation within it returned in a coarser type than it was given: ``x.float()``, autocast.

    What was computed from such numbers is known by its storage, so that views and changes in place are followed too. Numbers
    count as on the way to the loss where they leave torch, where the tensor that holds them has no plain storage, and where
    hooks on saved tensors (checkpointing, say) may keep them for backward. It may be entered again: what it knows stays.
    What a kernel writes unknown to torch is not followed, nor what backward narrows or a hook on a tensor holds.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = _Reads(self)
        self._by_storage: dict[StorageWeakRef, torch.dtype] = {}
        self._reached: torch.dtype | None = None
        self._is_hooked = False

    def narrowed(self, loss: Tensor) -> torch.dtype | None:
        """Return the coarsest type on the way to ``loss``, to be asked before its backward; None where nothing was narrowed."""
        # A hook may keep any tensor for backward and make it again: so whatever was narrowed may count.
        if self._is_hooked:
            return coarsest([self._reached, *self._by_storage.values()])
        return coarsest([self._reached, *map(self._dtype_of, [loss, *_kept_by_functions(loss)])])

    def reach(self, tensors: Iterable[Tensor]) -> None:
        """Count what is in these tensors as on the way to the loss."""
        # It cannot be followed outside torch, and may come back as any number.
        self._reached = coarsest([self._reached, *map(self._dtype_of, tensors)])

    def __enter__(self) -> Self:
        """Begin, or go on."""
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        """End."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._reads.__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation, and look at what went in and what came out."""
        kwargs = kwargs or {}
        given = list(tensors_in([*args, *kwargs.values()]))
        narrowed = coarsest(map(self._dtype_of, given))
        finest = min((torch.finfo(t.dtype).eps for t in given if _is_real_or_complex(t)), default=None)
        out = func(*args, **kwargs)
        # What it wrote into its arguments too: an operation need not return that.
        made = list(tensors_in([out, _written(func, args, kwargs)]))
        for tensor in made:
            is_coarser = finest is not None and _is_real_or_complex(tensor) and torch.finfo(tensor.dtype).eps > finest
            self._note(tensor, coarsest([narrowed, tensor.dtype if is_coarser else None]))
        if not made:
            # It returned no tensor, but a number, as item() does: the way out of torch.
            self._reached = coarsest([self._reached, narrowed])
        if not self._is_hooked and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            self._is_hooked = True
        return out

    def _note(self, tensor: Tensor, dtype: torch.dtype | None) -> None:
        if dtype is None:
            return
        storage = _storage(tensor)
        if storage is None:
            self._reached = coarsest([self._reached, dtype])
        else:
            # The coarsest of what was ever written there: a part of it may still be the old.
            self._by_storage[storage] = coarsest([dtype, self._by_storage.get(storage)]) or dtype

    def _dtype_of(self, tensor: Tensor) -> torch.dtype | None:
        # Where nothing was narrowed, as in most models, no storage has to be looked up.
        storage = _storage(tensor) if self._by_storage else None
        return self._by_storage.get(storage) if storage is not None else None


class _Reads(TorchFunctionMode):
    """Tells what is read out of tensors without an operation."""

    def __init__(self, narrowing: Narrowing) -> None:
        super().__init__()
        self._narrowing = narrowing

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _READS:
            self._narrowing.reach(tensors_in(args))
        return func(*args, **(kwargs or {}))


def coarsest(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """Return the type with the fewest digits."""
    return max((dtype for dtype in dtypes if dtype is not None), key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _is_real_or_complex(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _storage(tensor: Tensor) -> StorageWeakRef | None:
    """Return what tells a tensor's storage from all others, freed ones too; None where it has none of the plain kind."""
    try:
        return StorageWeakRef(tensor.untyped_storage()) if tensor.layout == torch.strided else None
    except RuntimeError:  # its NotImplementedError: of a transform of torch.func, or of a layout without one
        return None


@cache
def _places_written(func: Any) -> tuple[tuple[int, str], ...]:
    # Only an operation's schema, which is private, tells which arguments it writes into.
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in _places_written(func)]


def _kept_by_functions(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that functions with a backward of their own keep for it, on the way to the loss."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # A loop and not a recursion: graphs are deeper than Python's stack.
        nodes += [before for before, _ in node.next_functions]
        if isinstance(node, BackwardCFunction):
            yield from tensors_in([node.saved_tensors, vars(node)])
