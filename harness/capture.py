"""What is captured of a run's steps while it takes them: without changing a bit of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from harness.digest import Digests, digests, gradient_digest, optimizer_digests, state_digests, value_digest
from harness.exchange import Exchanged, Recording, exchanging
from harness.state import TrainingState, random_states
from harness.trainer import Trainer

Gradients = dict[str, Tensor | None]


@dataclass
class Captured:
    """One step of one rank. Tensors and plain data only, so that it can cross to rank 0 as a file.

    Attributes:
        ids: Of the global batch, as this rank has it.
        pieces: Of this rank's part, as it loaded them.
        local: Gradients before the reduction, weighted.
        reduced: Gradients after it, before clipping and before the division by the number of items.
        skipped: True where all ranks left the step out, because a loss was not finite.
        exchanged: What synchronised layers told and heard, in order.
        lr_of: Learning rate of each trainable parameter that the optimizer knows.
    """

    ids: list[int]
    pieces: list[list[int]]
    random: Mapping[str, Any]
    lr: list[float]
    before: Digests
    loaded: list[Any]
    losses: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    local: Gradients = field(default_factory=dict)
    reduced: Gradients = field(default_factory=dict)
    after: Digests = field(default_factory=dict)
    buffers: Digests = field(default_factory=dict)
    reported: list[float] = field(default_factory=list)
    counts_items: bool = False
    skipped: bool = False
    exchanged: list[Exchanged] = field(default_factory=list)
    lr_of: dict[str, float] = field(default_factory=dict)

    @property
    def rng(self) -> str:
        """Digest of torch's generator before the step."""
        return value_digest(self.random["torch"])

    @property
    def batch(self) -> str:
        """Digest of the loaded samples."""
        return value_digest(self.loaded)

    def must_move(self, name: str, moved_in_replay: bool) -> bool:
        """Return True where a parameter moves if its gradient is not zero.

        One that the optimizer does not know should, if any other can. One that it knows may stand still where the replay's
        does: a step smaller than half a unit in the last place is lost.
        """
        if name not in self.lr_of:
            return any(lr > 0 for lr in self.lr_of.values())
        return self.lr_of[name] > 0 and moved_in_replay

    def reduced_digests(self) -> Digests:
        """Return the digests of the reduced gradients."""
        return {name: gradient_digest(gradient) for name, gradient in self.reduced.items()}


class Capture:
    """Takes steps of a trainer and keeps what they came through."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._steps = trainer.steps()
        self._named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
        self._local: Gradients = {}
        self._losses: list[float] = []
        self._counts: list[float] = []
        self._reduced: Gradients = {}
        # After all hooks on the tensor, a recipe's own included, and before DDP's, which reduces what lies in .grad.
        self._hooks = [p.register_post_accumulate_grad_hook(self._keep_local(name)) for name, p in self._named]
        self._watch_losses()
        self._watch_reduction()

    def take(self) -> tuple[Captured, TrainingState]:
        """Take the next step; return what was captured of it, and the state before it."""
        trainer = self._trainer
        state = TrainingState.of(trainer.model, trainer.optimizer)
        random = random_states()
        batch, loaded = next(self._steps)
        captured = Captured(
            ids=list(batch),
            pieces=[list(piece) for piece in trainer.pieces(batch)],
            random=random,
            lr=[float(group["lr"]) for group in trainer.optimizer.param_groups],
            before=self._state(),
            loaded=[piece for _, piece in loaded],
            lr_of=self._lr_of(),
        )
        self._local, self._losses, self._counts, self._reduced = {}, [], [], {}
        told = Recording(trainer.model)
        with exchanging(told):
            result = trainer.step(batch, loaded)
        captured.exchanged = told.record
        captured.losses, captured.counts = self._losses, self._counts
        captured.local = {name: self._local.get(name) for name, _ in self._named}
        captured.reduced = self._reduced
        captured.after = state_digests(trainer.model, trainer.optimizer)
        captured.buffers = digests(trainer.model.named_buffers())
        captured.reported = [result.loss_sum, result.count]
        captured.counts_items = bool(trainer.counts_items)
        captured.skipped = result.skipped
        return captured, state

    def close(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()

    def _state(self) -> Digests:
        trainer = self._trainer
        return {
            **digests(trainer.model.named_parameters()),
            **optimizer_digests(trainer.optimizer.state_dict()["state"]),
            **digests(trainer.model.named_buffers()),
        }

    def _lr_of(self) -> dict[str, float]:
        groups = self._trainer.optimizer.param_groups
        known = {id(parameter): float(group["lr"]) for group in groups for parameter in group["params"]}
        return {name: known[id(parameter)] for name, parameter in self._named if id(parameter) in known}

    def _keep_local(self, name: str) -> Callable[[Tensor], None]:
        def keep(parameter: Tensor) -> None:
            # With what earlier pieces left there, and whatever a step before did, if nobody has set it to zero.
            assert parameter.grad is not None
            self._local[name] = parameter.grad.detach().clone()

        return keep

    def _watch_losses(self) -> None:
        backward = self._trainer.backward

        def watched(loss: Tensor, items: Tensor | None, size: int, global_size: int) -> None:
            if size:
                self._losses.append(float(loss.detach()))
                self._counts.append(float(size if items is None else items))
            backward(loss, items, size, global_size)

        self._trainer.backward = watched  # type: ignore[method-assign]

    def _watch_reduction(self) -> None:
        reduced = self._trainer.reduced

        def watched(count: float) -> list[Tensor]:
            self._reduced = {name: None if p.grad is None else p.grad.detach().clone() for name, p in self._named}
            return reduced(count)

        self._trainer.reduced = watched  # type: ignore[method-assign]


def exchange_ratios(heard: Sequence[Sequence[Exchanged]], replayed: Sequence[Sequence[Exchanged]]) -> dict[str, float]:
    """Return, for each synchronised layer, the worst error of what a rank heard by its bound (rung R4).

    Statistics of the batches travel as they are, so the bits of each rank's must arrive at every rank: 0 or infinite. Gradients
    of the statistics are added up: N - 1 additions, each with a rounding, as in :func:`reduction_ratios`; at N = 2 the bits
    must agree.

    Args:
        heard: The record of each rank.
        replayed: The same of its replay, which told what it has computed.
    """
    worst: dict[str, float] = {}
    for exchanges in zip_longest(*heard, *replayed):
        layer = next(exchange.layer for exchange in exchanges if exchange is not None)
        worst[layer] = max(worst.get(layer, 0.0), _error_of_exchange(exchanges[: len(heard)], exchanges[len(heard) :]))
    return worst


def _error_of_exchange(ranks: Sequence[Exchanged | None], replays: Sequence[Exchanged | None]) -> float:
    told = [exchange.told for exchange in replays if exchange is not None]
    if len(told) < len(ranks) or None in ranks:
        # A rank has asked for more than its replay, or than the others.
        return float("inf")
    all_told = torch.stack(told)
    found = [exchange for exchange in ranks if exchange is not None]
    return max(_error_of_sum(each.heard, all_told) if each.is_sum else _differ(each.heard, all_told) for each in found)


def _differ(heard: Tensor, told: Tensor) -> float:
    same = heard.shape == told.shape and bool((heard.view(torch.uint8) == told.view(torch.uint8)).all())
    return 0.0 if same else float("inf")


def _error_of_sum(heard: Tensor, told: Tensor) -> float:
    exact = told.double().sum(0)
    if len(told) <= 2:
        return 0.0 if bool((heard == exact.to(heard.dtype)).all()) else float("inf")
    own_error = 2 if heard.dtype == torch.float64 else 1
    bound = own_error * _gamma_of(len(told) - 1, heard.dtype) * told.double().abs().sum(0)
    narrow = torch.finfo(heard.dtype)
    ratio = (heard.double() - exact).abs() / (bound + narrow.smallest_normal * narrow.eps)
    return float("inf") if bool(ratio.isnan().any()) else float(ratio.max())


def reduction_ratios(local: Sequence[Gradients], reduced: Gradients, wire: torch.dtype | None = None) -> dict[str, float]:
    """Return, for each tensor, the worst error of a reduced gradient by its bound (rung R4).

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
    if reduced is None or not present:
        return 0.0 if reduced is None and not present else float("inf")
    rows = _rows([*present, reduced])
    wide = [_select(part, rows).double() for part in present]
    mean = torch.stack(wide).sum(0) / len(local)
    result = _select(reduced, rows)
    if len(local) <= 2 and wire is None:
        # No sample: 0 and -0 are the same gradient.
        return 0.0 if bool((result == mean.to(result.dtype)).all()) else float("inf")
    own_error = 2 if result.dtype == torch.float64 else 1
    gamma = _gamma(len(local), result.dtype) if wire is None else _gamma_of(len(local) + 1, wire)
    bound = own_error * gamma * sum(part.abs() for part in wide) / len(local)
    narrow = torch.finfo(wire or result.dtype)
    smallest = narrow.smallest_normal * narrow.eps * (1 if wire is None else 2)
    ratio = (result.double() - mean).abs() / (bound + smallest)
    return float(ratio.max()) if not bool(ratio.isnan().any()) else float("nan")


def _gamma(ranks: int, dtype: torch.dtype) -> float:
    return _gamma_of(ranks - 1 if ranks & (ranks - 1) == 0 else ranks + 1, dtype)


def _gamma_of(k: int, dtype: torch.dtype) -> float:
    u = torch.finfo(dtype).eps / 2
    return k * u / (1 - k * u)


def _rows(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the rows that any sparse tensor holds; None where all are dense."""
    indices = [t.coalesce().indices()[0] for t in tensors if t.is_sparse]
    if not indices or any(not t.is_sparse for t in tensors):
        return None
    return torch.unique(torch.cat(indices))


def _select(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Return a dense tensor, of these rows only where they are given."""
    if rows is None:
        return tensor.to_dense() if tensor.is_sparse else tensor
    tensor = tensor.coalesce()
    chosen = tensor.values().new_zeros((len(rows), *tensor.shape[1:]))
    chosen[torch.searchsorted(rows, tensor.indices()[0])] = tensor.values()
    return chosen
