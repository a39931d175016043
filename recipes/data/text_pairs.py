"""Pairs of texts: read from two files whose lines correspond, padded into batches, grouped by length."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from recipes.data.files import read_bytes
from recipes.data.vocabulary import BOS, EOS, PAD

_POOL_BATCHES = 100


def read_pairs(source: Path, target: Path) -> list[tuple[str, str]]:
    """Return line i of one file with line i of the other; pairs with an empty side are left out.

    Args:
        source: UTF-8 text, plain or gzip, one sentence a line.
        target: The same lines in another language.

    Raises:
        ValueError: A file is missing, damaged, empty or not UTF-8, or the numbers of lines differ.
    """
    source_lines, target_lines = read_lines(source), read_lines(target)
    if len(source_lines) != len(target_lines):
        raise ValueError(
            f"{source} has {len(source_lines)} lines but {target} has {len(target_lines)}: "
            "line i of one must be the translation of line i of the other."
        )
    pairs = [pair for pair in zip(source_lines, target_lines, strict=True) if all(pair)]
    if not pairs:
        raise ValueError(f"{source} and {target} have no line that holds text in both.")
    return pairs


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 file, plain or gzip, without white space at their ends.

    Raises:
        ValueError: The file is missing, damaged, empty or not UTF-8.
    """
    try:
        # A byte order mark, which editors on Windows put first, is no part of the first word.
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}): convert it to UTF-8.") from error
    if not text.strip():
        raise ValueError(f"{path} is empty: it must hold one sentence a line.")
    # Not splitlines(): it also ends a line at U+2028 and the like, which occur inside sentences and would shift what follows.
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


class TextPairs(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of token numbers, int64: a source [s] that ends in ``EOS`` and a target [t] between ``BOS`` and ``EOS``.

    Args:
        pairs: Token numbers without ``BOS`` and ``EOS``.
    """

    def __init__(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        source, target = self._pairs[index]
        return torch.tensor([*source, EOS]), torch.tensor([BOS, *target, EOS])

    def length(self, index: int) -> tuple[int, int]:
        """Return the numbers of tokens of a pair, target first."""
        source, target = self._pairs[index]
        return len(target), len(source)


def collate_pairs(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return sources [n, longest source] and targets [n, longest target], filled up with ``PAD`` at the end."""
    sources, targets = zip(*samples, strict=True)
    return (
        pad_sequence(list(sources), batch_first=True, padding_value=PAD),
        pad_sequence(list(targets), batch_first=True, padding_value=PAD),
    )


def batches_by_length(pairs: TextPairs, order: Sequence[int], batch_size: int) -> list[list[int]]:
    """Group shuffled sample numbers into batches of pairs that are about equally long, so that little is padding.

    Pairs are sorted within pools of 100 batches, so a batch still differs from one epoch to the next. All randomness comes from
    ``order``: equal orders give equal batches on every rank.

    Args:
        pairs: What the numbers count.
        order: Sample numbers of one epoch, shuffled.
        batch_size: Sample numbers in each batch but the last.

    Returns:
        Each number of ``order`` once. What ``batch_size`` does not divide, the end of ``order``, is the last batch.
    """
    num_full = len(order) - len(order) % batch_size
    place = {number: i for i, number in enumerate(order)}
    batches = []
    for start in range(0, num_full, _POOL_BATCHES * batch_size):
        pool = sorted(order[start : min(start + _POOL_BATCHES * batch_size, num_full)], key=pairs.length)
        for first in range(0, len(pool), batch_size):
            # Back in shuffled order, or the last rank's part of each batch would hold the longest pairs.
            batches.append(sorted(pool[first : first + batch_size], key=place.__getitem__))
    # Not from short to long: by the place of each batch's first number, which is random because the order is.
    batches.sort(key=lambda batch: place[batch[0]])
    return [*batches, list(order[num_full:])] if num_full < len(order) else batches
