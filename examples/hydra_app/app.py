"""A Hydra app that knows nothing of harness: python app.py hydra/launcher=harness hydra.launcher.nprocs=2"""

import logging
import os

import hydra
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path=None)
def main(cfg: DictConfig) -> int:
    logging.getLogger("app").info("rank %s of %s", os.environ["RANK"], os.environ["WORLD_SIZE"])
    return int(os.environ["RANK"])


if __name__ == "__main__":
    main()
