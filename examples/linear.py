"""A linear net trained by one function, with the same body however it is started.

python examples/linear.py                                                      one process
python -m harness.launch --nproc_per_node=2 --backend=gloo examples/linear.py  two ranks
torchrun --nproc-per-node=2 examples/linear.py                                 two ranks, started by torch

The other scripts here hand the same function to harness.spawn.
"""

import torch
from torch import nn

import harness


class LinearNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(10, 10)
        self.linear2 = nn.Linear(10, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.linear1(inputs))


def train(print_result: bool = False, backend: str = "auto") -> list[float]:
    """Train for five steps on data of this rank's own, and return its losses."""
    env = harness.init_parallel_env(backend)
    device = torch.device(env.device_type, env.device_id)
    # The same on every rank, although DataParallel would see to that as well.
    torch.manual_seed(0)
    model = harness.DataParallel(LinearNet().to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    data = torch.Generator().manual_seed(100 + harness.get_rank())
    losses = []
    for _ in range(5):
        inputs, labels = (torch.randn(10, width, generator=data).to(device) for width in (10, 1))
        loss = nn.functional.mse_loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if print_result:
            print("loss:", loss.item())
    return losses


if __name__ == "__main__":
    train(print_result=True)
