"""Ranks on the CPU, asked for by name: also where GPUs are present. python examples/cpu_training.py"""

from linear import train

import harness

if __name__ == "__main__":
    harness.spawn(train, args=(True,), nprocs=2, backend="gloo")
