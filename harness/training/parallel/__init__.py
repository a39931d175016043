"""How do ranks become one? DDP, BatchNorm over ranks, sparse gradients."""
