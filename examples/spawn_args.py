"""Usage 2 of spawn, with the function's arguments. python examples/spawn_args.py"""

from linear import train

import harness

if __name__ == "__main__":
    harness.spawn(train, args=(True,))
