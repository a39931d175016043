"""BatchNorm over the batches of all ranks, for every backend, gloo on the CPU included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from harness.errors import ConfigError
from harness.training.parallel.batchnorm_messages import current


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
        if not self.training or current().num_ranks(self) == 1:
            return super().forward(input)
        self._check_input_dim(input)
        batch = _global_statistics(input, self)
        if batch.is_single(input):
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {input.size()} on this rank, "
                "and 1 value over all ranks"
            )
        if self.track_running_stats:
            self._track(batch, input)
        output: Tensor = _normalize(input, self.weight, self.bias, batch, self)
        return output

    # Of torch's own by name: what its forward asks too, in evaluation and on one rank.
    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected an input of shape (N, {self.num_features}, ...), got {tuple(input.shape)}")

    @torch.no_grad()
    def _track(self, batch: _BatchStatistics, input: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        # The statistics of nothing are zeros, and would pull the running ones there.
        if batch.is_empty(input):
            return
        # As BatchNorm does: it normalises by the biased variance, and keeps the unbiased one.
        unbiased = batch.var * (batch.count / (batch.count - 1))
        self.running_mean.mul_(1 - weight).add_(batch.mean.to(self.running_mean.dtype), alpha=weight)
        self.running_var.mul_(1 - weight).add_(unbiased.to(self.running_var.dtype), alpha=weight)


@contextmanager
def synchronised(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Have the BatchNorm layers of these names be `SyncBatchNorm` meanwhile."""
    kinds = {layer: type(layer) for layer in map(module.get_submodule, names)}
    for layer in kinds:
        convert_sync_batchnorm(layer)
    try:
        yield
    finally:
        for layer, kind in kinds.items():
            layer.__class__ = kind


def has_local_statistics(module: nn.Module) -> bool:
    """Return whether a BatchNorm in ``module`` normalises the batch of its own rank alone."""
    return any(isinstance(m, _BatchNorm) and not isinstance(m, SyncBatchNorm | nn.SyncBatchNorm) for m in module.modules())


@contextmanager
def with_fixed_statistics(module: nn.Module) -> Iterator[None]:
    """Have every BatchNorm in ``module`` take its running statistics meanwhile, mean 0 and variance 1 where it keeps none.

    A sample's output then depends on no other sample, even if ``module.train()`` is called meanwhile, or a layer has a forward
    of its own that asks `torch.nn.functional.batch_norm` for the batch's statistics.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    # Not all need be: a part of a model may be held in evaluation.
    trained = [layer for layer in layers if layer.training]
    batch_norm = F.batch_norm
    for layer in layers:
        layer.training = False
        layer.train = partial(_unchanged, layer)  # type: ignore[method-assign]
    # torch's layers, and users' own, look the function up in its module at each call.
    F.batch_norm = _with_running_statistics(batch_norm)
    try:
        yield
    finally:
        F.batch_norm = batch_norm
        for layer in layers:
            del layer.train
        for layer in trained:
            layer.training = True


def _unchanged(layer: _BatchNorm, mode: bool = True) -> _BatchNorm:
    """Stand in for a layer's ``train``: a `SyncBatchNorm` that is training does not ask for its running statistics."""
    return layer


def _with_running_statistics(batch_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a stand-in for `torch.nn.functional.batch_norm`, which never takes the batch's statistics."""

    def normalize(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        # Under autocast the input may be narrower than the layer.
        dtype = input.dtype if weight is None else weight.dtype
        mean = input.new_zeros(input.shape[1], dtype=dtype) if running_mean is None else running_mean
        var = input.new_ones(input.shape[1], dtype=dtype) if running_var is None else running_var
        return batch_norm(input, mean, var, weight, bias, False, momentum, eps)

    return normalize


def convert_sync_batchnorm(module: nn.Module, group: ProcessGroup | None = None) -> nn.Module:
    """Turn every BatchNorm in ``module``, or ``module`` itself, into a `SyncBatchNorm` over ``group``.

    Without ``group``, a layer that is synchronised already keeps its own.

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
            own = group_of(layer)
            # A new layer would lose hooks and sharing. Python allows it while torch's layers keep all in their __dict__.
            layer.__class__ = SyncBatchNorm
            layer.__dict__["group"] = group or own
    return module


def group_of(layer: nn.Module) -> ProcessGroup | None:
    """Return the group of a layer that is synchronised already, by us or by torch; None is the default one."""
    if isinstance(layer, nn.SyncBatchNorm):
        return layer.process_group
    return layer.group if isinstance(layer, SyncBatchNorm) else None


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
def _global_statistics(input: Tensor, layer: SyncBatchNorm) -> _BatchStatistics:
    """Combine the ranks' (count, mean, centred square sum) into those of the whole batch, in rank order.

    Stable where the sum of squares is not: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979, for any number of parts. Each rank combines the same numbers: equal bits.
    """
    mean, square_sum = _local_statistics(input)
    count = mean.new_full((1,), _values_per_channel(input))
    # In one message: of so few numbers it is the exchange itself that takes time.
    parts = current().gather(torch.cat([count, mean, square_sum]), layer)
    counts, means, square_sums = parts[:, :1], parts[:, 1 : 1 + len(mean)], parts[:, 1 + len(mean) :]
    # Zeros rather than 0 / 0 where no rank has a value.
    total = counts.sum().clamp(min=1)
    mean = (counts * means).sum(0) / total
    var = (square_sums + counts * (means - mean).square()).sum(0) / total
    # The true count: no value at all is to be told from one.
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
    # In half precision a sum of many numbers stops growing.
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
        layer: SyncBatchNorm,
    ) -> Tensor:
        dtype = _statistics_dtype(input)
        mean, var = batch.mean.to(dtype), batch.var.to(dtype)
        # From the wide variance, so that the inverse is rounded once.
        ctx.save_for_backward(input, weight, mean, (batch.var + layer.eps).rsqrt().to(dtype), batch.count.to(dtype))
        ctx.layer = layer
        # torch's kernel of evaluation: it normalises by whatever statistics it is given.
        return F.batch_norm(input, mean, var, _cast(weight, dtype), _cast(bias, dtype), training=False, eps=layer.eps)

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
            # All ranks of the group come here or none does: whether the input wants a gradient is a matter of the model.
            totals = current().total(torch.stack([grad_bias, grad_weight]), ctx.layer)
            mean_grad, mean_grad_normalized = totals / count.clamp(min=1)
            scale = inverse_std if weight is None else inverse_std * weight
            grad_input = normalized.mul_(_per_channel(-mean_grad_normalized, input)).add_(grad)
            grad_input.sub_(_per_channel(mean_grad, input)).mul_(_per_channel(scale, input))
            grad_input = grad_input.to(input.dtype)
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        return grad_input, grad_weight if needs_weight else None, grad_bias if needs_bias else None, None, None


_normalize: Any = _Normalize.apply


def _cast(parameter: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if parameter is None else parameter.to(dtype)
