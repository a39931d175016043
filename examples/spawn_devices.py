"""Usage 4 of spawn, with a list of devices, numbered as in CUDA_VISIBLE_DEVICES. python examples/spawn_devices.py 4,5"""

import sys

from linear import train

import harness

if __name__ == "__main__":
    gpus = sys.argv[1] if len(sys.argv) > 1 else "0"
    harness.spawn(train, args=(True,), nprocs=len(gpus.split(",")), gpus=gpus)
