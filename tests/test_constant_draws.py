"""Within constant draws a batch is the sum of its shards, and no generator moves."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.training.state import undisturbed_random
from harness.verify.constant_draws import _DROPOUTS, ConstantDraws, UnknownDraw, _may_draw, _value_of
from harness.verify.narrowing import Narrowing

Loss = Callable[[nn.Module, Tensor], Tensor]


def first(output) -> Tensor:
    return output[0]


def vae(layer: nn.Module, x: Tensor) -> Tensor:
    mean, log_variance = layer(x).chunk(2, dim=-1)
    return (mean + torch.randn_like(mean) * (0.5 * log_variance).exp()).square().sum((1, 2))


def diffusion(layer: nn.Module, x: Tensor) -> Tensor:
    time = torch.randint(3, 1000, (len(x),))
    noise = torch.randn_like(x)
    share = (time.double() / 1000)[:, None, None]
    return (layer(share * x + (1 - share) * noise) - noise).square().sum((1, 2))


def sampled(layer: nn.Module, x: Tensor) -> Tensor:
    spread = distributions.Normal(layer(x), 1.0 + layer(x).square())
    choice = distributions.Categorical(logits=layer(x))
    loss = spread.rsample().square().sum((1, 2)) - choice.log_prob(choice.sample()).sum(1)
    for drawn in (
        distributions.Gamma(1 + layer(x).square(), 1.0).rsample(),
        distributions.Dirichlet(1 + layer(x).square()).rsample(),
        distributions.Laplace(layer(x), 1.0).rsample(),
        distributions.StudentT(4.0, layer(x)).rsample(),
        distributions.Exponential(layer(x).exp()).rsample(),
        distributions.Poisson(layer(x).exp()).sample(),
        distributions.Bernoulli(logits=layer(x)).sample(),
        distributions.Binomial(5, logits=layer(x)).sample(),
        distributions.VonMises(layer(x), 2.0).sample(),
    ):
        loss = loss + (drawn * layer(x)).sum((1, 2))
    return loss


def dropouts(layer: nn.Module, x: Tensor) -> Tensor:
    x = F.dropout(layer(x), 0.3) + F.dropout1d(layer(x), 0.2) + F.feature_alpha_dropout(layer(x), 0.2, True)
    x = x + F.alpha_dropout(layer(x), 0.3, True) + F.dropout(layer(x), 0.5, inplace=True)
    mask = torch.bernoulli(torch.full_like(x, 0.8)) / 0.8 * torch.empty_like(x).bernoulli_(0.7).div_(0.7)
    return (x * mask * torch.native_dropout(x, 0.2, True)[0]).sum((1, 2))


def attention_math(layer: nn.Module, x: Tensor) -> Tensor:
    x = layer(x)[:, None]
    return F.scaled_dot_product_attention(x, x, x, None, 0.3).sum((1, 2, 3))


def mixed(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x[torch.randperm(len(x))] * distributions.Beta(0.4, 0.4).sample() + x).square().sum((1, 2))


CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "vae": (lambda: nn.Linear(4, 8), vae),
    "diffusion": (lambda: nn.Linear(4, 4), diffusion),
    "dropouts": (lambda: nn.Linear(4, 4), dropouts),
    "Dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4)), lambda m, x: m(x).square().sum((1, 2))),
    "lstm": (lambda: nn.LSTM(4, 4, 2, dropout=0.2, batch_first=True), lambda m, x: first(m(x)).square().sum((1, 2))),
    "gru": (lambda: nn.GRU(4, 4, 2, dropout=0.2, batch_first=True), lambda m, x: first(m(x)).square().sum((1, 2))),
    "rnn": (lambda: nn.RNN(4, 4, 2, dropout=0.2, batch_first=True), lambda m, x: first(m(x)).square().sum((1, 2))),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True),
        lambda m, x: first(m(x, x, x, need_weights=False)).square().sum((1, 2)),
    ),
    "attention with weights": (
        lambda: nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True),
        lambda m, x: first(m(x, x, x)).square().sum((1, 2)),
    ),
    "attention of functional": (lambda: nn.Linear(4, 4), attention_math),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.2, batch_first=True), lambda m, x: m(x)[..., 0].sum(1)),
    "rrelu": (lambda: nn.Linear(4, 4), lambda m, x: F.rrelu(m(x), training=True).square().sum((1, 2))),
    "rrelu in place": (lambda: nn.Linear(4, 4), lambda m, x: F.rrelu(m(x), training=True, inplace=True).sum((1, 2))),
    "gumbel": (lambda: nn.Linear(4, 4), lambda m, x: (F.gumbel_softmax(m(x), hard=True) * x).sum((1, 2))),
    "distributions": (lambda: nn.Linear(4, 4), sampled),
    "mixed": (lambda: nn.Linear(4, 4), mixed),
    "pooling": (lambda: nn.Linear(4, 4), lambda m, x: F.fractional_max_pool2d(m(x)[:, None], 2, 2).sum((1, 2, 3))),
    "checkpoint": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4), nn.RReLU()),
        lambda m, x: checkpoint(lambda y: m(y) * torch.rand_like(y), x, use_reentrant=False).sum((1, 2)),
    ),
    "checkpoint of old": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4), nn.RReLU()),
        lambda m, x: checkpoint(lambda y: m(y) * torch.rand_like(y), x.requires_grad_(), use_reentrant=True).sum((1, 2)),
    ),
}


def summed(module: nn.Module, loss: Loss, parts: list[Tensor]) -> list[Tensor]:
    """Return the sum of losses, then the gradients."""
    module.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        with ConstantDraws():
            value = loss(module, part.clone()).sum()
            if "checkpoint" in repr(loss.__code__.co_names):
                value.backward()
        if "checkpoint" not in repr(loss.__code__.co_names):
            value.backward()
        total += value.detach()
    return [total, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", CASES)
def test_a_batch_is_the_sum_of_its_shards(name: str) -> None:
    make, loss = CASES[name]
    with undisturbed_random():
        torch.manual_seed(0)
        module, x = make().double(), torch.randn(6, 5, 4, dtype=torch.float64)
        before = torch.get_rng_state()
        whole, shards = (summed(module, loss, parts) for parts in ([x], [x[:4], x[4:]]))
        assert torch.equal(before, torch.get_rng_state())
    assert len(whole) == len(shards) > 2
    for one, other in zip(whole, shards, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*CASES][:16])
def test_each_case_draws_without_them(name: str) -> None:
    make, loss = CASES[name]
    with undisturbed_random():
        module, x = make().double(), torch.randn(6, 5, 4, dtype=torch.float64)
        before = torch.get_rng_state()
        loss(module, x)
        assert not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(4, 4, 2, dropout=0.2),
        nn.GRU(4, 4, 2, dropout=0.2),
        nn.Dropout(0.4),
        nn.AlphaDropout(0.4),
        nn.TransformerEncoderLayer(4, 2, 8, 0.2),
        nn.RReLU(),
    ],
)
def test_training_is_then_as_evaluation(module: nn.Module) -> None:
    x = torch.linspace(-1, 1, 24).reshape(3, 2, 4)
    with ConstantDraws():
        trained = module.train()(x)
    expected = module.eval()(x)
    torch.testing.assert_close(*(y[0] if isinstance(y, tuple) else y for y in (trained, expected)))


def test_packed_sequences_lose_dropout_too() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    for kind in (nn.LSTM, nn.GRU):
        module = kind(4, 4, 2, dropout=0.5)
        with ConstantDraws():
            trained = module(packed)[0].data
        torch.testing.assert_close(trained, module.eval()(packed)[0].data)


def test_the_constants() -> None:
    generator = torch.Generator()
    before = generator.get_state(), torch.get_rng_state()
    wide = torch.empty(2, dtype=torch.float64)
    with ConstantDraws():
        assert torch.rand(3, generator=generator).tolist() == [0.5] * 3
        assert torch.rand(2, dtype=torch.float64, out=wide) is wide
        assert wide.tolist() == [0.5, 0.5]
        assert torch.randn(2, out=torch.empty(0)).tolist() == [0.5, 0.5]
        assert torch.empty(2).uniform_(2, 4).tolist() == [3.0, 3.0]
        assert torch.empty(2, dtype=torch.float64).normal_(1, 0.2).tolist() == [1.1, 1.1]
        assert torch.normal(1.0, torch.tensor([2.0, 4.0])).tolist() == [2.0, 3.0]
        assert torch.normal(torch.tensor([2.0, 4.0])).tolist() == [2.5, 4.5]
        assert torch.normal(0, 1, (2,)).tolist() == [0.5, 0.5]
        assert torch.randint(3, 9, (2,)).tolist() == [3, 3]
        assert torch.randint(9, (2,)).dtype == torch.int64
        assert torch.randint_like(torch.ones(2), 4, 9).tolist() == [4.0, 4.0]
        assert torch.empty(2, dtype=torch.int64).random_(2, 5).tolist() == [2, 2]
        assert torch.randperm(4).tolist() == [0, 1, 2, 3]
        assert torch.empty(2).exponential_(2).tolist() == pytest.approx([math.log(2) / 2] * 2)
        assert torch.empty(2).geometric_(0.5).tolist() == [1, 1]
        assert torch.empty(2).cauchy_().tolist() == [0.5, 0.5]
        assert torch.empty(2).log_normal_(1, 2).tolist() == pytest.approx([math.exp(2)] * 2)
        assert torch.bernoulli(torch.tensor([0.0, 0.1, 1.0])).tolist() == [0, 1, 1]
        assert torch.empty(2, dtype=torch.bool).bernoulli_(0.1).tolist() == [True, True]
        assert torch.zeros(2).bernoulli_(torch.tensor([0.0, 0.4])).tolist() == [0, 1]
        weights = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 1.0]])
        assert torch.multinomial(weights, 2).tolist() == [[1, 2], [0, 2]]
        assert torch.multinomial(weights, 4, replacement=True).tolist() == [[1] * 4, [0] * 4]
        assert torch.multinomial(weights[0], 1).tolist() == [1]
    assert torch.equal(before[0], generator.get_state())
    assert torch.equal(before[1], torch.get_rng_state())


def test_in_inference_too() -> None:
    before = torch.get_rng_state()
    with ConstantDraws(), torch.inference_mode():
        x = torch.randn(2, 3, 4)
        assert torch.equal(torch.dropout(x, 0.5, True), x)
        assert torch.equal(F.rrelu(-x, training=True), F.rrelu(-x))
        assert torch.ops.aten.dropout(x, 0.5, True).equal(x)
        nn.LSTM(4, 4, 2, dropout=0.2)(x)
        F.scaled_dot_product_attention(x, x, x, dropout_p=0.4)
    assert torch.equal(before, torch.get_rng_state())


def test_an_operation_of_which_nothing_is_known_is_named() -> None:
    with ConstantDraws(), pytest.raises(UnknownDraw, match="_fused_dropout"):
        torch.ops.aten._fused_dropout(torch.ones(2), 0.5)


def test_every_operation_that_draws_has_a_constant_or_is_known_to_need_none() -> None:
    """Of attention and recurrent layers dropout is off when torch hands it down; the rest is refused by its name."""
    without = ("attention", "_softmax_", "lstm", "gru", "rnn", "rnn_relu", "rnn_tanh", "sdp_choice", "dropout_state")
    refused = {"_fill_mem_eff_dropout_mask_", "_fused_dropout"}
    operations = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    names = {name.removeprefix("aten::") for name in operations if any(map(_may_draw, overloads_of(name)))}
    assert len(names) > 60
    others = {name for name in names if not any(part in name for part in without)} - refused
    unknown = {name for name in others - _DROPOUTS - {"native_dropout"} if _value_of(name) is None}
    assert not unknown


def overloads_of(operation: str) -> list[torch._ops.OpOverload]:
    packet = getattr(torch.ops.aten, operation.removeprefix("aten::"), None)
    return [] if packet is None else [getattr(packet, name) for name in packet.overloads()]


def test_a_loop_that_refuses_its_number_ends(monkeypatch) -> None:
    monkeypatch.setattr("harness.verify.constant_draws.MOST_DRAWS", 100)
    with ConstantDraws(), pytest.raises(UnknownDraw, match="again and again"):
        while torch.rand(1) < 0.6:
            pass


def test_dropout_is_back_afterwards() -> None:
    with undisturbed_random():
        with ConstantDraws():
            assert F.dropout(torch.ones(100)).sum() == 100
        assert F.dropout(torch.ones(100)).eq(0).any()


def test_narrowing_is_seen_beside_them() -> None:
    x = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    for outer, inner in ((ConstantDraws(), Narrowing()), (Narrowing(), ConstantDraws())):
        with outer, inner:
            F.dropout(x).detach().bfloat16()
            wide, narrow = (F.dropout(x) + torch.rand_like(x)).sum(), F.dropout(x.float()).double().sum()
        narrowing = inner if isinstance(inner, Narrowing) else outer
        assert narrowing.narrowed(wide) is None
        assert narrowing.narrowed(narrow) == torch.float32
