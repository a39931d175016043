"""The reference: one process that replays the shards of N ranks.

What it checks, it does by means of its own: the weights of unequal shards, the sum over pieces, the mean over ranks (in
float64, from what the ranks themselves captured), clipping (torch's own), the declared learning rate (a scheduler of its own),
the optimizer's step (a new optimizer with the recipe's own settings), evaluation, and the samples of a batch, loaded again from
a data set of its own. It shares with the run: the recipe, and how it and its scheduler are made (``training.recipe``); torch's
kernels, thread count and determinism flags; the seed's derivation; ``training.digest``; copies of state (``training.state``);
the mover of batches (``training.batch``); synchronised layers and what they exchange (``training.parallel.batchnorm``), which
R7 holds against plain BatchNorm over the whole batch; how a recipe groups samples into batches (``training.loader``, where R1
counts the samples) and how samples are fetched by their numbers; and, where BatchNorm takes its statistics over shards, which
samples these are (``training.shard``, whose parts R1 checks). Where the whole batch is compared, both sides hold constant what
is drawn (``verify.constant_draws``), and a data set that draws is read once, by rank 0.
"""

from __future__ import annotations

import torch
from torch import nn

from harness.run.plan import TrainPlan
from harness.verify.reference.batchnorm import BatchNorms
from harness.verify.reference.evaluation import ReferenceEvaluation
from harness.verify.reference.process import SingleProcess
from harness.verify.reference.replay import Replay
from harness.verify.reference.samples import Samples
from harness.verify.reference.update import Update
from harness.verify.reference.whole import WholeReference


class Reference:
    """A training of the same recipe in this process alone, put into the run's own state before whatever it does.

    Args:
        plan: Of the run.
        world_size: Whose shards are replayed.
        device: Of this process.
        num_steps: Of the whole run, for the scheduler.
        ranks_model: Of a rank: it tells which BatchNorm layers are synchronised.

    Attributes:
        process: What one process makes of the recipe.
        batch_norms: The BatchNorm layers of a rank's model.
        samples: Loads batches.
        replay: Replays shards.
        update: Takes the optimizer's steps.
        whole: Takes the whole batch.
        evaluation: Evaluates.
    """

    def __init__(self, plan: TrainPlan, world_size: int, device: torch.device, num_steps: int, ranks_model: nn.Module) -> None:
        self.process = process = SingleProcess(plan, device, num_steps)
        self.batch_norms = BatchNorms(ranks_model, world_size)
        self.samples = Samples(process.recipe, process.dataset, world_size, plan.num_workers)
        self.replay = Replay(process, self.samples, self.batch_norms, world_size)
        self.update = Update(process, world_size)
        self.whole = WholeReference(process, self.samples, self.batch_norms)
        self.evaluation = ReferenceEvaluation(process)
