"""Hydra's entry: ``python run.py backend=gloo nprocs=4``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """Be what Hydra composes for: its launcher starts ranks, and each trains what the plan in its folder says."""
    raise RuntimeError("No rank was started: hydra/launcher=harness does that, and another launcher cannot.")


def cli() -> None:
    """Run the command, with a warm server on the way while Hydra composes."""
    from harness.entrypoints.overrides import refuse_unusable
    from harness.launchers.registry import warm_up_for

    refuse_unusable(sys.argv[1:], Path(__file__).parent / "conf")
    if os.getcwd() not in sys.path:
        # As under python -m: a recipe of the user's own lies where the command is given.
        sys.path.insert(0, os.getcwd())
    try:
        warm_up_for(sys.argv[1:])
        main()
    except KeyboardInterrupt:
        # While Hydra composes; from the first rank on, the launcher ends what runs.
        sys.exit(130)


if __name__ == "__main__":
    cli()
