"""Evaluation by one process, each sample once (R9)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.data import default_collate

from harness.training.batch import moved
from harness.training.digest import value_digest
from harness.training.loader import fetch
from harness.training.seeds import EVALUATION_SEED, derive, seed_everything
from harness.training.state import DTYPES, TrainingState, random_states
from harness.verify.reference.process import SingleProcess

Metrics = dict[str, list[float]]
"""Name -> [sum, count]."""


class ReferenceEvaluation:
    """Evaluates the recipe in one process."""

    def __init__(self, process: SingleProcess) -> None:
        self._process = process

    def num_samples(self) -> int:
        """Return how many samples there are to evaluate on."""
        with self._process.alone():
            seed_everything(derive(EVALUATION_SEED, "eval_dataset"))
            return len(self._process.recipe.eval_dataset())  # type: ignore[attr-defined]

    def evaluate(self, state: TrainingState, parts: Sequence[Sequence[int]], size: int, draw: int) -> tuple[Metrics, bool]:
        """Return the metrics over the samples of ``parts``, in batches of at most ``size``, and whether it drew at random.

        ``draw`` numbers the random streams that evaluation may draw from: what depends on it cannot be compared.
        """
        with self._process.alone():
            return self._evaluate(state, parts, size, draw)

    def _evaluate(self, state: TrainingState, parts: Sequence[Sequence[int]], size: int, draw: int) -> tuple[Metrics, bool]:
        process, recipe = self._process, self._process.recipe
        seed_everything(derive(EVALUATION_SEED, "eval_dataset"))
        dataset = recipe.eval_dataset()  # type: ignore[attr-defined]
        seed_everything(derive(EVALUATION_SEED, "draw", draw))
        collate = getattr(recipe, "collate", None) or default_collate
        # Each time: an evaluation may leave something in the model for the next.
        state.restore(process.model)
        process.model.eval()
        totals: Metrics = {}
        # Only now: what eval_dataset() draws is drawn by a seed of its own.
        before = value_digest(random_states())
        with torch.no_grad():
            for part in parts:
                # In batches of the ranks' size: what becomes of a sample may depend on its batch.
                for start in range(0, len(part), size):
                    samples = collate(fetch(dataset, part[start : start + size]))
                    batch = moved(samples, process.device, DTYPES[process.plan.precision])
                    for name, (value, count) in recipe.evaluate(process.model, batch).items():  # type: ignore[attr-defined]
                        pair = totals.setdefault(name, [0.0, 0.0])
                        # Sums and counts in Python's numbers, which have double precision whatever the model's is.
                        pair[0] += float(value)
                        pair[1] += float(count)
        return totals, value_digest(random_states()) != before
