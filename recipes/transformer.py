"""The Transformer, as it was published, translating dates into ISO 8601 or one text file into another.

Source: A. Vaswani et al., "Attention Is All You Need" (2017), called "the paper" below.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset

from recipes import require_count, require_fraction, require_positive, require_switch
from recipes.data.dates import date_pairs
from recipes.data.text_pairs import TextPairs, batches_by_length, collate_pairs, read_pairs
from recipes.data.vocabulary import EOS, PAD, Vocabulary, words
from recipes.encoder_decoder import EncoderDecoder, Shape, greedy
from recipes.sparse_adam import SparseDenseAdam

Batch = tuple[Tensor, Tensor]


class Transformer:
    """Sequences into sequences: dates as people write them into ISO 8601, or one text file into another.

    The paper's base model: ``num_layers=6 width=512 num_heads=8 feedforward=2048 share_embeddings=true``, with
    ``lr_factor=1 warmup_steps=4000``.

    Args:
        source: Text file to translate from, UTF-8, plain or gzip, a sentence a line. None, with ``target`` None: the dates.
        target: Text file to translate into; its lines correspond to those of ``source``.
        eval_source: Text file like ``source`` to evaluate on. None with text files: no evaluation.
        eval_target: Text file like ``target`` to evaluate on.
        min_frequency: In text files, words that occur less often are ``<unk>``.
        max_length: Pairs with more tokens on either side are left out, and decoding stops there.
        num_layers: Layers of the encoder, and of the decoder.
        width: Size of the vectors between the layers (d_model).
        num_heads: Heads of each attention.
        feedforward: Units inside each feed-forward layer (d_ff).
        dropout: Part of embeddings, attention weights and layer outputs set to 0 in training.
        pre_norm: Normalise the input of each layer, not its output as in the paper.
        share_embeddings: One vocabulary and one matrix for source, target and output layer.
        sparse_embeddings: Sparse gradients of the embeddings: only rows of tokens in the batch are sent and updated.
        label_smoothing: Probability that the loss spreads evenly over all tokens.
        lr_factor: Multiplies the paper's learning rate.
        warmup_steps: Steps over which the learning rate rises.
        beta1: Of Adam.
        beta2: Of Adam.
        eps: Of Adam.

    Raises:
        ValueError: A setting out of range, or two that do not fit each other.
    """

    def __init__(  # noqa: PLR0913  the keys of conf/recipe/transformer.yaml
        self,
        *,
        source: str | None = None,
        target: str | None = None,
        eval_source: str | None = None,
        eval_target: str | None = None,
        min_frequency: int = 2,
        max_length: int = 64,
        num_layers: int = 2,
        width: int = 64,
        num_heads: int = 4,
        feedforward: int = 128,
        dropout: float = 0.1,
        pre_norm: bool = False,
        share_embeddings: bool = False,
        sparse_embeddings: bool = False,
        label_smoothing: float = 0.1,
        lr_factor: float = 0.5,
        warmup_steps: int = 200,
        beta1: float = 0.9,
        beta2: float = 0.98,
        eps: float = 1e-9,
    ) -> None:
        _require_settings(locals())
        self._files = _paths(("source", source), ("target", target))
        self._eval_files = _paths(("eval_source", eval_source), ("eval_target", eval_target))
        if self._eval_files and not self._files:
            raise ValueError(
                f"recipe.eval_source={eval_source} needs texts to train on: type recipe.source=FILE recipe.target=FILE too."
            )
        self._min_frequency, self._max_length = min_frequency, max_length
        self._shape = Shape(num_layers, width, num_heads, feedforward, dropout, pre_norm)
        self._share_embeddings, self._sparse_embeddings = share_embeddings, sparse_embeddings
        self._label_smoothing = label_smoothing
        self._lr_factor, self._warmup_steps = lr_factor, warmup_steps
        self._betas, self._eps = (beta1, beta2), eps

    def dataset(self) -> Dataset[Batch]:
        """Return the pairs to train on: a source, int64 [s], that ends in EOS, and a target, int64 [t], from BOS to EOS."""
        return self._train_pairs

    def eval_dataset(self) -> Dataset[Batch] | None:
        """Return the pairs to evaluate on, in the form of ``dataset``; None for text files without ``eval_source``."""
        texts = self._texts[1]
        return self._encoded(texts, "recipe.eval_source") if texts else None

    def model(self) -> nn.Module:
        """Return a network from sources [n, s] and targets [n, t] to logits [n, t, tokens] of each target's next token."""
        source, target = self._vocabularies
        return EncoderDecoder(
            self._shape,
            num_source=len(source),
            num_target=len(target),
            share_embeddings=self._share_embeddings,
            sparse_embeddings=self._sparse_embeddings,
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return Adam; with ``sparse_embeddings`` an Adam that updates the embeddings only where a token occurred."""
        if not self._sparse_embeddings:
            return Adam(model.parameters(), lr=self._lr_factor, betas=self._betas, eps=self._eps)
        sparse: list[nn.Parameter] = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]  # type: ignore[misc]
        # By identity: == between tensors compares their elements.
        known = set(map(id, sparse))
        dense = [p for p in model.parameters() if id(p) not in known]
        return SparseDenseAdam(dense, sparse, lr=self._lr_factor, betas=self._betas, eps=self._eps)

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """Return the paper's schedule (equation 3): a rise over ``warmup_steps``, then a fall.

        The learning rate is ``lr_factor * width**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)``, with steps from 1.
        """

        def factor(step: int) -> float:
            return float(self._shape.width**-0.5 * min((step + 1) ** -0.5, (step + 1) * self._warmup_steps**-1.5))

        return LambdaLR(optimizer, factor)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the label-smoothed cross entropy, in nats, summed over the target tokens, and their number.

        Args:
            model: What ``model`` returned.
            batch: Sources [n, s] and targets [n, t + 1]; the t tokens after the first are to be predicted, PAD is not counted.
        """
        return self._cross_entropy(model, batch, self._label_smoothing)[:2]

    def evaluate(self, model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (sum, count) of three measures over one batch.

        ``exact_match``: sequences that greedy decoding gets wholly right. ``token_accuracy``: tokens predicted right, given the
        right ones before them. ``loss``: cross entropy without smoothing, in nats a token.
        """
        source, target = batch
        labels = target[:, 1:]
        total, count, logits = self._cross_entropy(model, batch, smoothing=0.0)
        correct = (logits.argmax(dim=-1) == labels) & (labels != PAD)
        # No longer than the longest right answer: what has not ended by then is wrong already.
        decoded = greedy(model, source, max_tokens=labels.shape[1])
        exact = (decoded == labels).all(dim=1)
        return {
            "exact_match": (exact.sum(), exact.new_tensor(len(exact), dtype=torch.long)),
            "token_accuracy": (correct.sum(), count),
            "loss": (total, count),
        }

    def collate(self, samples: Sequence[Batch]) -> Batch:
        """Return sources [n, longest source] and targets [n, longest target], filled up with PAD at the end."""
        return collate_pairs(samples)

    def batches(self, order: Sequence[int], batch_size: int) -> list[list[int]]:
        """Return the sample numbers of an epoch in batches of pairs that are about equally long."""
        return batches_by_length(self._train_pairs, order, batch_size)

    def translate(self, model: nn.Module, text: str) -> str:
        """Return what greedy decoding makes of one text; the model must be in evaluation mode."""
        source, target = self._vocabularies
        device = next(model.parameters()).device
        numbers = torch.tensor([[*source.encode(self._split(text)), EOS]], device=device)
        with torch.no_grad():
            decoded = greedy(model, numbers, self._max_length + 1)
        return ("" if self._files is None else " ").join(target.decode(decoded[0].tolist()))

    @cached_property
    def _texts(self) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
        if self._files is None:
            return date_pairs()
        return read_pairs(*self._files), read_pairs(*self._eval_files) if self._eval_files else []

    @cached_property
    def _vocabularies(self) -> tuple[Vocabulary, Vocabulary]:
        pairs = self._texts[0]
        least = 1 if self._files is None else self._min_frequency
        sources, targets = ([self._split(pair[side]) for pair in pairs] for side in (0, 1))
        if self._share_embeddings:
            joint = Vocabulary([*sources, *targets], least)
            return joint, joint
        return Vocabulary(sources, least), Vocabulary(targets, least)

    @cached_property
    def _train_pairs(self) -> TextPairs:
        return self._encoded(self._texts[0], "recipe.source")

    def _encoded(self, texts: Iterable[tuple[str, str]], setting: str) -> TextPairs:
        source, target = self._vocabularies
        pairs = [(source.encode(self._split(a)), target.encode(self._split(b))) for a, b in texts]
        kept = [pair for pair in pairs if max(map(len, pair)) <= self._max_length]
        if not kept:
            raise ValueError(
                f"recipe.max_length={self._max_length} leaves out all {len(pairs)} pairs of {setting}: the shortest has "
                f"{min(max(map(len, pair)) for pair in pairs)} tokens, type at least that many."
            )
        return TextPairs(kept)

    def _split(self, text: str) -> list[str]:
        # In dates, parts of words count: 3rd, 03-MAR-97, '97.
        return list(text) if self._files is None else words(text)

    def _cross_entropy(self, model: nn.Module, batch: Batch, smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
        source, target = batch
        labels = target[:, 1:]
        logits = model(source, target[:, :-1])
        # Flat: the loss over images of classes [n, tokens, t] has no deterministic gradient on CUDA, the one over rows has.
        total = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=smoothing
        )
        return total, (labels != PAD).sum(), logits


def _require_settings(settings: dict[str, Any]) -> None:
    for name in ("min_frequency", "max_length", "num_layers", "width", "num_heads", "feedforward", "warmup_steps"):
        require_count(name, settings[name])
    for name in ("dropout", "label_smoothing", "beta1", "beta2"):
        require_fraction(name, settings[name])
    for name in ("lr_factor", "eps"):
        require_positive(name, settings[name])
    for name in ("pre_norm", "share_embeddings", "sparse_embeddings"):
        require_switch(name, settings[name])
    width, num_heads = settings["width"], settings["num_heads"]
    # Even, because half of the channels of a position are sines, and half are cosines.
    if width % num_heads or width % 2:
        raise ValueError(
            f"recipe.width={width} is not even or not a multiple of recipe.num_heads={num_heads}: type a width that is both."
        )
    if settings["share_embeddings"] and settings["sparse_embeddings"]:
        raise ValueError(
            "recipe.sparse_embeddings=true does not go with recipe.share_embeddings=true: the output layer then uses the same "
            "matrix, and its gradient there is dense. Type false for one of the two."
        )


def _paths(*files: tuple[str, str | None]) -> tuple[Path, Path] | None:
    """Return two files of texts that belong together, or None where neither is set.

    Raises:
        ValueError: Only one of the two is set, or a file does not exist.
    """
    (first, source), (second, target) = files
    if source is None and target is None:
        return None
    if source is None or target is None:
        missing, given, value = (first, second, target) if source is None else (second, first, source)
        raise ValueError(f"recipe.{given}={value} needs recipe.{missing}=FILE, the same lines in the other language.")
    for name, value in ((first, source), (second, target)):
        if not Path(value).is_file():
            raise ValueError(f"recipe.{name}={value} is not a file: type the path of a text file, plain or gzip.")
    return Path(source), Path(target)
