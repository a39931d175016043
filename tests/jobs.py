"""Real jobs of the toys, started by the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.processes import PATIENCE_S

ROOT = Path(__file__).parents[1]
TOYS = ("Boxed", "Points", "Scheduled", "Forgetful", "Drifting")


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run jobs, with each toy as a recipe of its name in small letters; job N's folder is ``tmp_path / "N"``."""
    recipes = tmp_path / "conf" / "recipe"
    recipes.mkdir(parents=True, exist_ok=True)
    for name in TOYS:
        (recipes / f"{name.lower()}.yaml").write_text(
            f"_target_: tests.toys.{name}\ncount: 18\ndropout: 0.5\noptimizer: adam\n"
        )
    return subprocess.run(
        [sys.executable, str(ROOT / "run.py"), f"--config-dir={recipes.parent}", *arguments, f"hydra.sweep.dir={tmp_path}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Return all that a command printed, in one line."""
    return " ".join((done.stdout + done.stderr).split())
