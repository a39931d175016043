"""Usage 3 of spawn, with a number of ranks. python examples/spawn_nprocs.py"""

from linear import train

import harness

if __name__ == "__main__":
    harness.spawn(train, args=(True,), nprocs=2)
