"""Random streams: which ranks share one, and which must not."""

from __future__ import annotations

import hashlib
import random

import numpy
import torch

EVALUATION_SEED = 0
"""Of what an evaluation's samples are drawn by: they are the same in every run, whatever its own seed."""


def derive(seed: int, *names: str | int) -> int:
    """Return a seed of 63 bits for the stream of that name: equal for equal arguments, unrelated otherwise (SHA-256)."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, those of all devices included."""
    random.seed(seed)
    # numpy takes 32 bits at most.
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_rank(seed: int, rank: int, step: int = 0) -> None:
    """Give this rank its own stream, for dropout and augmentation from ``step`` on."""
    seed_everything(derive(seed, "rank", rank, *([step] if step else [])))


def epoch_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """Return the order of an epoch's samples: a permutation of ``range(num_samples)``, the same on every rank."""
    # Of its own: the common generators are not at the same place on all ranks.
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    return torch.randperm(num_samples, generator=generator).tolist()
