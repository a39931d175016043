"""A training's state, put back."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD

from harness.training.state import TrainingState


def test_an_expanded_buffer_is_put_back_wherever_it_is_shared():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[0].register_buffer("scale", torch.ones(1).expand(3))
    model[1].register_buffer("scale", model[0].scale)
    state = TrainingState.of(model, SGD(model.parameters(), lr=0.1))
    model[0].scale = model[1].scale = torch.zeros(1).expand(3)
    state.restore(model)
    assert torch.equal(model[0].scale, torch.ones(3)) and model[1].scale is model[0].scale
    model[0].scale.add_(1)
    state.restore(model)
    assert torch.equal(model[0].scale, torch.ones(3))
