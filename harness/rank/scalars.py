"""Numbers of one's own: ``harness.log("name", value)`` in a recipe, in a script, or in a Hydra app."""

from __future__ import annotations

from collections import Counter
from typing import Any

from harness.rank.context import current_or_none

_logged: Counter[str] = Counter()


def log(name: str, value: Any, step: int | None = None) -> None:
    """Put a number into this rank's records, from where terminal, TensorBoard and reports have it.

    What several ranks log by one name at one step counts as its mean over them. In a recipe it belongs to the step that is
    being taken; what the verification's own steps log is not kept. In a process that nobody started as a rank it goes nowhere,
    so that a script may be run by itself.

    Args:
        name: Such as ``"grad_norm"``; slashes make groups in TensorBoard.
        value: A number, or a tensor or array of one element.
        step: Counted from 0; left out, the training's step, or in a task of one's own how often the name was logged before.

    Raises:
        TypeError: ``value`` is no number.
    """
    # Before it is known whether this is a rank: a mistake is then found in a script that runs by itself too.
    try:
        number = float(value)
    # RuntimeError is torch's for a tensor of several elements.
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"harness.log({name!r}, ...) takes a number, and got {type(value).__name__} {value!r:.60}.") from None
    rank = current_or_none()
    if rank is None:
        return
    if step is None and rank.plan.train is not None:
        step = rank.record.step_now
        if step is None:
            # The steps of the verification are none of the training's.
            return
    if step is None:
        step = _logged[name]
        _logged[name] += 1
    rank.record.scalar(name, number, step)
