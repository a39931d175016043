"""The ranks' shards, replayed one after another by one process (R3, R11)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import _BatchNorm

from harness.training.batch import copied
from harness.training.digest import digests, value_digest
from harness.training.parallel.batchnorm import synchronised
from harness.training.parallel.batchnorm_messages import Replaying, exchanging
from harness.training.recipe import make_recipe
from harness.training.state import TrainingState, random_states, set_random_states
from harness.verify.activations import activations
from harness.verify.one_process import unanswered
from harness.verify.reference.batchnorm import BatchNorms
from harness.verify.reference.data import Replayed, Shard, Unrepeatable, gradients_of
from harness.verify.reference.process import SingleProcess
from harness.verify.reference.samples import Samples
from harness.verify.rounding import Gradients

ASKS_OTHERS = "loss() or the model asks the other ranks by torch.distributed, which one process cannot answer"
HOLDS_A_GROUP = "the recipe or its model holds a process group, of which one process is not a part as the ranks are"


class Replay:
    """Takes forward and backward of a rank's shard: its recipe hears meanwhile what a rank hears.

    Args:
        process: Whose model computes.
        samples: Where batches come from.
        batch_norms: Of a rank's model.
        world_size: Number of ranks.
    """

    def __init__(self, process: SingleProcess, samples: Samples, batch_norms: BatchNorms, world_size: int) -> None:
        self._process = process
        self._samples = samples
        self._batch_norms = batch_norms
        self._world_size = world_size
        # Kept beside the exception, because a recipe may catch it and go on.
        self._was_refused = False
        self._recipe, self._why_no_rank = process.recipe, ""
        try:
            # Made again, because it may ask for the number of ranks as it is made.
            with self._as_rank():
                self._recipe = make_recipe(process.plan.recipe)
        except Unrepeatable as error:
            self._why_no_rank = str(error)
        # dataset() and model() were called on the other recipe, and a loss may need what they found out.
        vars(self._recipe).update(process.learnt)

    @property
    def why_not(self) -> str:
        """Why one process cannot do what a rank does; empty where it can."""
        # The groups of BatchNorm layers are looked at by themselves.
        modules = (module for module in self._process.model.modules() if not isinstance(module, _BatchNorm))
        values = (value for holder in (self._recipe, *modules) for value in vars(holder).values())
        if self._world_size > 1 and any(isinstance(value, ProcessGroup | DeviceMesh) for value in values):
            return HOLDS_A_GROUP
        return self._why_no_rank or self._batch_norms.why_not_alone

    def shard(self, state: TrainingState, part: Shard) -> Replayed:
        """Return losses and gradients of one shard; buffers of ``state`` are rank 0's, from which each forward starts."""
        messages = Replaying(part.exchanged, self._world_size)
        with self._as_rank(), exchanging(messages), synchronised(self._process.model, self._batch_norms.synchronised):
            replayed = self._replay(state, part, messages)
        if self._was_refused:
            raise Unrepeatable(ASKS_OTHERS)  # and the recipe has passed over it
        return replayed

    def _replay(self, state: TrainingState, part: Shard, messages: Replaying) -> Replayed:
        model = self._process.model
        batches = self._begin(model, state, part)
        # Before forward: a loss may change its batch in place.
        batch, before = value_digest(batches), value_digest(random_states())
        with activations(model, self._process.plan) as outputs:
            losses, counts = self._backward(model, part, batches)
        return Replayed(
            losses,
            counts,
            gradients_of(model),
            digests(model.named_buffers()),
            batch,
            before != value_digest(random_states()),
            messages.record,
            outputs,
            {name: p.detach().clone() for name, p in model.named_parameters() if not torch.equal(p, state.model[name])},
        )

    def exact_shard(self, state: TrainingState, part: Shard) -> Gradients:
        """Return the gradients of one shard in float64, of a model that draws no random numbers."""
        model = self._process.wide_model
        batches = self._begin(model, state, part)
        self._backward(model, part, batches, torch.float64)
        return gradients_of(model)

    def _begin(self, model: nn.Module, state: TrainingState, part: Shard) -> list[Any]:
        """Put the model and all generators where the rank's were, and return its batches."""
        state.restore(model)
        model.train()
        model.zero_grad(set_to_none=True)
        # Last before loading, as the rank's were captured.
        set_random_states(part.random)
        # A loss may work in place.
        return [self._samples.load(piece) for piece in part.pieces] if part.loaded is None else copied([*part.loaded])

    def _backward(
        self, model: nn.Module, part: Shard, batches: Sequence[Any], dtype: torch.dtype | None = None
    ) -> tuple[list[float], list[float]]:
        """Leave the shard's gradients in the model; return losses and counts of its pieces."""
        losses, counts = [], []
        for piece, batch in zip(part.pieces, batches, strict=True):
            loss, items = self._process.loss(self._recipe, model, batch, dtype)
            (loss * self._weight(piece, items, part.global_size)).backward()
            losses.append(float(loss.detach()))
            counts.append(float(items) if items is not None else float(len(piece)))
        return losses, counts

    def _weight(self, piece: Sequence[int], items: Tensor | None, global_size: int) -> float:
        # Worked out here again, and not by the trainer's backward, which is under test.
        return 1.0 if items is not None else len(piece) * self._world_size / global_size

    @contextmanager
    def _as_rank(self) -> Iterator[None]:
        """Be one of the ranks, without the others.

        Raises:
            Unrepeatable: The recipe asks them.
        """

        def refuse(*_: Any, **__: Any) -> None:
            self._was_refused = True
            raise Unrepeatable(ASKS_OTHERS)

        with unanswered(self._world_size, refuse) if self._world_size > 1 else nullcontext():
            yield
