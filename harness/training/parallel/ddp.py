"""Data parallelism that trains what one process trains: torch's `DistributedDataParallel` (DDP) under paddle's name.

The cases are added that DDP gets wrong or refuses.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from harness.errors import ConfigError, HarnessError
from harness.training.parallel.collectives import require_one_model
from harness.training.parallel.comm_hooks import Hook, MakeHook
from harness.training.parallel.layout import Layout, replaced_message
from harness.training.parallel.sparse import SparseTables, sparse_tables


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How DDP reduces gradients.

    Attributes:
        gradient_as_bucket_view: Whether gradients live in the buckets: less memory, one copy fewer.
        static_graph: Whether every step uses the same parameters in the same way.
        wrap_one_rank: Whether a single rank gets DDP too, to see what that alone costs.
        comm_hook: Makes what reduces a bucket in place of the mean in the gradients' own type.
    """

    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    wrap_one_rank: bool = False
    comm_hook: MakeHook | None = None


class DataParallel(nn.Module):
    """Train one module on all ranks of a group, each rank with its own part of the batch.

    After ``backward()`` every parameter's ``grad`` is the mean over the ranks of what each computed, equal in bits on
    all of them. Every rank takes rank 0's parameters and buffers at construction, and rank 0's buffers again at each
    training forward.

    What differs from torch's DDP, which does the work underneath:

    - At world size 1, without a process group, or with nothing to train it is a plain wrapper: no communication in
      forward or backward.
    - ``state_dict()`` holds the bare module's names, so a checkpoint fits any number of ranks and bare torch, both
      ways. ``named_parameters()`` and ``named_modules()`` keep DDP's ``module.`` prefix: they name what lies where.
    - Attributes of the module can be read through the wrapper. To change one, write to ``.module``.
    - Sparse embeddings (``sparse=True``) are reduced here, row by row: DDP fails on a table that a rank did not touch.
    - Parameters frozen or unfrozen after wrapping, a changed dtype or device, and a process group that starts later
      take effect at the next forward, where DDP would skip the reduction. All ranks must change alike.
    - Parameters replaced, added or removed after wrapping are an error at the next forward.

    As in DDP, a parameter that takes no part in a step needs ``find_unused_parameters=True`` (sparse tables do not); it
    then keeps ``grad = None`` if no rank used it. Without it DDP leaves that step's gradients unreduced and raises at
    the next forward. As in DDP, each rank calls forward equally often, in evaluation too if the module has buffers; to
    evaluate on one rank alone, call ``.module``.

    Args:
        module: The module to train, on its device already.
        strategy: Accepted for compatibility with paddle, without effect.
        comm_buffer_size: Size in MiB of the buckets in which gradients travel (DDP's ``bucket_cap_mb``).
        last_comm_buffer_size: Size in MiB of the one small bucket. Paddle sends it last. So does DDP until it has seen
            a backward; then it puts its buckets in the order of that, and sends the small one first, to start early.
        find_unused_parameters: Search each step's graph for parameters that it does not use.
        group: The process group; None is the default one.
        reduction: How gradients are reduced, beyond that.

    Raises:
        ConfigError: If a buffer size is not positive.
        Mismatch: If the ranks' modules differ in names, types or shapes of tensors, or in which of them are trained.
    """

    torch_ddp: DistributedDataParallel | None = None
    reduced_tables: SparseTables | None
    _wrapped_layout: Layout | None

    def __init__(
        self,
        module: nn.Module,
        strategy: object = None,
        comm_buffer_size: float = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: ProcessGroup | None = None,
        *,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        self.group = group
        reduction = reduction or Reduction()
        self._comm_hook = reduction.comm_hook
        self._wraps_one_rank = reduction.wrap_one_rank
        self._options: dict[str, Any] = {
            **_bucket_options(comm_buffer_size, last_comm_buffer_size),
            "process_group": group,
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": reduction.gradient_as_bucket_view,
            "static_graph": reduction.static_graph,
        }
        self._synchronising = True
        self._warned: set[str] = set()
        register: Any = self.register_load_state_dict_pre_hook
        register(_insert_module_prefix)
        self._wrap()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the wrapped module returns.

        Raises:
            HarnessError: If parameters were replaced, added or removed after wrapping, or if the module has sparse
                tables and its output holds no tensor from which the end of backward could be known.
        """
        if not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        self._follow_changes()
        if self.reduced_tables is None:
            return self._run(*args, **kwargs)
        with self.reduced_tables.anchored():
            output = self._run(*args, **kwargs)
        if self._synchronising:
            self.reduced_tables.reduce_after_backward(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of forwards inside accumulate locally; the first backward after it averages their sum."""
        before, self._synchronising = self._synchronising, False
        try:
            yield
        finally:
            self._synchronising = before

    def join(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        """Let ranks have different numbers of batches: who has none left answers the others' reductions, as in DDP.

        Raises:
            HarnessError: The module has sparse tables, whose reductions nobody would answer.
        """
        self._follow_changes()
        if self.reduced_tables is not None:
            raise HarnessError("join() does not know of sparse embeddings: give every rank as many batches as the others.")
        return nullcontext() if self.torch_ddp is None else self.torch_ddp.join(*args, **kwargs)

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Have ``hook`` reduce the buckets of gradients, as DDP's method does, and for as long as this wrapper is."""
        if self.torch_ddp is not None:
            self.torch_ddp.register_comm_hook(state, hook)
        self._comm_hook = lambda: (state, hook)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's own state, without a ``module.`` prefix, also where this wrapper is nested."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state with the bare module's names, or one of torch's DDP, whose names begin with ``module.``.

        ``assign=True`` replaces the parameters, so that the wrapper has to be built anew. Where the wrapper is nested
        inside another module, torch does not find the ``_version`` of what it wraps.
        """
        load = super().load_state_dict if _is_of_ddp(self, state_dict, "") else self.module.load_state_dict
        return load(state_dict, strict=strict, assign=assign)

    def is_covered(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter was there when this wrapper was built, so that its gradient is averaged."""
        return any(known is parameter for known in self._known_parameters.values())

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss`` unchanged. Deprecated: gradients are averaged in backward."""
        _warn_deprecated(self._warned, "scale_loss")
        return loss

    def apply_collective_grads(self) -> None:
        """Do nothing. Deprecated: gradients are averaged in backward."""
        _warn_deprecated(self._warned, "apply_collective_grads")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    def __getstate__(self) -> dict[str, Any]:
        # A copy (an average of weights, say) builds its own reducer when it is first trained.
        return self.__dict__ | {"torch_ddp": None, "reduced_tables": None, "_wrapped_layout": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        # A process group cannot be copied: the copy's, and its layers', is the same.
        memo[id(self.group)] = self.group
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return twin

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.torch_ddp is None:
            return self.module(*args, **kwargs)
        with nullcontext() if self._synchronising else self.torch_ddp.no_sync():
            return self.torch_ddp(*args, **kwargs)

    def _follow_changes(self) -> None:
        layout = Layout.of(self, self.group)
        if layout == self._wrapped_layout:
            return
        if self._wrapped_layout is not None and layout.identities != self._wrapped_layout.identities:
            raise HarnessError(replaced_message(self._known_parameters, dict(self.named_parameters())))
        self._wrap()

    def _wrap(self) -> None:
        """Build what reduces the gradients of the parameters that are trainable now; collective over the group."""
        _let_go(self.torch_ddp)
        # Set past nn.Module's registration: DDP holds the module a second time.
        object.__setattr__(self, "torch_ddp", None)
        self.reduced_tables = None
        # Holding the parameters keeps their identities from being used again.
        self._known_parameters = dict(self.named_parameters())
        self._wrapped_layout = Layout.of(self, self.group)
        if self._wrapped_layout.world_size == 1 and not (self._wraps_one_rank and dist.is_initialized()):
            return
        require_one_model(self.module, self.group)
        tables = sparse_tables(self.module)
        dense = [p for p in self.module.parameters() if p.requires_grad and not any(p is table for table in tables)]
        if dense:
            object.__setattr__(self, "torch_ddp", _build_ddp(self.module, tables, self._comm_hook, self._options))
        else:
            # Without DDP, which does it at its construction.
            _broadcast_state(self.module, self.group)
        if tables:
            anchor = dense[0] if dense and self.find_unused_parameters else None
            self.reduced_tables = SparseTables(self.module, tables, anchor, self.group)


def _warn_deprecated(warned: set[str], name: str) -> None:
    # Once for each wrapper: scripts call these in every step.
    if name not in warned:
        warned.add(name)
        message = f"DataParallel.{name}() does nothing: backward averages the gradients. Remove the call."
        warn(message, FutureWarning, stacklevel=3)


def _let_go(ddp: DistributedDataParallel | None) -> None:
    if ddp is not None:
        # A process's first DDP is in a reference cycle: until it is collected, its hooks would go on reducing. torch has no
        # public call for it.
        ddp.reducer._remove_autograd_hooks()


def _build_ddp(
    module: nn.Module, tables: Sequence[nn.Parameter], hook: MakeHook | None, options: Mapping[str, Any]
) -> DistributedDataParallel:
    # DDP reduces what is trainable at its construction and broadcasts everything: just right for the tables.
    with _frozen(tables):
        ddp = DistributedDataParallel(module, **options)
    if hook is not None:
        # Made for this DDP: a hook's state may hold one model's errors, as PowerSGD's does.
        ddp.register_comm_hook(*hook())
    return ddp


def _bucket_options(comm_buffer_size: float, last_comm_buffer_size: float) -> dict[str, Any]:
    for name, size in (("comm_buffer_size", comm_buffer_size), ("last_comm_buffer_size", last_comm_buffer_size)):
        if size <= 0:
            raise ConfigError(f"{name}={size} is not a bucket size: it is a number of MiB above 0.")
    if (comm_buffer_size, last_comm_buffer_size) == (25, 1):
        return {}  # DDP's own defaults; any bucket_cap_mb given, 25 included, would end the small bucket
    # Only some versions of torch have it.
    if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
        warn(f"torch {torch.__version__} has no setting for last_comm_buffer_size; its own choice holds.", stacklevel=4)
        return {"bucket_cap_mb": comm_buffer_size}
    return {"bucket_cap_mb_list": [last_comm_buffer_size, comm_buffer_size]}


def _is_of_ddp(model: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a state has the names that torch's DDP gives, where the bare module has none of the kind."""
    names = [name for name in state_dict if name.startswith(prefix)]
    # A bare module may itself have a part of that name.
    return bool(names) and not hasattr(model.module, "module") and all(n.startswith(f"{prefix}module.") for n in names)


def _insert_module_prefix(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the entries of a nested wrapper to where torch looks for them, below ``module.``."""
    if _is_of_ddp(model, state_dict, prefix):
        return
    # Over a list, because the dictionary changes meanwhile.
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)


def _broadcast_state(module: nn.Module, group: ProcessGroup | None) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        # By the number within the group: rank 0 of all may be none of its members.
        dist.broadcast(tensor.detach(), group=group, group_src=0)


@contextmanager
def _frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
