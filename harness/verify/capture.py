"""What is captured of a run's steps while it takes them: without changing a bit of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from harness.training.batch import copied
from harness.training.digest import Digests, digests, gradient_digest, optimizer_digests, state_digests, value_digest
from harness.training.parallel.batchnorm_messages import Exchanged, Recording, exchanging
from harness.training.state import TrainingState, random_states
from harness.training.trainer import Trainer
from harness.verify.activations import activations
from harness.verify.rounding import Gradients


@dataclass
class Captured:
    """One step of one rank. Tensors and plain data only, so that it can cross to rank 0 as a file.

    Attributes:
        ids: Of the global batch, as this rank has it.
        pieces: Of this rank's part, as it loaded them.
        local: Gradients before the reduction, weighted.
        batch: Digest of the loaded samples.
        activations: Module -> digest of what it returned, in that order; of a full verification.
        reduced: Gradients after it, before clipping and before the division by the number of items.
        skipped: True where all ranks left the step out, because a loss was not finite.
        exchanged: What synchronised layers told and heard, in order.
        num_items: Of the global batch, where losses are sums over items, as the run has added them up.
        lr_of: Learning rate of each trainable parameter that the optimizer knows.
    """

    ids: list[int]
    pieces: list[list[int]]
    random: Mapping[str, Any]
    lr: list[float]
    before: Digests
    loaded: list[Any]
    batch: str
    activations: Digests = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    local: Gradients = field(default_factory=dict)
    reduced: Gradients = field(default_factory=dict)
    after: Digests = field(default_factory=dict)
    buffers: Digests = field(default_factory=dict)
    reported: list[float] = field(default_factory=list)
    counts_items: bool = False
    num_items: float | None = None
    skipped: bool = False
    exchanged: list[Exchanged] = field(default_factory=list)
    lr_of: dict[str, float] = field(default_factory=dict)

    @property
    def rng(self) -> str:
        """Digest of torch's generator before the step."""
        return value_digest(self.random["torch"])

    @property
    def device_rng(self) -> str:
        """The same of the CUDA device's own, from which dropout draws there; empty without one."""
        return value_digest(self.random["cuda"]) if "cuda" in self.random else ""

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
        # Before the samples are loaded: the replay loads them again from the same generators.
        random = random_states()
        batch, loaded = next(self._steps)
        # A loss may work in place.
        samples = copied([piece for _, piece in loaded])
        captured = Captured(
            ids=list(batch),
            pieces=[list(piece) for piece in trainer.batches.pieces(batch)],
            random=random,
            lr=[float(group["lr"]) for group in trainer.optimizer.param_groups],
            before=self._state(),
            loaded=samples,
            batch=value_digest(samples),
            lr_of=self._lr_of(),
        )
        self._local, self._losses, self._counts, self._reduced = {}, [], [], {}
        messages = Recording(trainer.model)
        with exchanging(messages), activations(trainer.model, trainer.plan) as captured.activations:
            result = trainer.step(batch, loaded)
        captured.exchanged = messages.record
        captured.losses, captured.counts = self._losses, self._counts
        # Of all trained parameters: one without a gradient is told by None, not by its absence.
        captured.local = {name: self._local.get(name) for name, _ in self._named}
        captured.reduced = self._reduced
        captured.after = state_digests(trainer.model, trainer.optimizer)
        captured.buffers = digests(trainer.model.named_buffers())
        captured.reported = [result.loss_sum, result.count]
        captured.counts_items = bool(trainer.counts_items)
        captured.num_items = trainer.num_items
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
        # By identity: an optimizer does not know its parameters' names.
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
            # A rank without samples takes part with a loss of zero, which is none of the recipe's.
            if size:
                self._losses.append(float(loss.detach()))
                self._counts.append(float(size if items is None else items))
            backward(loss, items, size, global_size)

        # On this trainer alone: another, of the same class, is not watched.
        self._trainer.backward = watched  # type: ignore[method-assign]

    def _watch_reduction(self) -> None:
        reduced = self._trainer.reduced

        def watched(count: float) -> list[Tensor]:
            # Here they have been reduced, and nothing has scaled or clipped them yet.
            gradients = self._trainer.strategy.full_gradients()
            self._reduced = {name: None if g is None else g.detach().clone() for name, g in gradients.items()}
            return reduced(count)

        self._trainer.reduced = watched  # type: ignore[method-assign]
