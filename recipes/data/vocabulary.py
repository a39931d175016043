"""Text to token numbers and back."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

PAD, BOS, EOS, UNK = range(4)
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")

_WORD = re.compile(r"\w+|[^\w\s]")


def words(text: str) -> list[str]:
    """Return the words of a text and, each for itself, its punctuation marks."""
    return _WORD.findall(text)


class Vocabulary:
    """The tokens of one or several texts, numbered; 0 to 3 are ``<pad>``, ``<bos>``, ``<eos>`` and ``<unk>``.

    The frequent tokens come first, equally frequent ones by code point, so the same texts give the same numbers on every rank.

    Args:
        sentences: Tokens to be counted, sentence by sentence.
        min_frequency: A token that occurs less often becomes ``<unk>``.
    """

    def __init__(self, sentences: Iterable[Sequence[str]], min_frequency: int = 1) -> None:
        counts = Counter(token for sentence in sentences for token in sentence)
        frequent = [token for token, count in counts.items() if count >= min_frequency]
        self._tokens = [*SPECIAL_TOKENS, *sorted(frequent, key=lambda token: (-counts[token], token))]
        # Numbered from the known tokens only: a text that spells "<eos>" must not end its own sentence.
        self._numbers = {token: number for number, token in enumerate(self._tokens) if number >= len(SPECIAL_TOKENS)}

    def __len__(self) -> int:
        return len(self._tokens)

    def encode(self, sentence: Sequence[str]) -> list[int]:
        """Return the numbers of the tokens, ``UNK`` for unknown ones, without ``BOS`` and ``EOS``."""
        return [self._numbers.get(token, UNK) for token in sentence]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """Return the tokens up to the first ``EOS``, without ``PAD`` and ``BOS``."""
        tokens = []
        for number in numbers:
            if number == EOS:
                break
            if number not in (PAD, BOS):
                tokens.append(self._tokens[number])
        return tokens
