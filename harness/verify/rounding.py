"""How far numbers may be off by rounding: the bounds of sums over ranks (R4), and errors by those of one process (R7, R8).

Pure arithmetic on tensors. A ratio is an error by its bound, so that at most 1 is right where nothing else is said.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from harness.training.parallel.batchnorm_messages import Exchanged

Gradients = dict[str, Tensor | None]
"""Name of a parameter -> its gradient; None without one."""

FLOOR = 1e-3
"""Errors of a tensor are relative to its own gradient's norm, or to this part of the whole gradient's, if that is larger.

A gradient that is zero in exact arithmetic, such as that of a bias before BatchNorm, is a sum of terms that cancel, and what is
left is their rounding: up to 3.3 u of the whole gradient's norm in correct runs (measured). In float64 this allows 90 u.
"""


def round_off(precision: str, gradients: Gradients) -> float:
    """Return the unit round-off u = 2^-p of a run's precision, whose parameters have p significant bits, or of bfloat16."""
    return torch.finfo(torch.bfloat16 if precision == "bfloat16" else dtype_of(gradients)).eps / 2


# --- sums over ranks (R4) --------------------------------------------------------------------------------------------


def exchange_ratios(heard: Sequence[Sequence[Exchanged]], replayed: Sequence[Sequence[Exchanged]]) -> dict[str, float]:
    """Return, for each synchronised layer, the worst error of what a rank heard by its bound (check R4).

    Statistics of the batches travel as they are, so the bits of each rank's must arrive at every rank: 0 or infinite. Gradients
    of the statistics are added up: N - 1 additions, each with a rounding, as in :func:`reduction_ratios`; at N = 2 the bits
    must agree.

    Args:
        heard: The record of each rank.
        replayed: The same of its replay, which told what it has computed.
    """
    worst: dict[str, float] = {}
    # The longest: an exchange that one side lacks is an error and not the end.
    for exchanges in zip_longest(*heard, *replayed):
        layer = next(exchange.layer for exchange in exchanges if exchange is not None)
        worst[layer] = max(worst.get(layer, 0.0), _error_of_exchange(exchanges[: len(heard)], exchanges[len(heard) :]))
    return worst


def _error_of_exchange(ranks: Sequence[Exchanged | None], replays: Sequence[Exchanged | None]) -> float:
    messages = [exchange.told for exchange in replays if exchange is not None]
    if len(messages) < len(ranks) or None in ranks:
        # A rank has asked for more than its replay, or than the others.
        return float("inf")
    told = torch.stack(messages)
    exchanges = [exchange for exchange in ranks if exchange is not None]
    return max(_error_of_sum(e.heard, told) if e.is_sum else _error_of_copy(e.heard, told) for e in exchanges)


def _error_of_copy(heard: Tensor, told: Tensor) -> float:
    # By bytes: NaN is not equal to itself, and yet arrives.
    is_copy = heard.shape == told.shape and bool((heard.view(torch.uint8) == told.view(torch.uint8)).all())
    return 0.0 if is_copy else float("inf")


def _error_of_sum(heard: Tensor, told: Tensor) -> float:
    exact = told.double().sum(0)
    if len(told) <= 2:
        return 0.0 if bool((heard == exact.to(heard.dtype)).all()) else float("inf")
    error = _by_bound(heard, exact, len(told) - 1, told.double().abs().sum(0), heard.dtype)
    # A comparison with NaN is False, and max() might pass over it.
    return math.inf if math.isnan(error) else error


def reduction_ratios(local: Sequence[Gradients], reduced: Gradients, wire: torch.dtype | None = None) -> dict[str, float]:
    """Return, for each tensor, the worst error of a reduced gradient by its bound (check R4).

    The reduced gradient of N ranks is the mean of the local ones within ``gamma_k mean |g_r|`` elementwise, with
    ``gamma_k = k u / (1 - k u)``, k = N - 1 additions where N is a power of two, and N + 1 otherwise, because 1/N is rounded
    then and multiplied by (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), plus the smallest subnormal.
    Where the run itself is in float64, the mean here has the same error once more, and the bound is twice that.
    Two numbers are added and halved with one rounding, so at N = 2 the bits must agree: the ratio is 0 or infinite.

    Args:
        wire: The type in which gradients travel by declaration, where that is another: then u is that of this type, k = N + 1,
            because they are rounded to it and divided in it, and each of the two may fall below its smallest number.
    """
    return {name: _worst(name, local, gradient, wire) for name, gradient in reduced.items()}


def _worst(name: str, local: Sequence[Gradients], reduced: Tensor | None, wire: torch.dtype | None) -> float:
    parts = [gradients[name] for gradients in local]
    present = [part for part in parts if part is not None]
    # No gradient anywhere is right; one that appears or vanishes in the reduction is not.
    if reduced is None or not present:
        return 0.0 if reduced is None and not present else float("inf")
    rows = _rows([*present, reduced])
    wide = [_select(part, rows).double() for part in present]
    # By all ranks: one without a gradient counts as zeros.
    mean = torch.stack(wide).sum(0) / len(local)
    result = _select(reduced, rows)
    if len(local) <= 2 and wire is None:
        # No sample: 0 and -0 are the same gradient.
        return 0.0 if bool((result == mean.to(result.dtype)).all()) else float("inf")
    magnitude = torch.stack(wide).abs().sum(0) / len(local)
    if wire is not None:
        return _by_bound(result, mean, len(local) + 1, magnitude, wire, roundings=2)
    return _by_bound(result, mean, _additions(len(local)), magnitude, result.dtype)


def _additions(ranks: int) -> int:
    """Return k of the mean of so many numbers: a multiplication by 1/N, and its own rounding, where that is no power of 2."""
    return ranks - 1 if ranks & (ranks - 1) == 0 else ranks + 1


def _by_bound(result: Tensor, exact: Tensor, k: int, magnitude: Tensor, dtype: torch.dtype, roundings: int = 1) -> float:
    """Return the worst error by ``gamma_k`` times the magnitude, plus the smallest subnormal; NaN where it is no number.

    Args:
        exact: In float64, which has the same error once more where the result is in float64 itself.
        roundings: How many results may each fall below the smallest number of ``dtype``.
    """
    narrow = torch.finfo(dtype)
    # torch's eps is the distance of 1 to the next number; rounding is off by half of it at most.
    u = narrow.eps / 2
    gamma = (2 if result.dtype == torch.float64 else 1) * k * u / (1 - k * u)
    ratio = (result.double() - exact).abs() / (gamma * magnitude + roundings * narrow.smallest_normal * narrow.eps)
    # A tensor may have no element.
    return float(ratio.max()) if ratio.numel() else 0.0


def _rows(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the rows that any sparse tensor holds; None where all are dense."""
    indices = [t.coalesce().indices()[0] for t in tensors if t.is_sparse]
    # A dense one has a value in every row: then all are compared as dense.
    if not indices or any(not t.is_sparse for t in tensors):
        return None
    return torch.unique(torch.cat(indices))


def _select(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Return a dense tensor, of these rows only where they are given."""
    if rows is None:
        return tensor.to_dense() if tensor.is_sparse else tensor
    tensor = tensor.coalesce()
    chosen = tensor.values().new_zeros((len(rows), *tensor.shape[1:]))
    # unique() has sorted them, and every row of the tensor is among them.
    chosen[torch.searchsorted(rows, tensor.indices()[0])] = tensor.values()
    return chosen


# --- against the whole batch (R3, R7, R8) ----------------------------------------------------------------------------


def by_floor(gradient: Tensor | None, exact: Tensor | None, all_exact: Gradients, tolerance: float) -> float:
    """Return the norm of an error by ``tolerance`` times the norm of the exact gradient, or of FLOOR of the whole one (R7)."""
    whole = math.sqrt(sum(_norm(value) ** 2 for value in all_exact.values()))
    return _difference(gradient, exact) / max(tolerance * max(_norm(exact), FLOOR * whole), 1e-300)


def excess_ratios(of_ranks: Gradients, single: Gradients, exact: Gradients, u: float) -> dict[str, float]:
    """Return the excess ratio X of each tensor: the ranks' error by that of an honest single process.

    The single process's error is one draw, which in a tensor of few numbers may be small by luck, and then X would accuse
    anybody. So no error counts as smaller than 4 times what is typical: the median over all tensors, relative to their
    gradients, and at least u. With that, X was 1.8 at most in 384 correct comparisons; without, 4.7 (measured). Nor does one
    count as smaller than u of the whole gradient, which is what terms that cancel leave (see FLOOR): under synchronised
    BatchNorm the single process, by another kernel, may leave nothing at all.
    """
    whole = math.sqrt(sum(_norm(gradient) ** 2 for gradient in exact.values()))
    scales = {name: max(_norm(gradient), FLOOR * whole, 1e-300) for name, gradient in exact.items()}
    honest = {name: _difference(single.get(name), gradient) for name, gradient in exact.items()}
    typical = max(u, statistics.median(honest[name] / scales[name] for name in exact))
    floors = {name: max(honest[name], 4 * typical * scales[name], u * whole) for name in exact}
    return {name: _difference(of_ranks.get(name), gradient) / floors[name] for name, gradient in exact.items()}


def dtype_of(gradients: Gradients) -> torch.dtype:
    """Return the type of the first gradient that there is."""
    return next((g.dtype for g in gradients.values() if g is not None), torch.float32)


def _norm(tensor: Tensor | None) -> float:
    if tensor is None:
        return 0.0
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return float(torch.linalg.vector_norm(values.double()))


def _difference(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        # One of them is nothing, and the other all of the difference.
        return _norm(a) + _norm(b)
    a, b = (t.to_dense() if t.is_sparse else t for t in (a, b))
    return _norm(a.double() - b.double())
