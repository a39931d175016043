"""DataParallel and SyncBatchNorm on 2 and 3 ranks against one process with the whole batch.

A case is a function that trains through a `Run`. Ranks started once per world size go through all cases, each with
its part of the batches; the test process repeats a case with the bare module and the whole batch, and compares.
Arithmetic is float64 unless a case says otherwise, so that the order of additions does not hide a mistake.
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.errors import ConfigError, HarnessError, Mismatch
from harness.training.parallel.batchnorm import SyncBatchNorm, convert_sync_batchnorm
from harness.training.parallel.ddp import DataParallel
from tests.processes import PATIENCE_S

BATCH = 6  # divides by 2 and by 3
Result = dict[str, Any]


@dataclass
class Run:
    """What a case sees: a rank among others, or (world_size 1) the one process that it is compared with."""

    rank: int = 0
    world_size: int = 1

    @property
    def is_reference(self) -> bool:
        return self.world_size == 1

    def wrap(self, module: nn.Module, **options: Any) -> nn.Module:
        return module if self.is_reference else DataParallel(module, **options)

    def mine(self, batch: Tensor) -> Tensor:
        """Return this rank's part; parts are contiguous and join to the batch in rank order."""
        return batch.tensor_split(self.world_size)[self.rank]

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext() if self.is_reference else model.no_sync()


CASES: dict[str, Callable[[Run], Result]] = {}
BATCH_NORM_CASES: dict[str, Callable[[Run], Result]] = {}


def case(function: Callable[[Run], Result]) -> Callable[[Run], Result]:
    """Register a case that returns gradients and states, equal on all ranks."""
    CASES[function.__name__] = function
    return function


def batch_norm_case(function: Callable[[Run], Result]) -> Callable[[Run], Result]:
    """Register a case that returns this rank's part of outputs and gradients."""
    BATCH_NORM_CASES[function.__name__] = function
    return function


def gradients(model: nn.Module, label: str = "") -> Result:
    grads = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {f"{label}{name}": None if grad is None else grad.detach().clone() for name, grad in grads.items()}


def state(model: nn.Module) -> Result:
    return {f"state {name}": value.clone() for name, value in model.state_dict().items()}


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Branches(nn.Module):
    """Two layers and a table; each item says which of them it uses."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 3).double()
        self.b = nn.Linear(4, 3).double()
        self.table = nn.Embedding(10, 3, sparse=sparse).double()

    def forward(self, x: Tensor, branches: Tensor) -> Tensor:
        """Return the mean loss over the items; branches: 0 for a, 1 for b, 2 for the table."""
        outputs = []
        for item, branch in zip(x, branches.tolist(), strict=True):
            row = (item[0].abs() * 4).long().clamp(max=9)
            outputs.append(self.table(row) if branch == 2 else (self.b if branch else self.a)(item))
        return torch.stack(outputs).square().mean()


# --- cases: dense gradients -----------------------------------------------------------------------------------------


@case
def freezes_without_search_for_unused(run: Run) -> Result:
    """Comes first: a process's first DDP is never freed without garbage collection, the later ones are."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 4)).double().eval()
    model = run.wrap(module)
    model(run.mine(inputs(BATCH, 4)))  # DDP now awaits a backward
    module[2].requires_grad_(False)
    result = {}
    for step in range(2):
        model(run.mine(inputs(BATCH, 4, seed=step))).square().mean().backward()
        result |= gradients(model, f"step {step} ")
    return result


@case
def trains_a_perceptron(run: Run) -> Result:
    torch.manual_seed(run.rank)  # the others' parameters give way to rank 0's
    model = run.wrap(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        model(run.mine(inputs(BATCH, 4, seed=step))).square().mean().backward()
        optimizer.step()
    return gradients(model) | state(model)


@case
def honours_bucket_sizes(run: Run) -> Result:
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256, bias=False).double() for _ in range(5)]  # 0.5 MiB each
    model = run.wrap(nn.Sequential(*layers), comm_buffer_size=1, last_comm_buffer_size=0.5)
    for step in range(3):  # DDP orders its buckets after the first backward, and tells of it at the third
        model(run.mine(inputs(BATCH, 256, seed=step))).square().mean().backward()
    if run.is_reference:
        return gradients(model)
    sizes = model.torch_ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return gradients(model) | {"info buckets": [int(size) / 2**20 for size in sizes.split(",")]}


@case
def leaves_unused_parameters_without_gradient(run: Run) -> Result:
    model = run.wrap(Branches(sparse=False), find_unused_parameters=True)
    result = {}
    for step in range(2):
        model.zero_grad()
        model(run.mine(inputs(BATCH, 4, seed=step)), torch.zeros(len(run.mine(torch.empty(BATCH))))).backward()
        result |= gradients(model, f"step {step} ")
    return result


@case
def follows_branches_that_differ_by_step_and_rank(run: Run) -> Result:
    return _train_branches(run, Branches(sparse=False))


@case
def shares_parameters_between_layers(run: Run) -> Result:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
    module.append(module[0])
    module[2].weight = module[0].weight
    model = run.wrap(module)
    model(run.mine(inputs(BATCH, 4))).square().mean().backward()
    return gradients(model)


@case
def adds_up_two_forwards_in_one_backward(run: Run) -> Result:
    torch.manual_seed(0)
    model = run.wrap(nn.Linear(4, 4).double())
    losses = [model(run.mine(inputs(BATCH, 4, seed=seed))).square().mean() for seed in range(2)]
    sum(losses).backward()
    return gradients(model)


@case
def accumulates_without_sync(run: Run) -> Result:
    model = run.wrap(Branches(), find_unused_parameters=True)
    result = {}
    for step in range(2):
        model.zero_grad()
        with run.no_sync(model):
            _backward(run, model, [0, 1, 2, 2, 1, 0], seed=step)
            _backward(run, model, [2, 0, 0, 0, 0, 0], seed=step + 10)
        _backward(run, model, [0, 0, 0, 0, 0, 2], seed=step + 20)
        result |= gradients(model, f"step {step} ")
    return result


# --- cases: parameters that change after wrapping -------------------------------------------------------------------


@case
def follows_freezing_and_unfreezing(run: Run) -> Result:
    module = Branches()
    module.b.requires_grad_(False)
    model = run.wrap(module, find_unused_parameters=True)
    result = {}
    for step, (frozen, thawed) in enumerate([(module.a, module.b), (module.table, module.a), (module.b, module.table)]):
        model.zero_grad()
        _backward(run, model, [0, 1, 2, 0, 1, 2], seed=step)
        result |= gradients(model, f"step {step} ")
        frozen.requires_grad_(False)
        thawed.requires_grad_(True)
    _backward(run, model, [0, 1, 2, 0, 1, 2], seed=9)
    return result | gradients(model, "last ")


@case
def starts_with_everything_frozen(run: Run) -> Result:
    torch.manual_seed(run.rank)
    model = run.wrap(nn.Linear(4, 4).double().requires_grad_(False))
    result = {"frozen": model(inputs(2, 4)), **state(model)}
    model.requires_grad_(True)
    model(run.mine(inputs(BATCH, 4))).square().mean().backward()
    return result | gradients(model)


@case
def follows_a_change_of_dtype(run: Run) -> Result:
    torch.manual_seed(0)
    model = run.wrap(nn.Linear(4, 4))
    model.double()
    model(run.mine(inputs(BATCH, 4))).square().mean().backward()
    return gradients(model)


@case
def trains_a_copy(run: Run) -> Result:
    model = run.wrap(Branches(), find_unused_parameters=True)
    twin = copy.deepcopy(model)
    _backward(run, model, [0, 1, 2, 0, 1, 2])
    _backward(run, twin, [1, 1, 1, 2, 0, 0])
    return gradients(model) | gradients(twin, "twin ")


@case
def joins_a_group_that_starts_after_wrapping(run: Run) -> Result:
    model = EARLY.get("model", _early_module())
    model(run.mine(inputs(BATCH, 4))).square().mean().backward()
    return gradients(model)


def _early_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 4).double()


EARLY: dict[str, nn.Module] = {}


# --- cases: sparse tables -------------------------------------------------------------------------------------------


def _backward(run: Run, model: nn.Module, branches: list[int], seed: int = 0) -> None:
    model(run.mine(inputs(BATCH, 4, seed=seed)), run.mine(torch.tensor(branches))).backward()


def _train_branches(run: Run, module: nn.Module) -> Result:
    model = run.wrap(module, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result = {}
    steps = [[0, 0, 1, 1, 2, 2], [2, 2, 2, 0, 0, 0], [0, 0, 0, 0, 0, 0], [2, 2, 2, 2, 2, 2], [1, 1, 1, 1, 2, 0]]
    for step, branches in enumerate(steps):
        optimizer.zero_grad()
        _backward(run, model, branches, seed=step)
        optimizer.step()
        result |= gradients(model, f"step {step} ")
    return result | state(model)


@case
def follows_branches_with_a_sparse_table(run: Run) -> Result:
    return _train_branches(run, Branches())


@case
def trains_a_sparse_table_alone(run: Run) -> Result:
    torch.manual_seed(run.rank)
    model = run.wrap(nn.Embedding(50, 3, sparse=True).double())
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    for rows in ([0, 0, 1, 1, 7, 49], [3, 3, 3, 3, 3, 3]):  # a row of one rank's only, the last row, equal rows
        optimizer.zero_grad()
        model(run.mine(torch.tensor(rows))).square().mean().backward()
        optimizer.step()
    return gradients(model) | state(model)


class Bags(nn.Module):
    """Two tables, one of them a bag, and an output that is neither a tensor nor used as a whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 3, sparse=True).double()
        self.bag = nn.EmbeddingBag(20, 3, sparse=True, mode="mean").double()
        self.dense = nn.Linear(3, 2).double()

    def forward(self, rows: Tensor) -> dict[str, list[Tensor]]:
        words = self.words(rows)
        words += 1.0  # in place, on what the embedding returned
        bag = self.bag(rows)
        return {"losses": [self.dense(words).square().sum(), bag.square().sum()], "unused": [words.sum()]}


@case
def reduces_several_tables_and_outputs(run: Run) -> Result:
    model = run.wrap(Bags(), find_unused_parameters=True)
    rows = run.mine(torch.arange(18).remainder(7).view(6, 3))
    sum(model(rows)["losses"]).div(len(rows)).backward()
    return gradients(model)


@case
def reduces_after_each_of_two_backwards(run: Run) -> Result:
    model = run.wrap(Bags())
    rows = run.mine(torch.arange(18).remainder(7).view(6, 3))
    for loss in model(rows)["losses"]:
        (loss / len(rows)).backward()
    return gradients(model)


@case
def takes_empty_lookups(run: Run) -> Result:
    torch.manual_seed(0)
    model = run.wrap(nn.Embedding(5, 3, sparse=True).double())
    model(run.mine(torch.tensor([4, 2]))).square().sum().mul(run.world_size).backward()  # none on the third rank
    result = gradients(model, "some ")
    model.zero_grad()
    model(torch.tensor([], dtype=torch.int64)).sum().backward()
    return result | gradients(model, "none ")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(8, 3, sparse=True).double()
        self.head = nn.Linear(3, 8, bias=False).double()
        self.head.weight = self.table.weight

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.table(rows)).square().mean()


@case
def shares_a_sparse_table_with_a_dense_layer(run: Run) -> Result:
    model = run.wrap(Tied())
    model(run.mine(torch.tensor([0, 1, 2, 7, 7, 7]))).backward()
    return gradients(model)


# --- cases: refusals and states -------------------------------------------------------------------------------------


@case
def refuses_replaced_parameters(run: Run) -> Result:
    module = Branches()
    model = run.wrap(module)
    module.b = nn.Linear(4, 3).double()
    if run.is_reference:
        return {}
    with pytest.raises(HarnessError) as error:
        _backward(run, model, [0, 1, 2, 0, 1, 2])
    return {"info error": str(error.value)}


@case
def refuses_an_output_without_tensors(run: Run) -> Result:
    class Opaque(nn.Embedding):
        def forward(self, rows: Tensor) -> Any:
            return object()

    model = run.wrap(Opaque(4, 2, sparse=True))
    if run.is_reference:
        return {}
    with pytest.raises(HarnessError) as error:
        model(torch.tensor([1]))
    return {"info error": str(error.value)}


@case
def loads_what_another_number_of_ranks_saved(run: Run) -> Result:
    saved = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()
    nn.init.constant_(saved[0].weight, 3.0)
    torch.manual_seed(run.rank)
    model = run.wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double())
    nested = nn.Sequential(run.wrap(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).double()))
    nn.init.zeros_(saved[0].bias)
    model.load_state_dict(saved.state_dict())
    nested.load_state_dict({f"0.{name}": value for name, value in saved.state_dict().items()})
    return state(model) | {f"nested {name}": value for name, value in state(nested).items()}


@case
def converts_a_model_to_sync_batch_norm(run: Run) -> Result:
    torch.manual_seed(0)
    module = _small_convolution()
    model = run.wrap(module if run.is_reference else convert_sync_batchnorm(module))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(run.mine(inputs(BATCH, 2, 4, 4, seed=step))).square().mean().backward()
        optimizer.step()
    return gradients(model) | state(model)


# --- cases: SyncBatchNorm alone -------------------------------------------------------------------------------------


def _batch_norm(run: Run, layer: nn.Module, batch: Tensor, cut: Callable[[Tensor], Tensor], steps: int = 2) -> Result:
    """Return this rank's part of the outputs and gradients after some steps, and the running statistics."""
    layer = layer.double()
    if not run.is_reference:
        layer = convert_sync_batchnorm(layer)
    for step in range(steps):
        layer.zero_grad()
        x = cut(batch * (step + 1)).detach().requires_grad_()
        output = layer(x)
        output.backward(cut(inputs(*batch.shape, seed=step + 7)))
    assert x.grad is not None
    sums = {f"sum {name}": p.grad for name, p in layer.named_parameters()}
    return {"part output": output.detach(), "part input": x.grad, **sums, **state(layer)}


def _scaled(layer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    nn.init.uniform_(layer.weight, 0.5, 2.0)
    nn.init.uniform_(layer.bias)
    return layer


@batch_norm_case
def one_dimension(run: Run) -> Result:
    return _batch_norm(run, _scaled(nn.BatchNorm1d(4)), inputs(BATCH, 4), run.mine)


@batch_norm_case
def one_dimension_with_length(run: Run) -> Result:
    return _batch_norm(run, _scaled(nn.BatchNorm1d(4)), inputs(BATCH, 4, 5), run.mine)


@batch_norm_case
def two_dimensions_far_from_zero(run: Run) -> Result:
    return _batch_norm(run, _scaled(nn.BatchNorm2d(4)), inputs(BATCH, 4, 3, 2) + 30, run.mine)


@batch_norm_case
def three_dimensions(run: Run) -> Result:
    return _batch_norm(run, _scaled(nn.BatchNorm3d(2)), inputs(BATCH, 2, 3, 2, 2), run.mine)


@batch_norm_case
def channels_last(run: Run) -> Result:
    batch = inputs(BATCH, 4, 3, 2).contiguous(memory_format=torch.channels_last)
    result = _batch_norm(run, _scaled(nn.BatchNorm2d(4)), batch, run.mine)
    assert result["part output"].is_contiguous(memory_format=torch.channels_last)
    return result


@batch_norm_case
def unequal_batches(run: Run) -> Result:
    return _batch_norm(run, _scaled(nn.BatchNorm1d(4)), inputs(7, 4, 3), run.mine)


@batch_norm_case
def no_samples_on_the_last_rank(run: Run) -> Result:
    return _batch_norm(run, _scaled(nn.BatchNorm1d(4)), inputs(BATCH, 4, 3), _cut_before_the_last(run))


@batch_norm_case
def one_sample_on_two_ranks(run: Run) -> Result:
    return _batch_norm(run, _scaled(nn.BatchNorm1d(4)), inputs(2, 4), run.mine)  # and on the second; the third has none


@batch_norm_case
def no_samples_at_all(run: Run) -> Result:
    return _batch_norm(run, _scaled(nn.BatchNorm1d(4)), inputs(0, 4, 3), run.mine)


def _cut_before_the_last(run: Run) -> Callable[[Tensor], Tensor]:
    parts = max(1, run.world_size - 1)
    return lambda batch: (*batch.tensor_split(parts), batch[:0])[run.rank]


@batch_norm_case
def cumulative_average(run: Run) -> Result:
    return _batch_norm(run, nn.BatchNorm1d(4, momentum=None), inputs(BATCH, 4), run.mine, steps=3)


@batch_norm_case
def without_affine(run: Run) -> Result:
    return _batch_norm(run, nn.BatchNorm1d(4, affine=False), inputs(BATCH, 4), run.mine)


@batch_norm_case
def without_bias(run: Run) -> Result:
    return _batch_norm(run, nn.BatchNorm1d(4, bias=False), inputs(BATCH, 4), run.mine)


@batch_norm_case
def without_running_statistics(run: Run) -> Result:
    return _batch_norm(run, nn.BatchNorm1d(4, track_running_stats=False), inputs(BATCH, 4), run.mine)


@batch_norm_case
def evaluation_on_one_rank_alone(run: Run) -> Result:
    if run.rank > 0:
        return {"part output": torch.empty(0, 4, dtype=torch.float64)}
    layer = nn.BatchNorm1d(4).double().eval()
    return {"part output": (layer if run.is_reference else convert_sync_batchnorm(layer))(inputs(BATCH, 4))}


def _single_value(run: Run) -> Result:
    layer = convert_sync_batchnorm(nn.BatchNorm1d(4).double())
    with pytest.raises(ValueError, match="Expected more than 1 value") as error:
        layer(run.mine(inputs(1, 4)))
    return {"info error": str(error.value)}


def _float32_far_from_zero(run: Run) -> Result:
    layer = convert_sync_batchnorm(nn.BatchNorm1d(4))
    return {"part output": layer(run.mine(inputs(BATCH, 4, 50) + 1000).float()).detach(), **state(layer)}


def _bfloat16_autocast(run: Run) -> Result:
    layer = convert_sync_batchnorm(_scaled(nn.BatchNorm1d(4)))
    x = run.mine(inputs(BATCH, 4, 50)).bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
    output.backward(run.mine(inputs(BATCH, 4, 50, seed=1)).bfloat16())
    return {"part output": output.detach(), "part input": x.grad, "sum weight": layer.weight.grad, **state(layer)}


def _local_gradients(run: Run) -> Result:
    model = DataParallel(Branches(), find_unused_parameters=True)
    with model.no_sync():
        return _gradients_of_part(model, run)


def _gradients_of_part(model: nn.Module, run: Run) -> Result:
    _backward(run, model, [0, 1, 2, 0, 1, 2])
    return {name: grad for name, grad in gradients(model).items() if grad is not None}


def _group_of_two(run: Run) -> Result:
    group = dist.new_group([0, 1])
    part = Run(run.rank, 2) if run.rank < 2 else Run()
    torch.manual_seed(run.rank % 2)
    model = copy.deepcopy(DataParallel(convert_sync_batchnorm(_small_convolution(), group), group=group))
    assert model.group is group
    model(part.mine(inputs(BATCH, 2, 4, 4))).square().mean().backward()
    return gradients(model)


def _uneven_batches(run: Run) -> Result:
    """Rank 0 has a second batch, which the others answer."""
    torch.manual_seed(run.rank)
    model = DataParallel(nn.Linear(4, 2).double())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join(divide_by_initial_world_size=False):
        for number in range(2 if run.rank == 0 else 1):
            optimizer.zero_grad()
            model(inputs(3, 4, seed=10 * number + run.rank)).square().mean().backward()
            optimizer.step()
    return dict(model.state_dict())


def _small_convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).double()


# What the last rank has of its own -> what is said of it.
ODD_MODELS: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "frozen": (
        lambda m: m.weight.requires_grad_(False),
        "'weight' is trained (float32 [2, 4]) on rank 0 and frozen (float32 [",
    ),
    "all frozen": (lambda m: m.requires_grad_(False), "'weight' is trained (float32 [2, 4]) on rank 0 and frozen (float32 ["),
    "shape": (lambda m: setattr(m, "weight", nn.Parameter(torch.ones(2, 3))), "and trained (float32 [2, 3]) on rank "),
    "dtype": (lambda m: m.double(), "'weight' is trained (float32 [2, 4]) on rank 0 and trained (float64 [2, 4]) on rank "),
    "a parameter more": (
        lambda m: m.register_parameter("more", nn.Parameter(torch.ones(1))),
        "has 'more', and rank 0 lacks it",
    ),
    "a buffer more": (lambda m: m.register_buffer("more", torch.ones(1)), "has 'more', and rank 0 lacks it"),
    "a parameter fewer": (lambda m: m.register_parameter("bias", None), "only rank 0 has 'bias', and rank "),
    "another name": (lambda m: m.register_parameter("other", m._parameters.pop("bias")), "has 'other' where rank 0 has 'bias'"),
}


def _odd_models(run: Run) -> Result:
    found = {}
    for name, (change, _) in ODD_MODELS.items():
        module = nn.Linear(4, 2)
        if run.rank == run.world_size - 1:
            change(module)
        with pytest.raises(Mismatch) as refused:
            DataParallel(module)
        found[name] = (str(refused.value), refused.value.is_consequence)
    return found


OTHER = [
    _odd_models,
    _single_value,
    _float32_far_from_zero,
    _bfloat16_autocast,
    _local_gradients,
    _group_of_two,
    _uneven_batches,
]
OTHER_CASES = {function.__name__: function for function in OTHER}


# --- the ranks ------------------------------------------------------------------------------------------------------


def _rank_main(rank: int, world_size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    gc.disable()  # it would hide reducers that outlive their use
    EARLY["model"] = DataParallel(_early_module())
    join = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S), **join)
    results = {name: _outcome(f, Run(rank, world_size)) for name, f in (CASES | BATCH_NORM_CASES | OTHER_CASES).items()}
    torch.save(results, folder / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _outcome(function: Callable[[Run], Result], run: Run) -> Result | str:
    try:
        return function(run)
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()


@dataclass
class Ranks:
    """Every rank's exit code and its results of every case."""

    exit_codes: list[int]
    results: list[dict[str, Result | str]]

    def of(self, name: str) -> list[Result]:
        results = [rank[name] for rank in self.results]
        failures = [f"rank {rank}: {result}" for rank, result in enumerate(results) if isinstance(result, str)]
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        return results  # type: ignore[return-value]


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    world_size, folder = request.param, tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[1])}
    commands = [[sys.executable, __file__, str(rank), str(world_size), str(folder)] for rank in range(world_size)]
    processes = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        codes = [process.wait(PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return Ranks(codes, [torch.load(folder / f"rank-{rank}.pt") for rank in range(world_size)])


# --- the comparisons ------------------------------------------------------------------------------------------------


def assert_close(actual: Tensor | None, expected: Tensor | None, name: str, tolerance: float = 1e-12) -> None:
    """Compare by norms, relative to the expected one's, or to 1e-3 if that is smaller; None and layout must agree."""
    if expected is None or actual is None:
        assert actual is expected, f"{name}: {actual} where one process has {expected}"
        return
    assert (actual.layout, actual.dtype, actual.shape) == (expected.layout, expected.dtype, expected.shape), name
    actual, expected = actual.to_dense().double(), expected.to_dense().double()
    error, size = (actual - expected).norm().item(), expected.norm().item()
    assert error <= tolerance * max(size, 1e-3), f"{name}: {error:.3g} off, norm {size:.3g}"


def equal_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    if one.is_sparse:
        return torch.equal(one.indices(), other.indices()) and torch.equal(one.values(), other.values())
    return torch.equal(one, other)


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_trains_what_one_process_trains(ranks: Ranks, name: str) -> None:
    expected = CASES[name](Run())
    for rank, result in enumerate(ranks.of(name)):
        actual = {key: value for key, value in result.items() if not key.startswith("info")}
        assert actual.keys() == expected.keys()
        for key, value in actual.items():
            assert_close(value, expected[key], f"rank {rank}, {key}")


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_in_bits(ranks: Ranks, name: str) -> None:
    first, *others = ranks.of(name)
    for rank, other in enumerate(others, start=1):
        assert [key for key in first if not equal_bits(first[key], other[key])] == [], f"rank {rank}"


@pytest.mark.ranks
@pytest.mark.parametrize("name", BATCH_NORM_CASES)
def test_batch_norm_equals_the_full_batch(ranks: Ranks, name: str) -> None:
    expected, results = BATCH_NORM_CASES[name](Run()), ranks.of(name)
    assert results[0].keys() == expected.keys()
    for key, value in expected.items():
        parts = [result[key] for result in results]
        if key.startswith("part"):
            assert_close(torch.cat(parts), value, key)
        elif key.startswith("sum"):
            assert_close(sum(parts), value, key)
        else:
            assert all(equal_bits(part, parts[0]) for part in parts), key
            assert_close(parts[0], value, key)


@pytest.mark.ranks
def test_ranks_end_cleanly(ranks: Ranks) -> None:
    assert ranks.exit_codes == [0] * len(ranks.results)


@pytest.mark.ranks
def test_gradients_stay_local_without_sync(ranks: Ranks) -> None:
    for rank, result in enumerate(ranks.of("_local_gradients")):
        expected = _gradients_of_part(Branches(), Run(rank, len(ranks.results)))
        assert all(equal_bits(result[name].to_dense(), expected[name].to_dense()) for name in expected)


@pytest.mark.ranks
def test_sparse_gradients_hold_the_touched_rows_once(ranks: Ranks) -> None:
    grad = ranks.of("trains_a_sparse_table_alone")[0]["weight"]
    assert grad.is_coalesced()
    assert grad.indices().tolist() == [[3]]


@pytest.mark.ranks
def test_buckets_have_the_sizes_asked_for(ranks: Ranks) -> None:
    assert ranks.of("honours_bucket_sizes")[0]["info buckets"] == [0.5, 1.0, 1.0]


@pytest.mark.ranks
def test_refusals_name_the_parameter_and_the_type(ranks: Ranks) -> None:
    assert "b.bias, b.weight" in ranks.of("refuses_replaced_parameters")[0]["info error"]
    assert "returns object" in ranks.of("refuses_an_output_without_tensors")[0]["info error"]


@pytest.mark.ranks
@pytest.mark.parametrize("name", ODD_MODELS)
def test_ranks_with_different_models_are_told_what_differs(ranks: Ranks, name: str) -> None:
    results = [result[name] for result in ranks.of("_odd_models")]
    assert [is_consequence for _, is_consequence in results] == [True] * (len(results) - 1) + [False]
    for said, _ in results:
        assert said.startswith("The ranks do not have the same model: ") and ODD_MODELS[name][1] in said


@pytest.mark.ranks
def test_a_single_value_is_refused_on_all_ranks_as_torch_does(ranks: Ranks) -> None:
    for result in ranks.of("_single_value"):
        assert result["info error"].startswith("Expected more than 1 value per channel when training, got input size")


@pytest.mark.ranks
def test_a_group_of_two_trains_without_the_third(ranks: Ranks) -> None:
    torch.manual_seed(0)
    model = _small_convolution()
    model(inputs(BATCH, 2, 4, 4)).square().mean().backward()
    for result in ranks.of("_group_of_two"):  # the third rank has the whole batch to itself
        for name, expected in gradients(model).items():
            assert_close(result[name], expected, name)


@pytest.mark.ranks
def test_ranks_without_a_batch_answer_the_others(ranks: Ranks) -> None:
    results = ranks.of("_uneven_batches")
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seeds in (range(len(results)), [10]):
        optimizer.zero_grad()
        sum(model(inputs(3, 4, seed=seed)).square().mean() / len(seeds) for seed in seeds).backward()
        optimizer.step()
    for result in results:
        for name, expected in model.state_dict().items():
            assert_close(result[name], expected, name)


@pytest.mark.ranks
def test_batch_norm_is_stable_in_float32(ranks: Ranks) -> None:
    layer, results = nn.BatchNorm1d(4).double(), ranks.of("_float32_far_from_zero")
    expected = layer((inputs(BATCH, 4, 50) + 1000).float().double())
    # The mean, 1000, is rounded to 24 bits once: 3e-5 standard deviations.
    assert_close(torch.cat([r["part output"] for r in results]), expected.float().detach(), "output", 6e-5)
    assert_close(results[0]["state running_var"], layer.running_var.float(), "running_var", 1e-6)


@pytest.mark.ranks
def test_batch_norm_keeps_its_statistics_in_float32_under_autocast(ranks: Ranks) -> None:
    results, exact = ranks.of("_bfloat16_autocast"), _scaled(nn.BatchNorm1d(4)).double()
    x = inputs(BATCH, 4, 50).bfloat16().double().requires_grad_()
    exact(x).backward(inputs(BATCH, 4, 50, seed=1).bfloat16().double())
    bfloat16_unit, float32_unit = 2**-8, 1e-6
    output = exact.train()(x.detach())
    assert_close(torch.cat([r["part output"] for r in results]), output.detach().bfloat16(), "output", bfloat16_unit)
    assert_close(torch.cat([r["part input"] for r in results]), x.grad.bfloat16(), "input", bfloat16_unit)
    assert_close(sum(r["sum weight"] for r in results), exact.weight.grad.float(), "weight", float32_unit)


# --- one process ----------------------------------------------------------------------------------------------------


def test_one_process_has_a_plain_wrapper() -> None:
    model = DataParallel(nn.Linear(4, 2).double())
    with model.no_sync():
        model(inputs(BATCH, 4)).sum().backward()
    bare = copy.deepcopy(model.module)
    bare.zero_grad()
    bare(inputs(BATCH, 4)).sum().backward()
    assert torch.equal(model.module.weight.grad, bare.weight.grad)
    assert model.torch_ddp is None


def test_a_module_without_trainable_parameters_is_accepted() -> None:
    assert torch.equal(DataParallel(nn.ReLU())(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))


def test_attributes_of_the_module_can_be_read_through_the_wrapper() -> None:
    model = DataParallel(Branches())
    assert model.table is model.module.table
    with pytest.raises(AttributeError, match="'Branches' object has no attribute 'tabel'"):
        _ = model.tabel


def test_state_has_the_names_and_versions_of_the_bare_module() -> None:
    bare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for wrapped, expected in [
        (DataParallel(bare), bare),
        (nn.Sequential(DataParallel(bare)), nn.Sequential(bare)),
        (DataParallel(nn.Sequential(DataParallel(bare))), nn.Sequential(bare)),
    ]:
        assert list(wrapped.state_dict()) == list(expected.state_dict())
        assert wrapped.state_dict()._metadata.keys() >= {"", "0"}
        copy.deepcopy(expected).load_state_dict(wrapped.state_dict())
        copy.deepcopy(wrapped).load_state_dict(expected.state_dict())


def test_a_state_of_torchs_ddp_is_loaded() -> None:
    bare = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = {f"module.{name}": torch.full_like(tensor, 3) for name, tensor in bare.state_dict().items()}
    for wrapped, prefix in ((DataParallel(bare), ""), (nn.Sequential(DataParallel(copy.deepcopy(bare))), "0.")):
        wrapped.load_state_dict({f"{prefix}{name}": tensor for name, tensor in state.items()})
        assert all(bool((tensor == 3).all()) for tensor in wrapped.state_dict().values())
    within = DataParallel(nn.ModuleDict({"module": nn.Linear(2, 2)}))
    within.load_state_dict(within.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        DataParallel(nn.Linear(2, 2)).load_state_dict({"module.weight": torch.ones(2, 2)})


def test_loading_refuses_names_that_do_not_match() -> None:
    model = nn.Sequential(DataParallel(nn.Linear(2, 2)))
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.module\.bias"):
        model.load_state_dict({"0.weight": torch.ones(2, 2)})


def test_deprecated_calls_are_harmless_and_warn_once() -> None:
    model, loss = DataParallel(nn.Linear(2, 2)), torch.ones(1)
    for call in (lambda: model.scale_loss(loss), model.apply_collective_grads):
        with pytest.warns(FutureWarning, match="backward averages the gradients") as warned:
            call()
            call()
        assert len(warned) == 1
    assert model.scale_loss(loss) is loss


def test_replaced_parameters_are_refused_in_one_process_too() -> None:
    model = DataParallel(Branches())
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(HarnessError, match=r"a\.bias, a\.weight, b\.bias, b\.weight, table\.weight"):
        model(inputs(1, 4), torch.tensor([0]))


@pytest.mark.parametrize("option", ["comm_buffer_size", "last_comm_buffer_size"])
def test_a_bucket_needs_a_size(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}=0 "):
        DataParallel(nn.Linear(2, 2), **{option: 0})


def test_conversion_keeps_the_layer_and_its_state() -> None:
    layer = nn.BatchNorm2d(3, eps=0.1, momentum=None).double().eval()
    layer.weight.requires_grad_(False)
    module = nn.ModuleDict({"one": layer, "again": layer, "other": nn.InstanceNorm2d(3, affine=True)})
    before, names = copy.deepcopy(module.state_dict()), list(module.state_dict())
    converted = convert_sync_batchnorm(module)["one"]
    assert isinstance(converted, SyncBatchNorm)
    assert converted is module["again"]
    assert not isinstance(module["other"], SyncBatchNorm)
    assert (converted.eps, converted.momentum, converted.training) == (0.1, None, False)
    assert not converted.weight.requires_grad
    assert list(module.state_dict()) == names
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_conversion_keeps_a_group_that_a_layer_has() -> None:
    group = torch.distributed.ProcessGroup(0, 2)
    mine, torchs = SyncBatchNorm(3, group=group), nn.SyncBatchNorm(3, process_group=group)
    convert_sync_batchnorm(nn.Sequential(mine, torchs))
    assert (mine.group, torchs.group) == (group, group)
    assert convert_sync_batchnorm(nn.BatchNorm1d(3)).group is None


def test_a_lazy_batch_norm_is_refused() -> None:
    with pytest.raises(ConfigError, match="LazyBatchNorm1d does not know its size"):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_sync_batch_norm_without_a_group_is_batch_norm() -> None:
    x = inputs(BATCH, 4)
    assert torch.equal(SyncBatchNorm(4, dtype=torch.float64)(x), nn.BatchNorm1d(4).double()(x))


if __name__ == "__main__":
    _rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
