"""What training takes from torch that torch does not promise: one test each, which fails when it changes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.variable import Variable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from harness.errors import ConfigError, HarnessError
from harness.rank.group import joining, leave_group
from harness.run.plan import Ddp
from harness.training.parallel.batchnorm import SyncBatchNorm, synchronised
from harness.training.parallel.ddp import DataParallel, Reduction
from harness.training.parallel.ddp_timing import reducing, reduction, watch
from harness.training.parallel.layout import collected
from harness.training.state import TrainingState, named_tensors
from tests import toys
from tests.test_trainer import trainer


@pytest.fixture
def group_of_one() -> Iterator[None]:
    with joining(one_machine=True):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    leave_group()


class Counting:
    """A hook of DDP's that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def made(self) -> tuple[None, Any]:
        def hook(state, bucket):
            self.calls += 1
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        return None, hook


def test_a_reducer_in_a_cycle_reduces_until_its_hooks_are_removed(group_of_one):
    counting = Counting()
    model = DataParallel(nn.Linear(2, 1), reduction=Reduction(wrap_one_rank=True, comm_hook=counting.made))
    held = DistributedDataParallel(model.module)
    held.register_comm_hook(*counting.made())
    assert model.torch_ddp is not None
    model.torch_ddp(torch.ones(1, 2)).sum().backward()
    # The other one's hooks fire in a backward that its own forward did not begin.
    assert counting.calls == 1 and held.reducer is not None
    held(torch.ones(1, 2))
    model.torch_ddp(torch.ones(1, 2)).sum().backward()
    assert counting.calls == 3, "hooks no longer outlive: harness.training.parallel.ddp need not remove them"
    held.reducer._remove_autograd_hooks()
    model.torch_ddp(torch.ones(1, 2)).sum().backward()
    assert counting.calls == 4


def test_a_reducer_that_was_replaced_reduces_no_more(group_of_one):
    counting, module = Counting(), nn.Linear(2, 1)
    module.bias.requires_grad_(False)
    model = DataParallel(module, reduction=Reduction(wrap_one_rank=True, comm_hook=counting.made))
    held = model.torch_ddp
    assert held is not None
    held(torch.ones(1, 2))
    module.bias.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    assert counting.calls == 1 and model.torch_ddp is not held


def test_a_hook_that_is_registered_outlives_the_reducer(group_of_one):
    counting, model = Counting(), DataParallel(nn.Linear(2, 1), reduction=Reduction(wrap_one_rank=True))
    model.register_comm_hook(*counting.made())
    model(torch.ones(1, 2)).sum().backward()
    model.module.bias.requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    assert counting.calls == 2


def test_sparse_tables_and_uneven_batches_are_refused(group_of_one):
    model = DataParallel(nn.Embedding(2, 2, sparse=True), reduction=Reduction(wrap_one_rank=True))
    with pytest.raises(HarnessError, match=r"join\(\) does not know of sparse embeddings"):
        model.join()


def test_ddp_says_in_these_words_that_it_waited_for_a_gradient(group_of_one):
    class Idle(toys.Points):
        def model(self):
            return nn.ModuleDict({"used": super().model(), "idle": nn.Linear(1, 1)})

        def loss(self, model, batch):
            return super().loss(model["used"], batch)

    rank = trainer(Idle(), ddp=Ddp(wrap_one_rank=True))
    first, second, *_ = rank.steps()
    rank.step(*first)
    with pytest.raises(ConfigError, match=r"Idle has a parameter that took no part .* ddp.find_unused_parameters=true"):
        rank.step(*second)


def test_ddp_measures_its_steps_and_orders_its_buckets_after_the_first_backward(group_of_one):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), bucket_cap_mb_list=[1e-5, 1e-4])
    watch(model)
    sizes = []
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        sizes.append(reduction(model).get("bucket_bytes"))
    assert sizes == [None, [96, 64], [16, 144]], "by the model's order, then by that of the first backward"
    times = reducing(model)
    assert times is not None and times.compute_s > 0


def test_a_callback_that_backward_queues_runs_at_its_end():
    leaf = nn.Parameter(torch.ones(1))
    seen: list[Tensor | None] = []
    output = leaf * 2
    output.register_hook(lambda _: Variable._execution_engine.queue_callback(lambda: seen.append(leaf.grad)))
    output.backward()
    assert seen == [torch.tensor([2.0])]


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_a_layer_of_another_class_is_the_same_layer(kind):
    layer = kind(3)
    model, before = nn.Sequential(layer), copy.copy(vars(layer))
    with synchronised(model, ["0"]):
        assert type(layer) is SyncBatchNorm and vars(SyncBatchNorm(3)).keys() <= vars(layer).keys()
    assert type(layer) is kind and {name: vars(layer)[name] for name in before} == before


def test_batch_norm_asks_the_layer_whether_an_input_suits_it():
    assert _BatchNorm.forward is nn.BatchNorm1d.forward
    with pytest.raises(ValueError, match=r"expected an input of shape \(N, 3, ...\)"):
        SyncBatchNorm(3)(torch.ones(2, 4))


def test_modules_keep_tensors_and_children_in_dictionaries():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    nn.utils.parametrizations.weight_norm(model[2])
    public = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    found = [parameter for parameter in collected(model, []) if parameter is not None]
    assert sorted(map(id, found)) == sorted(map(id, public))
    state = TrainingState.of(model, torch.optim.SGD(model.parameters(), 0.1))
    model[1].running_mean.add_(1)
    state.restore(model)
    assert all(torch.equal(tensor, state.model[name]) for name, tensor in named_tensors(model))


def test_an_optimizer_imports_dynamo_when_it_is_first_made():
    assert "import torch._dynamo" in inspect.getsource(torch._compile._disable_dynamo)
    assert "_disable_dynamo" in inspect.getsource(torch.optim.Optimizer.add_param_group)


def test_the_compiler_has_a_number_of_threads():
    assert isinstance(torch._inductor.config.compile_threads, int)
