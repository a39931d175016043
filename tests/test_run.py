"""``python run.py``, and the command ``harness`` of an installed wheel, from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.run.folder import RunDir
from tests.processes import PATIENCE_S, alive, descendants, scaled, wait_until

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ["backend=gloo", "nprocs=2", "threads=1", "hydra.sweep.dir=out"]


INTERRUPTED = """\
import run
from harness.launchers import registry

def warm_up_for(arguments):
    print(arguments)
    raise KeyboardInterrupt

registry.warm_up_for = warm_up_for
run.cli()
"""


def test_the_command_warms_up_and_ends_quietly_when_interrupted() -> None:
    command = [sys.executable, "-c", INTERRUPTED, "launcher=spawn"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "['launcher=spawn']\n", "")


@pytest.mark.parametrize(
    ("module", "command"),
    [("hydra", [str(ROOT / "run.py")]), ("zipfile", ["-m", "harness.launch"]), ("rich", ["-m", "harness.compare", "."])],
)
def test_an_interruption_while_modules_are_imported_ends_quietly(module: str, command: list[str], tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("rmdir $PWD", "The current folder has been removed: nothing can run there. Change to another."),
        ("ulimit -f 1", "out cannot be written: File too large. hydra.sweep.dir=FOLDER chooses another place."),
    ],
)
def test_a_place_where_nothing_can_be_written_is_told_in_a_line(before: str, message: str, tmp_path: Path) -> None:
    command = ["sh", "-c", f'{before}; exec "$@"', "sh", sys.executable, "-B", str(ROOT / "run.py"), *SETTINGS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"{message}\n")


@pytest.mark.ranks
def test_a_whole_run_keeps_torch_out_of_the_parent(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    told = "atexit.register(lambda: print('torch in the parent:', 'torch' in sys.modules))"
    script.write_text(f"import atexit, sys\nfrom run import cli\nif __name__ == '__main__':\n    {told}\n    cli()\n")
    command = [sys.executable, str(script), *SETTINGS, "steps=2", "launcher=spawn,launch"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "torch in the parent: False"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("launcher", "number", "ignored"),
    [
        ("spawn", signal.SIGINT, False),
        ("launch", signal.SIGHUP, False),
        # As a shell starts a job in the background.
        ("torchrun", signal.SIGINT, True),
    ],
)
def test_a_signal_ends_a_run_with_its_status_and_leaves_nothing(
    launcher: str, number: int, ignored: bool, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    settings = [*SETTINGS, f"launcher={launcher}", "steps=1000000", "num_workers=1", "compare=off"]
    how = "trap '' INT; exec \"$@\"" if ignored else 'exec "$@"'
    parent = subprocess.Popen(
        ["sh", "-c", how, "sh", sys.executable, str(ROOT / "run.py"), *settings],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    job = RunDir(tmp_path / "out" / "0")
    try:
        assert wait_until(lambda: all(any(e["event"] == "step" for e in job.events(rank)) for rank in (0, 1)))
        below = descendants(parent.pid)
        parent.send_signal(number)
        _, said = parent.communicate(timeout=scaled(10))
    finally:
        parent.kill()
        parent.wait()
    assert parent.returncode == 128 + number
    assert f"ended by {signal.Signals(number).name}: all ranks were stopped." in said and "Traceback" not in said
    assert said.endswith(" What was done is shown by: python -m harness.compare out\n")
    assert len(below) >= 4 and wait_until(lambda: not any(map(alive, below)), scaled(5))
    assert wait_until(lambda: not list((tmp_path / "tmp").glob("harness-*")), scaled(5))
    assert not [path for path in job.path.iterdir() if path.name.startswith(".") and path.name != ".hydra"]
    assert all(job.events(rank)[-1]["event"] != "end" for rank in (0, 1))
