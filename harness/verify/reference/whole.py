"""The whole global batch at once in one process, with nothing dropped or drawn (R7, R8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from harness.training.digest import value_digest
from harness.training.parallel.batchnorm import with_fixed_statistics
from harness.training.parallel.batchnorm_messages import OneProcess, exchanging
from harness.training.state import TrainingState, named_tensors, random_states
from harness.verify.constant_draws import ConstantDraws, UnknownDraw
from harness.verify.narrowing import Narrowing
from harness.verify.reference.batchnorm import BatchNorms
from harness.verify.reference.data import Unrepeatable, gradients_of
from harness.verify.reference.process import SingleProcess
from harness.verify.reference.samples import Samples
from harness.verify.rounding import Gradients


@dataclass(frozen=True)
class GlobalBatch:
    """A global batch, and the state that a step starts from.

    Attributes:
        state: Before the step.
        shards: Sample numbers of each rank, in rank order, a list for each piece.
        samples: Number -> sample as rank 0 has read it; None where each reading comes to the same.
    """

    state: TrainingState
    shards: Sequence[Sequence[Sequence[int]]]
    samples: Mapping[int, Any] | None

    def together(self) -> list[list[int]]:
        """Return the samples of all ranks, a list for each piece."""
        return [[number for piece in pieces for number in piece] for pieces in zip_longest(*self.shards, fillvalue=())]

    def at_once(self) -> list[int]:
        """Return all samples, rank by rank."""
        return [number for pieces in self.shards for piece in pieces for number in piece]


@dataclass(frozen=True)
class WholeGradient:
    """What a global batch comes to in one process.

    Attributes:
        loss: The mean.
        gradients: Of that mean.
        narrowed: The coarsest type that the recipe computes in of its own accord; None where it narrows nothing.
    """

    loss: float
    gradients: Gradients
    narrowed: torch.dtype | None


class WholeReference:
    """Takes the whole batch through the model of one process.

    The batch goes through at once. BatchNorm of each rank's own batch takes its running statistics meanwhile, as the ranks do
    in this comparison: how they treat their own batches, the replay shows. Synchronised, it goes through piece by piece, of all
    ranks together. So it does where each forward leaves buffers for the next one, as ``spectral_norm`` does.

    Args:
        process: Whose model computes.
        samples: Where batches come from.
        batch_norms: Of a rank's model.
    """

    def __init__(self, process: SingleProcess, samples: Samples, batch_norms: BatchNorms) -> None:
        self._process = process
        self._samples = samples
        self._batch_norms = batch_norms

    @property
    def why_not(self) -> str:
        """Why the whole batch in this one process is not what the ranks do together; empty where it is."""
        return self._batch_norms.why_not_whole(self._process.model)

    def gradient(self, batch: GlobalBatch, dtype: torch.dtype | None) -> WholeGradient:
        """Return loss and gradient of the global batch, in float64, or for None in the run's own precision.

        Raises:
            Unrepeatable: Forward draws other random numbers than torch's, cannot run in float64, or leaves for the next piece
                what depends on the samples.
        """
        # The whole batch is one batch: synchronised layers have nobody else to ask.
        with self._process.alone(), ConstantDraws(), exchanging(OneProcess()):
            try:
                return self._gradient(batch, dtype)
            except Unrepeatable:
                raise
            except UnknownDraw as error:
                raise Unrepeatable(f"forward draws random numbers in a way that cannot be held constant ({error})") from error
            except Exception as error:
                # In the run's own precision it has worked for the ranks: then it is an error like any other.
                if dtype is None or self._process.plan.precision == "float64":
                    raise
                message = (str(error).splitlines() or [type(error).__name__])[0]
                raise Unrepeatable(f"the recipe cannot run in float64 ({message})") from error

    def _gradient(self, batch: GlobalBatch, dtype: torch.dtype | None) -> WholeGradient:
        # Around backward too, which calls forward again where activations are not kept.
        with self._in_training(dtype) as model:
            parts = self._parts(model, batch, dtype)
            model.zero_grad(set_to_none=True)
            loss, number, narrowed = self._forward(model, batch, parts, dtype)
            # Divided once, at the end: pieces of different sizes count by what they hold.
            mean = loss / number
            mean.backward()
        return WholeGradient(float(mean.detach()), gradients_of(model), narrowed)

    def losses_in_other_orders(self, batch: GlobalBatch, dtype: torch.dtype | None) -> list[float]:
        """Return the loss of the global batch with its samples in other orders: only rounding tells them apart."""
        losses = []
        with (
            self._process.alone(),
            ConstantDraws(),
            exchanging(OneProcess()),
            self._in_training(dtype) as model,
        ):
            parts = self._parts(model, batch, dtype)
            for reorder in _ORDERS:
                with torch.no_grad():
                    loss, number, _ = self._forward(model, batch, [reorder(part) for part in parts], dtype)
                losses.append(float(loss) / number)
        return losses

    @contextmanager
    def _in_training(self, dtype: torch.dtype | None) -> Iterator[nn.Module]:
        """Yield the model that computes in ``dtype``, with statistics fixed where each rank has its own."""
        model = self._process.model if dtype is None else self._process.wide_model
        model.train()
        with with_fixed_statistics(model) if self._batch_norms.has_local_statistics else nullcontext():
            yield model

    def _forward(
        self, model: nn.Module, batch: GlobalBatch, parts: Sequence[Sequence[int]], dtype: torch.dtype | None
    ) -> tuple[Tensor, float, torch.dtype | None]:
        """Return the sum of losses over parts that go through one after the other, their number, and what was narrowed to."""
        process = self._process
        # For each call: forward may leave buffers, and every loss is to start from the same state.
        batch.state.restore(model)
        narrowing, narrowed = Narrowing(), None
        total, weight = torch.zeros((), dtype=torch.float64, device=process.device), 0.0
        recipe = process.recipe if dtype is None else process.wide_recipe
        for part in parts:
            before = value_digest(random_states())
            samples = self._samples.load(part, batch.samples)
            with narrowing:
                loss, items = process.loss(recipe, model, samples, dtype)
            narrowed = narrowing.narrowed(loss) or narrowed
            if value_digest(random_states()) != before:
                raise Unrepeatable("forward or collate() draws random numbers, and not by torch, whose draws are held constant")
            number = float(items) if items is not None else float(len(part))
            # In float64: a sum of large losses is not to round by the order of the parts.
            total = total + (loss if items is not None else loss * number).double()
            weight += number
        return total, weight, narrowed

    def _parts(self, model: nn.Module, batch: GlobalBatch, dtype: torch.dtype | None) -> list[list[int]]:
        """Return the batch in parts that go through one after the other."""
        together = batch.together()
        # Their statistics are those of one piece of all ranks, and not of the whole step.
        are_synchronised = self._batch_norms and not self._batch_norms.has_local_statistics
        if are_synchronised or (len(together) > 1 and self._leaves_state(model, batch, together[0], dtype)):
            return together
        return [batch.at_once()]

    def _leaves_state(self, model: nn.Module, batch: GlobalBatch, together: Sequence[int], dtype: torch.dtype | None) -> bool:
        """Return whether a forward changes buffers or parameters, which the next piece then finds.

        Raises:
            Unrepeatable: That depends on the samples: each rank has state of its own then, and the whole batch has another.
        """
        whole = self._left(model, batch, together, dtype)
        changed = [name for name, tensor in whole.items() if not _are_equal(tensor, batch.state.model.get(name))]
        # First pieces alone, which start from the same state on all ranks.
        for part in [pieces[0] for pieces in batch.shards if pieces and changed]:
            left = self._left(model, batch, part, dtype)
            wrong = next((name for name in changed if not _are_equal(whole[name], left.get(name))), None)
            if wrong is not None:
                raise Unrepeatable(
                    f"forward leaves in '{wrong}' what depends on its samples, and the next piece starts from it"
                )
        return bool(changed)

    def _left(self, model: nn.Module, batch: GlobalBatch, part: Sequence[int], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return parameters and buffers after one forward from the batch's state."""
        with torch.no_grad():
            self._forward(model, batch, [part], dtype)
        return {name: tensor.detach().clone() for name, tensor in named_tensors(model)}


_ORDERS: tuple[Callable[[Sequence[int]], list[int]], ...] = (
    lambda part: [*part][::-1],
    lambda part: [*part[len(part) // 2 :], *part[: len(part) // 2]],
    lambda part: [*part[::2], *part[1::2]],
)


def _are_equal(tensor: Tensor, other: Tensor | None) -> bool:
    # In one type: a state in float32 is put into a model in float64.
    return other is not None and torch.equal(tensor, other.to(tensor))
