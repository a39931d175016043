"""A script that knows torch alone, and runs unchanged: python -m harness.launch --nproc_per_node=2 examples/plain_ddp.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    data = torch.Generator().manual_seed(100 + dist.get_rank())
    for _ in range(5):
        inputs, labels = (torch.randn(10, width, generator=data) for width in (10, 1))
        loss = nn.functional.mse_loss(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print("loss:", loss.item())
    dist.destroy_process_group()
