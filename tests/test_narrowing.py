"""What is narrowed counts where it is on the way to the loss, and only there."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.verify.narrowing import Narrowing


@pytest.fixture
def x() -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()


def test_a_detached_log_does_not_count(x: Tensor) -> None:
    with Narrowing() as narrowing:
        logged = x.detach().bfloat16()
        squares = x * x
        squares.float().mean()
        loss = squares.sum()
    assert logged.dtype == torch.bfloat16
    assert narrowing.narrowed(loss) is None


def test_a_float_on_the_way_counts(x: Tensor) -> None:
    with Narrowing() as narrowing:
        loss = (x.float().double() ** 2).sum()
    assert narrowing.narrowed(loss) == torch.float32


def test_the_coarsest_type_on_the_way_counts_and_not_that_of_a_log(x: Tensor) -> None:
    with Narrowing() as narrowing:
        x.detach().bfloat16()
        loss = (x.half().double() * x.float().double()).sum()
    assert narrowing.narrowed(loss) == torch.float16


def test_targets_without_gradient_that_enter_the_loss_count(x: Tensor) -> None:
    with Narrowing() as narrowing:
        with torch.no_grad():
            targets = torch.softmax(x.float() / 0.05, dim=-1)
            targets /= targets.sum(dim=0, keepdim=True)
        loss = -(targets * F.log_softmax(x, dim=-1)).sum()
    assert narrowing.narrowed(loss) == torch.float32


def test_a_change_in_place_through_a_view_counts(x: Tensor) -> None:
    with Narrowing() as narrowing:
        total = torch.zeros(3, 4, dtype=torch.float64)
        total[1:, 2].copy_(x.detach()[1:, 2].bfloat16())
        loss = (total * x).sum()
    assert narrowing.narrowed(loss) == torch.bfloat16


def test_narrowing_by_a_copy_into_a_narrower_tensor_counts(x: Tensor) -> None:
    with Narrowing() as narrowing:
        narrow = torch.zeros(12)
        torch._foreach_copy_([narrow.view(3, 4)], [x.detach()])
        loss = (narrow.double().sum() * x).sum()
    assert narrowing.narrowed(loss) == torch.float32


def test_an_out_tensor_counts(x: Tensor) -> None:
    with Narrowing() as narrowing:
        made = torch.empty(3, 4, dtype=torch.float64)
        torch.mul(x.detach().float().double(), 2, out=made)
        loss = (made * x).sum()
    assert narrowing.narrowed(loss) == torch.float32


def test_a_choice_by_narrowed_numbers_counts(x: Tensor) -> None:
    with Narrowing() as narrowing:
        loss = x.gather(1, x.bfloat16().argmax(1, keepdim=True)).sum()
    assert narrowing.narrowed(loss) == torch.bfloat16


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.mean().item(),
        lambda t: t.tolist()[0][0],
        lambda t: float(t.float().numpy().mean()),
        lambda t: float(torch.equal(t, t)),
        lambda t: t.data_ptr() and 1.0,
        lambda t: 2.0 if t.sum() > 0 else 1.0,
    ],
)
def test_what_is_read_out_counts(x: Tensor, read) -> None:
    with Narrowing() as narrowing:
        loss = (x * read(x.detach().bfloat16())).sum()
    assert narrowing.narrowed(loss) == torch.bfloat16


def test_what_is_read_out_of_wide_numbers_does_not_count(x: Tensor) -> None:
    with Narrowing() as narrowing:
        x.detach().bfloat16()
        loss = (x * x.detach().mean().item() * x.tolist()[0][0]).sum()
    assert narrowing.narrowed(loss) is None


def test_autocast_counts() -> None:
    x, weight = torch.ones(2, 3), torch.ones(3, 3, requires_grad=True)
    with Narrowing() as narrowing, torch.autocast("cpu", torch.bfloat16):
        loss = F.linear(x, weight).float().sum()
    assert narrowing.narrowed(loss) == torch.bfloat16


def test_a_sparse_tensor_of_narrowed_numbers_counts(x: Tensor) -> None:
    with Narrowing() as narrowing:
        sparse = x.detach().float().to_sparse()
        loss = (sparse.to_dense().double() * x).sum()
    assert narrowing.narrowed(loss) == torch.float32


def test_complex_numbers_count(x: Tensor) -> None:
    with Narrowing() as narrowing:
        loss = torch.fft.fft(x).to(torch.complex64).abs().double().sum()
    assert narrowing.narrowed(loss) in (torch.complex64, torch.float32)


class Squeezing(Function):
    """The square, which keeps its input for backward in half the digits."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.float())
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0].double()


class Keeping(Squeezing):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = {"x": x.float()}
        return x * x


@pytest.mark.parametrize("function", [Squeezing, Keeping])
def test_what_a_function_keeps_narrow_for_its_backward_counts(x: Tensor, function) -> None:
    with Narrowing() as narrowing:
        loss = function.apply(x).sum()
        other = (x * x).sum()
    assert narrowing.narrowed(loss) == torch.float32
    assert narrowing.narrowed(other) is None


def test_what_hooks_keep_narrow_for_backward_counts(x: Tensor) -> None:
    with Narrowing() as narrowing, saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.double()):
        loss = (x * x).sum()
    assert narrowing.narrowed(loss) == torch.bfloat16


def test_under_checkpointing_all_that_is_narrowed_counts(x: Tensor) -> None:
    def part(x: Tensor) -> Tensor:
        x.detach().float()
        return x * x

    with Narrowing() as narrowing:
        loss = checkpoint(part, x, use_reentrant=False).sum()
    assert narrowing.narrowed(loss) == torch.float32
    with Narrowing() as narrowing:
        loss = checkpoint(torch.square, x, use_reentrant=False).sum()
    assert narrowing.narrowed(loss) is None


def test_memory_used_again_does_not_count(x: Tensor) -> None:
    with Narrowing() as narrowing:
        for _ in range(50):
            x.detach().float()
            gc.collect(0)
            x.detach().float().double()
            batch = torch.tensor([[0.5] * 4] * 3, dtype=torch.float64)
            loss = (x * x * batch).sum()
            assert narrowing.narrowed(loss) is None


def test_entered_again_it_still_knows_what_it_knew(x: Tensor) -> None:
    buffer = torch.zeros(3, 4, dtype=torch.float64)
    narrowing = Narrowing()
    with narrowing:
        buffer += x.detach().float()
        loss = x.sum()
    assert narrowing.narrowed(loss) is None
    with narrowing:
        loss = (buffer * x).sum()
    assert narrowing.narrowed(loss) == torch.float32


def test_data_set_by_hand_counts(x: Tensor) -> None:
    buffer = torch.zeros(3, 4, dtype=torch.float64)
    with Narrowing() as narrowing:
        buffer.data = x.detach().float().double()
        loss = (buffer * x).sum()
    assert narrowing.narrowed(loss) == torch.float32
