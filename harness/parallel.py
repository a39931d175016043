"""Data parallelism that trains what one process trains: gradients averaged over ranks, and BatchNorm over all of them.

`DataParallel` is torch's `DistributedDataParallel` (DDP) under paddle's name, with the cases added that DDP gets wrong
or refuses; `SyncBatchNorm` is torch's of that name for every backend, gloo on CPU included.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.autograd.variable import Variable
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from harness.errors import ConfigError, HarnessError


def _world_size(group: ProcessGroup | None) -> int:
    """Return the number of ranks in the group; 1 before initialisation and on a rank outside the group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    return max(1, dist.get_world_size(group))


# --- DataParallel ----------------------------------------------------------------------------------------------------


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

    Raises:
        ConfigError: If a buffer size is not positive.
    """

    _ddp: DistributedDataParallel | None = None
    _tables: _SparseTables | None
    _wrapped_layout: _Layout | None

    def __init__(
        self,
        module: nn.Module,
        strategy: object = None,
        comm_buffer_size: float = 25,
        last_comm_buffer_size: float = 1,
        find_unused_parameters: bool = False,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        self.group = group
        self._bucket_options = _bucket_options(comm_buffer_size, last_comm_buffer_size)
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
        if self._tables is None:
            return self._run(*args, **kwargs)
        with self._tables.anchored():
            output = self._run(*args, **kwargs)
        if self._synchronising:
            self._tables.reduce_after_backward(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of forwards inside accumulate locally; the first backward after it averages their sum."""
        before, self._synchronising = self._synchronising, False
        try:
            yield
        finally:
            self._synchronising = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped module's own state, without a ``module.`` prefix, also where this wrapper is nested."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state with the bare module's names.

        ``assign=True`` replaces the parameters, so that the wrapper has to be built anew. Where the wrapper is nested
        inside another module, torch does not find the ``_version`` of what it wraps.
        """
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return ``loss`` unchanged. Deprecated: gradients are averaged in backward."""
        self._warn_deprecated("scale_loss")
        return loss

    def apply_collective_grads(self) -> None:
        """Do nothing. Deprecated: gradients are averaged in backward."""
        self._warn_deprecated("apply_collective_grads")

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
        return self.__dict__ | {"_ddp": None, "_tables": None, "_wrapped_layout": None}

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self._ddp is None:
            return self.module(*args, **kwargs)
        with nullcontext() if self._synchronising else self._ddp.no_sync():
            return self._ddp(*args, **kwargs)

    def _warn_deprecated(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            message = f"DataParallel.{name}() does nothing: backward averages the gradients. Remove the call."
            warn(message, FutureWarning, stacklevel=3)

    def _follow_changes(self) -> None:
        layout = _Layout.of(self)
        if layout == self._wrapped_layout:
            return
        if self._wrapped_layout is not None and layout.identities != self._wrapped_layout.identities:
            raise HarnessError(_replaced_message(self._known_parameters, dict(self.named_parameters())))
        self._wrap()

    def _wrap(self) -> None:
        """Build what reduces the gradients of the parameters that are trainable now; collective over the group."""
        if self._ddp is not None:
            # A process's first DDP is in a reference cycle: until it is collected, its hooks would go on reducing.
            self._ddp.reducer._remove_autograd_hooks()
        # Set past nn.Module's registration: DDP holds the module a second time.
        object.__setattr__(self, "_ddp", None)
        self._tables = None
        # Holding the parameters keeps their identities from being used again.
        self._known_parameters = dict(self.named_parameters())
        self._wrapped_layout = _Layout.of(self)
        if self._wrapped_layout.world_size == 1:
            return
        tables = _sparse_tables(self.module)
        dense = [p for p in self.module.parameters() if p.requires_grad and not any(p is table for table in tables)]
        if dense:
            object.__setattr__(self, "_ddp", self._build_ddp(tables))
        else:
            _broadcast_state(self.module, self.group)
        if tables:
            anchor = dense[0] if dense and self.find_unused_parameters else None
            self._tables = _SparseTables(self.module, tables, anchor, self.group)

    def _build_ddp(self, tables: Sequence[nn.Parameter]) -> DistributedDataParallel:
        # DDP reduces what is trainable at its construction and broadcasts everything: just right for the tables.
        with _frozen(tables):
            return DistributedDataParallel(
                self.module,
                process_group=self.group,
                find_unused_parameters=self.find_unused_parameters,
                **self._bucket_options,
            )


def _bucket_options(comm_buffer_size: float, last_comm_buffer_size: float) -> dict[str, Any]:
    for name, size in (("comm_buffer_size", comm_buffer_size), ("last_comm_buffer_size", last_comm_buffer_size)):
        if size <= 0:
            raise ConfigError(f"{name}={size} is not a bucket size: it is a number of MiB above 0.")
    if (comm_buffer_size, last_comm_buffer_size) == (25, 1):
        return {}  # DDP's own defaults; any bucket_cap_mb given, 25 included, would end the small bucket
    if "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel).parameters:
        warn(f"torch {torch.__version__} has no setting for last_comm_buffer_size; its own choice holds.", stacklevel=4)
        return {"bucket_cap_mb": comm_buffer_size}
    return {"bucket_cap_mb_list": [last_comm_buffer_size, comm_buffer_size]}


@dataclasses.dataclass(frozen=True)
class _Layout:
    """What a reducer was built for; it has to be built anew when this changes."""

    world_size: int
    identities: tuple[int, ...]
    kinds: tuple[tuple[bool, torch.dtype, torch.device], ...]

    @classmethod
    def of(cls, model: DataParallel) -> _Layout:
        parameters = tuple(model.parameters())
        kinds = tuple((p.requires_grad, p.dtype, p.device) for p in parameters)
        return cls(_world_size(model.group), tuple(map(id, parameters)), kinds)


def _replaced_message(known: Mapping[str, nn.Parameter], present: Mapping[str, nn.Parameter]) -> str:
    names = sorted(name for name in known.keys() | present.keys() if known.get(name) is not present.get(name))
    shown = ", ".join(name.removeprefix("module.") for name in names[:5]) + (", ..." if len(names) > 5 else "")
    return (
        f"Parameters were replaced, added or removed after DataParallel was built ({shown}): their gradients would not "
        "be averaged. Change the module first, then wrap it, DataParallel(model.module), and build the optimizer anew."
    )


def _insert_module_prefix(model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the entries of a nested wrapper to where torch looks for them, below ``module.``."""
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)


def _broadcast_state(module: nn.Module, group: ProcessGroup | None) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
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


# --- sparse embeddings -----------------------------------------------------------------------------------------------


def _sparse_modules(module: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Return the layers whose weight gets a sparse gradient."""
    return [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]


def _sparse_tables(module: nn.Module) -> list[nn.Parameter]:
    """Return the trainable weights of sparse layers, each once, in the order of the module."""
    weights = {id(layer.weight): layer.weight for layer in _sparse_modules(module)}
    return [p for p in weights.values() if isinstance(p, nn.Parameter) and p.requires_grad]


_NO_GRAD, _SPARSE, _DENSE = range(3)


class _SparseTables:
    """The sparse tables of one module; averages their gradients over the ranks at the end of each backward.

    Args:
        module: The module that holds the tables.
        tables: Parameters to reduce, equal on all ranks.
        anchor: A parameter of DDP's, or None. A rank whose step touches tables only would never wake DDP's reducer, and
            the others would wait for it: so each use of a table leads backward to the anchor too, without a gradient.
        group: The process group.
    """

    def __init__(
        self, module: nn.Module, tables: list[nn.Parameter], anchor: nn.Parameter | None, group: ProcessGroup | None
    ) -> None:
        self._module = module
        self._tables = tables
        self._anchor = anchor
        self._group = group
        self._queued = False

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Tie the outputs of all sparse layers to the anchor; for one forward, so that no copy carries the hooks."""
        anchor = self._anchor
        if anchor is None:
            yield
            return

        def tie(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            return _tie(output, anchor) if output.requires_grad else output

        handles = [layer.register_forward_hook(tie) for layer in _sparse_modules(self._module)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def reduce_after_backward(self, output: Any) -> None:
        """Have every backward from ``output`` end with the reduction.

        Raises:
            HarnessError: If there is no tensor in the output.
        """
        tensors = list(_tensors_in(output))
        if not tensors:
            raise HarnessError(
                f"The module has sparse embeddings and returns {type(output).__name__}, in which no tensor was found: "
                "the end of backward would go unnoticed. Return a tensor, or a list, tuple, dict or dataclass of them."
            )
        self._queued = False  # a backward that raised has left it set
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(self._queue)

    def _queue(self, _grad: Tensor) -> None:
        # torch has no public call for this; DDP and FSDP end their backward in the same way.
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        self._queued = False
        found = torch.tensor([self._describe(table) for table in self._tables], device=self._tables[0].device)
        by_table = torch.stack(_all_gather(found, self._group), dim=1).tolist()
        for table, per_rank in zip(self._tables, by_table, strict=True):
            kind = max(kind for kind, _ in per_rank)
            if kind == _DENSE:
                table.grad = _dense_mean(table, self._group)
            elif kind == _SPARSE:
                table.grad = _sparse_mean(table, [rows for _, rows in per_rank], self._group)

    @staticmethod
    def _describe(table: nn.Parameter) -> tuple[int, int]:
        """Return the kind of gradient and the number of its rows; coalesces it, so that each row travels once."""
        if table.grad is None:
            return _NO_GRAD, 0
        if not table.grad.is_sparse:
            return _DENSE, 0
        table.grad = table.grad.coalesce()
        return _SPARSE, table.grad.values().shape[0]


class _Anchored(Function):
    """The identity on its first argument, in place; the second gets an undefined gradient: its ``grad`` stays."""

    @staticmethod
    def forward(ctx: FunctionCtx, output: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(output)  # a view would forbid the caller to change it in place
        return output

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


_tie: Any = _Anchored.apply


def _tensors_in(output: Any) -> Iterator[Any]:
    """Yield the tensors in nested lists, tuples, mappings and dataclasses."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors_in(list(output.values()))
    elif isinstance(output, list | tuple):
        for item in output:
            yield from _tensors_in(item)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        yield from _tensors_in([getattr(output, field.name) for field in dataclasses.fields(output)])


def _all_gather(tensor: Tensor, group: ProcessGroup | None) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def _dense_mean(table: nn.Parameter, group: ProcessGroup | None) -> Tensor:
    """Average the gradient of a table that a dense layer shares: dense on some rank, sparse or missing on another."""
    local = table.grad
    total = torch.zeros_like(table) if local is None else local.to_dense().contiguous()
    dist.all_reduce(total, group=group)
    return total.div_(_world_size(group))


def _sparse_mean(table: nn.Parameter, rows_of_rank: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """Average the rows over all ranks, summed in rank order, so with equal bits on all.

    Args:
        table: Shape (entries, width); its ``grad`` is coalesced or None.
        rows_of_rank: Number of rows in each rank's gradient.
        group: The process group.

    Returns:
        A coalesced gradient with each row that some rank has.
    """
    longest = max(rows_of_rank)
    indices = torch.zeros(longest, dtype=torch.int64, device=table.device)
    values = table.new_zeros(longest, *table.shape[1:])
    if table.grad is not None:
        rows = table.grad.values().shape[0]
        indices[:rows] = table.grad.indices()[0]
        values[:rows] = table.grad.values()
    all_indices = torch.cat([x[:rows] for x, rows in zip(_all_gather(indices, group), rows_of_rank, strict=True)])
    all_values = torch.cat([x[:rows] for x, rows in zip(_all_gather(values, group), rows_of_rank, strict=True)])
    total = torch.sparse_coo_tensor(all_indices[None], all_values, table.shape, check_invariants=False).coalesce()
    return total.div_(len(rows_of_rank))


# --- SyncBatchNorm ---------------------------------------------------------------------------------------------------


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over the batches of all ranks, equal to BatchNorm over the one batch that they form together.

    Works with every backend and device (torch's refuses CPU tensors), with batches of different sizes and with none on
    some rank. Parameters, buffers and their names are BatchNorm's. Weight and bias gradients are this rank's own, for
    DDP to average. In evaluation, at world size 1 and without a process group it is BatchNorm, without communication.

    Input and output: shape (N, C, ...), any N >= 0. Every rank of the group has to call forward, and backward, alike.

    Args:
        num_features: C, the number of channels.
        eps: Added to the variance.
        momentum: Weight of the new batch in the running statistics; None averages over all batches.
        affine: Whether to scale and shift by trained weights.
        track_running_stats: Whether to keep running statistics for evaluation.
        group: The process group; None is the default one.
        device: Where parameters and buffers lie.
        dtype: Their type.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.group = group

    def forward(self, input: Tensor) -> Tensor:
        """Normalise over the batches of all ranks.

        Raises:
            ValueError: On all ranks, if together they hold one value per channel.
        """
        if not self.training or _world_size(self.group) == 1:
            return super().forward(input)
        self._check_input_dim(input)
        batch = _global_statistics(input, self.group)
        if batch.is_single(input):
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {input.size()} on this rank, "
                "and 1 value over all ranks"
            )
        if self.track_running_stats:
            self._track(batch, input)
        output: Tensor = _normalize(input, self.weight, self.bias, batch, self.eps, self.group)
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected an input of shape (N, {self.num_features}, ...), got {tuple(input.shape)}")

    @torch.no_grad()
    def _track(self, batch: _BatchStatistics, input: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        if batch.is_empty(input):
            return
        unbiased = batch.var * (batch.count / (batch.count - 1))
        self.running_mean.mul_(1 - weight).add_(batch.mean.to(self.running_mean.dtype), alpha=weight)
        self.running_var.mul_(1 - weight).add_(unbiased.to(self.running_var.dtype), alpha=weight)


def convert_sync_batchnorm(module: nn.Module, group: ProcessGroup | None = None) -> nn.Module:
    """Turn every BatchNorm in ``module``, or ``module`` itself, into a `SyncBatchNorm` over ``group``.

    The layers change their class in place: parameters, buffers, flags, hooks, names and sharing stay as they are.

    Returns:
        ``module``.

    Raises:
        ConfigError: If a lazy BatchNorm has not seen an input yet.
    """
    for layer in module.modules():
        if isinstance(layer, LazyModuleMixin) and isinstance(layer, _BatchNorm):
            raise ConfigError(f"{type(layer).__name__} does not know its size yet. Run the model once before.")
        if isinstance(layer, _BatchNorm):
            layer.__class__ = SyncBatchNorm
            layer.__dict__["group"] = group or layer.__dict__.get("process_group")  # torch's SyncBatchNorm brings one
    return module


@dataclasses.dataclass(frozen=True)
class _BatchStatistics:
    """Mean and biased variance, shape (C,), and the number of values per channel, shape (), over all ranks' batches."""

    mean: Tensor
    var: Tensor
    count: Tensor

    # A rank with two values of its own knows the answer without waiting for the device; if one rank has to look, all
    # ranks that matter do.
    def is_single(self, local: Tensor) -> bool:
        return _values_per_channel(local) <= 1 and self.count.item() == 1

    def is_empty(self, local: Tensor) -> bool:
        return _values_per_channel(local) == 0 and self.count.item() == 0


def _values_per_channel(input: Tensor) -> int:
    return input.numel() // input.shape[1]


def _reduced_dims(input: Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


def _per_channel(values: Tensor, input: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (input.dim() - 2))


@torch.no_grad()
def _global_statistics(input: Tensor, group: ProcessGroup | None) -> _BatchStatistics:
    """Combine the ranks' (count, mean, centred square sum) into those of the whole batch, in rank order.

    Stable where the sum of squares is not: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979, for any number of parts. Each rank combines the same numbers: equal bits.
    """
    mean, square_sum = _local_statistics(input)
    count = mean.new_full((1,), _values_per_channel(input))
    parts = torch.stack(_all_gather(torch.cat([count, mean, square_sum]), group))
    counts, means, square_sums = parts[:, :1], parts[:, 1 : 1 + len(mean)], parts[:, 1 + len(mean) :]
    total = counts.sum().clamp(min=1)
    mean = (counts * means).sum(0) / total
    var = (square_sums + counts * (means - mean).square()).sum(0) / total
    return _BatchStatistics(mean, var, counts.sum())


def _local_statistics(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's mean and centred square sum, shape (C,) each, zeros for an empty batch."""
    # Counts above 2^24 and means far from 0 want float64, for 2 C + 1 numbers.
    wide = torch.float64 if input.device.type in ("cpu", "cuda") else torch.float32
    if input.numel() == 0:
        zeros = torch.zeros(input.shape[1], dtype=wide, device=input.device)
        return zeros, zeros
    dims = _reduced_dims(input)
    values = input.to(_statistics_dtype(input))
    mean = values.mean(dims)
    centred = values - _per_channel(mean, input)
    # What is left of the sum is the rounding error of the mean: large where the mean is far from 0.
    error = centred.sum(dims).to(wide) / _values_per_channel(input)
    square_sum = centred.square_().sum(dims).to(wide) - error.square() * _values_per_channel(input)
    return mean.to(wide) + error, square_sum


def _statistics_dtype(input: Tensor) -> torch.dtype:
    return torch.float32 if input.dtype in (torch.float16, torch.bfloat16) else input.dtype


class _Normalize(Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, where mean and variance depend on every rank's x.

    With xhat = (x - mean) / sqrt(var + eps), dy the gradient of the output and E the mean over all ranks' values
    (Ioffe and Szegedy, "Batch normalization", 2015, section 3)::

        dx = weight / sqrt(var + eps) * (dy - E[dy] - xhat * E[dy * xhat])

    Keeps the input and numbers per channel only; xhat is computed again in backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        batch: _BatchStatistics,
        eps: float,
        group: ProcessGroup | None,
    ) -> Tensor:
        dtype = _statistics_dtype(input)
        mean, var = batch.mean.to(dtype), batch.var.to(dtype)
        ctx.save_for_backward(input, weight, mean, (batch.var + eps).rsqrt().to(dtype), batch.count.to(dtype))
        ctx.group = group
        return F.batch_norm(input, mean, var, _cast(weight, dtype), _cast(bias, dtype), training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse_std, count = ctx.saved_tensors
        grad = grads[0].to(mean.dtype)
        normalized = (input - _per_channel(mean, input)).mul_(_per_channel(inverse_std, input))
        dims = _reduced_dims(input)
        grad_bias, grad_weight = grad.sum(dims), (grad * normalized).sum(dims)
        grad_input = None
        if ctx.needs_input_grad[0]:
            means = torch.stack([grad_bias, grad_weight])
            dist.all_reduce(means, group=ctx.group)
            mean_grad, mean_grad_normalized = means / count.clamp(min=1)
            scale = inverse_std if weight is None else inverse_std * weight
            grad_input = normalized.mul_(_per_channel(-mean_grad_normalized, input)).add_(grad)
            grad_input.sub_(_per_channel(mean_grad, input)).mul_(_per_channel(scale, input))
            grad_input = grad_input.to(input.dtype)
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        return grad_input, grad_weight if needs_weight else None, grad_bias if needs_bias else None, None, None, None


_normalize: Any = _Normalize.apply


def _cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)
