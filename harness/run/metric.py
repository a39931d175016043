"""Of a metric, which direction is better: by a rule that everything that ranks by metrics shares."""

from __future__ import annotations

import math
import re

_LOWER = {"loss", "error", "err", "perplexity", "ppl", "mse", "mae", "rmse", "nll", "bpc", "wer", "cer", "fid", "distance"}


def lower_is_better(name: str) -> bool:
    """Return True for a loss or an error, by a word of its name (``val_loss``, ``error/top5``, ``rmse``); all else grows."""
    return not _LOWER.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def is_better(name: str, value: float, best: float | None) -> bool:
    """Return True where ``value`` beats ``best``; NaN beats nothing, and everything beats None."""
    if best is None:
        return not math.isnan(value)
    return value < best if lower_is_better(name) else value > best
