"""Hydra's entry: ``python run.py backend=gloo nprocs=4``."""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import hydra
    from omegaconf import DictConfig
except KeyboardInterrupt:
    # An import takes long enough to be interrupted, and its frames are nothing to read.
    sys.exit(130)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    """Be what Hydra composes for: its launcher starts ranks, and each trains what the plan in its folder says."""
    raise RuntimeError("No rank was started: hydra/launcher=harness does that, and another launcher cannot.")


def cli() -> None:
    """Run the command, with a warm server on the way while Hydra composes."""
    try:
        _prepare()
        main()
    except KeyboardInterrupt:
        # While Hydra composes; from the first rank on, the launcher ends what runs.
        sys.exit(130)


def _prepare() -> None:
    from harness.entrypoints.overrides import refuse_unusable
    from harness.errors import ConfigError
    from harness.launchers.registry import warm_up_for
    from harness.run.environment import current_folder

    refuse_unusable(sys.argv[1:], Path(__file__).parent / "conf")
    try:
        folder = current_folder()
    except ConfigError as error:
        sys.exit(str(error))
    if folder not in sys.path:
        # As under python -m: a recipe of the user's own lies where the command is given.
        sys.path.insert(0, folder)
    warm_up_for(sys.argv[1:])


if __name__ == "__main__":
    cli()
