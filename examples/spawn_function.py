"""Usage 1 of spawn, the function alone: a rank for every accelerator, or else core. python examples/spawn_function.py"""

from linear import train

import harness

if __name__ == "__main__":
    context = harness.spawn(train)
    for rank, losses in enumerate(context.return_values()):
        print(f"losses of rank {rank}:", *losses)
