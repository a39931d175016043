"""BatchNorm with fixed statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.training.parallel.batchnorm import SyncBatchNorm, _BatchStatistics, _normalize, with_fixed_statistics


class OfItsOwn(nn.BatchNorm1d):
    """A layer that always takes the batch's statistics, and does something of its own."""

    def forward(self, input):
        return 2 * F.batch_norm(input, None, None, self.weight, self.bias, training=True, momentum=0.0, eps=self.eps)


class Trained(nn.Module):
    """A module whose forward has its parts train."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, input):
        return self.train().layer(input)


LAYERS = {
    "kept": (nn.BatchNorm1d(3, eps=0.0), 1.0),
    "none": (nn.BatchNorm1d(3, eps=0.0, track_running_stats=False), 1.0),
    "synchronised": (SyncBatchNorm(3, eps=0.0), 1.0),
    "own": (OfItsOwn(3, eps=0.0), 2.0),
}


@pytest.mark.parametrize("name", LAYERS)
def test_statistics_stay_fixed_where_forward_calls_train(name):
    layer, factor = LAYERS[name]
    model, before, batch = Trained(layer), F.batch_norm, torch.tensor([[1.0, 2.0, 3.0], [3.0, 5.0, 7.0]])
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with with_fixed_statistics(model):
        output = model(batch)
    assert torch.equal(output, factor * batch)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert F.batch_norm is before and layer.training and "train" not in vars(layer)


def test_layers_that_did_not_train_still_do_not():
    layer = nn.BatchNorm1d(3).eval()
    with pytest.raises(KeyError), with_fixed_statistics(layer):
        layer.train()
        raise KeyError
    assert not layer.training and layer.train().training and F.batch_norm.__module__ == F.__name__


def test_no_statistics_suit_activations_narrower_than_weights():
    layer = nn.BatchNorm1d(3, eps=0.0, track_running_stats=False)
    batch = torch.ones(2, 3, dtype=torch.bfloat16)
    with with_fixed_statistics(layer):
        assert torch.equal(layer(batch), batch)


def test_statistics_of_all_ranks_are_taken_as_ever():
    layer, batch = SyncBatchNorm(3), torch.randn(8, 3)
    var, mean = torch.var_mean(batch, 0, correction=0)
    with with_fixed_statistics(layer):
        output = _normalize(batch, None, None, _BatchStatistics(mean, var, torch.tensor(8.0)), layer)
    torch.testing.assert_close(output, F.batch_norm(batch, None, None, training=True))
