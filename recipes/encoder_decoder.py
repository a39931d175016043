"""The network of the Transformer: an encoder and a decoder of attention layers.

Source: A. Vaswani et al., "Attention Is All You Need" (2017), called "the paper" below. What it leaves open (no biases in the
attention, embeddings drawn with deviation ``width ** -0.5``) is as in its authors' code, tensor2tensor.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.data.vocabulary import BOS, EOS, PAD


@dataclass(frozen=True)
class Shape:
    """Sizes of the layers.

    Attributes:
        num_layers: Layers of the encoder, and of the decoder.
        width: Size of the vectors between the layers (d_model); even, and a multiple of ``num_heads``.
        num_heads: Heads of each attention.
        feedforward: Units inside each feed-forward layer (d_ff).
        dropout: Part of embeddings, attention weights and layer outputs set to 0 in training.
        pre_norm: Normalise the input of each layer, not its output as in the paper.
    """

    num_layers: int
    width: int
    num_heads: int
    feedforward: int
    dropout: float
    pre_norm: bool


def greedy(model: nn.Module, source: Tensor, max_tokens: int) -> Tensor:
    """Return the most probable next token, again and again, until every sequence has ended or has ``max_tokens`` tokens.

    Args:
        model: From sources [n, s] and targets [n, t] to logits [n, t, tokens]; only called, so a wrapped one works too.
        source: Sources, int64 [n, s].
        max_tokens: Most tokens of a result, EOS included.

    Returns:
        int64 [n, max_tokens], BOS not included; after EOS comes only PAD.
    """
    tokens = source.new_full((len(source), 1), BOS)
    ended = torch.zeros(len(source), dtype=torch.bool, device=source.device)
    for _ in range(max_tokens):
        # All earlier tokens again each time: a cache of them would need more of the model than a call.
        following = model(source, tokens)[:, -1].argmax(dim=-1).masked_fill(ended, PAD)
        tokens = torch.cat([tokens, following[:, None]], dim=1)
        ended = ended | (following == EOS)
        # To ask waits for the device, and saves all tokens behind the last sequence's end.
        if bool(ended.all()):
            break
    return F.pad(tokens[:, 1:], (0, max_tokens + 1 - tokens.shape[1]), value=PAD)


class EncoderDecoder(nn.Module):
    """The network of the paper's figure 1; the output layer has no bias, and no softmax, which the loss brings.

    Args:
        shape: Sizes of the layers.
        num_source: Tokens of the source's vocabulary.
        num_target: Tokens of the target's vocabulary; with ``share_embeddings`` the same vocabulary.
        share_embeddings: One matrix for source, target and output layer (section 3.4).
        sparse_embeddings: Sparse gradients of the embeddings; not together with ``share_embeddings``.
    """

    def __init__(
        self, shape: Shape, num_source: int, num_target: int, share_embeddings: bool = False, sparse_embeddings: bool = False
    ) -> None:
        super().__init__()
        self.source = Embedding(num_source, shape, sparse_embeddings)
        self.target = self.source if share_embeddings else Embedding(num_target, shape, sparse_embeddings)
        self.encoder = nn.ModuleList(EncoderLayer(shape) for _ in range(shape.num_layers))
        self.decoder = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_layers))
        # With pre-norm nothing has normalised the sum that leaves the last layer.
        self.encoder_norm = nn.LayerNorm(shape.width) if shape.pre_norm else nn.Identity()
        self.decoder_norm = nn.LayerNorm(shape.width) if shape.pre_norm else nn.Identity()
        self.output = nn.Linear(shape.width, num_target, bias=False)
        # Before the output layer takes over a matrix of embeddings, which is drawn in another way.
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        if share_embeddings:
            self.output.weight = self.source.vectors.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits [n, t, tokens] of the tokens that follow targets [n, t], given sources [n, s]."""
        visible = (source != PAD)[:, None, None, :]
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory, visible)
        memory = self.encoder_norm(memory)
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x, memory, visible)
        return cast(Tensor, self.output(self.decoder_norm(x)))


class Embedding(nn.Module):
    """Token vectors times the root of their width, plus positions (sections 3.4 and 3.5), with dropout."""

    def __init__(self, num_tokens: int, shape: Shape, sparse: bool) -> None:
        super().__init__()
        self.vectors = nn.Embedding(num_tokens, shape.width, padding_idx=PAD, sparse=sparse)
        # PAD's row as well, which nn.Embedding has set to 0: as an input it is masked, or its output is not counted.
        nn.init.normal_(self.vectors.weight, std=shape.width**-0.5)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return vectors [n, t, width] of tokens [n, t]."""
        x = self.vectors(tokens) * math.sqrt(self.vectors.embedding_dim)
        return cast(Tensor, self.dropout(x + positions(x)))


def positions(x: Tensor) -> Tensor:
    """Return the paper's sinusoids [t, width] for vectors [n, t, width], in their type and on their device.

    Position p has ``sin(p / 10000**(2i / width))`` in the first half of the width and the cosines in the second; the paper
    interleaves the two, which is the same up to the order of the channels. Computed each time and not kept in a buffer: that
    costs little, has no longest length, and DDP would send a buffer to all ranks at every step.
    """
    length, width = x.shape[-2:]
    # At least float32: bfloat16 cannot tell neighbouring positions beyond 256 apart.
    exact = torch.promote_types(x.dtype, torch.float32)
    frequencies = torch.arange(0, width, 2, device=x.device, dtype=exact).mul(-math.log(10_000) / width).exp()
    angles = torch.arange(length, device=x.device, dtype=exact)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype)


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.feedforward = FeedForward(shape)
        self.residuals = nn.ModuleList(Residual(shape) for _ in range(2))

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Return [n, s, width] of [n, s, width]; ``visible`` [n, 1, 1, s] is False at padding."""
        x = self.residuals[0](x, lambda y: self.attention(y, y, visible))
        return cast(Tensor, self.residuals[1](x, self.feedforward))


class DecoderLayer(nn.Module):
    """Self-attention to earlier positions, attention to the encoder's result, then a feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attention = Attention(shape)
        self.cross_attention = Attention(shape)
        self.feedforward = FeedForward(shape)
        self.residuals = nn.ModuleList(Residual(shape) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor, visible: Tensor) -> Tensor:
        """Return [n, t, width] of [n, t, width] and ``memory`` [n, s, width], of which ``visible`` [n, 1, 1, s] may be seen."""
        # Padding is at the end, so no token that counts comes behind it: "earlier positions only" hides it.
        x = self.residuals[0](x, lambda y: self.self_attention(y, y, None))
        x = self.residuals[1](x, lambda y: self.cross_attention(y, memory, visible))
        return cast(Tensor, self.residuals[2](x, self.feedforward))


class Residual(nn.Module):
    """A layer's output, with dropout, added to its input; LayerNorm after the sum (section 3.1) or before the layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.pre_norm = shape.pre_norm

    def forward(self, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a tensor of the shape of ``x``."""
        if self.pre_norm:
            return x + cast(Tensor, self.dropout(layer(self.norm(x))))
        return cast(Tensor, self.norm(x + self.dropout(layer(x))))


class FeedForward(nn.Sequential):
    """Two linear layers with a ReLU between them, the same at every position (section 3.3)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(nn.Linear(shape.width, shape.feedforward), nn.ReLU(), nn.Linear(shape.feedforward, shape.width))


class Attention(nn.Module):
    """Multi-head attention (section 3.2): ``softmax(Q K^T / sqrt(width / heads)) V`` in each head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.num_heads, self.dropout = shape.num_heads, shape.dropout

    def forward(self, x: Tensor, memory: Tensor, visible: Tensor | None) -> Tensor:
        """Return [n, t, width] of queries [n, t, width] and ``memory`` [n, s, width].

        Args:
            visible: bool, broadcast to [n, heads, t, s], True where a query may look; None: at its own and earlier positions.
        """
        heads = F.scaled_dot_product_attention(
            self._split(self.query(x)),
            self._split(self.key(memory)),
            self._split(self.value(memory)),
            attn_mask=visible,
            # The function does not know in which mode the module is.
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=visible is None,
        )
        return cast(Tensor, self.output(heads.transpose(1, 2).flatten(2)))

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.num_heads, -1).transpose(1, 2)
