"""The scripts in examples/ are run as they stand, and their losses are equal in bits however they are started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
has_gpu = os.path.exists("/dev/nvidia0")

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def two_cores() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        preexec_fn=two_cores,
    )


def losses(*arguments: str) -> list[str]:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("loss: ") for line in done.stdout.splitlines()]
    assert len(lines) == 5
    return lines


@pytest.fixture(scope="module")
def two_ranks():
    """Return rank 0's losses of two ranks, as spawn trains them."""
    return losses("spawn_nprocs.py")


def test_cpu_asked_for(two_ranks):
    assert losses("cpu_training.py") == two_ranks


def test_same_body_under_the_launch_command(two_ranks):
    assert losses("-m", "harness.launch", "--nproc_per_node=2", "--backend=gloo", "linear.py") == two_ranks


def test_plain_torch_script_runs_unchanged(two_ranks):
    assert losses("-m", "harness.launch", "--nprocs=2", "plain_ddp.py") == two_ranks


def test_under_torchrun(two_ranks, tmp_path):
    store = ["--rdzv-backend=c10d", f"--rdzv-endpoint={tmp_path / 'store'}", "--rdzv-conf=store_type=file"]
    done = run(
        "-m", "torch.distributed.run", "--nproc-per-node=2", f"--log-dir={tmp_path}", "--redirects=3", *store, "linear.py"
    )
    assert done.returncode == 0, done.stderr + "".join(path.read_text() for path in tmp_path.glob("**/stderr.log"))
    # A file per rank: in one pipe the lines of both would mix.
    (log,) = tmp_path.glob("**/0/stdout.log")
    assert [line.removeprefix("loss: ") for line in log.read_text().splitlines()] == two_ranks


def test_number_of_ranks_left_open():
    """Usages 1 and 2, and the launch command, all take the cores that they may use."""
    with_args = losses("spawn_args.py")
    assert losses("-m", "harness.launch", "linear.py") == with_args
    done = run("spawn_function.py")
    lines = done.stdout.splitlines()
    assert lines[0] == f"losses of rank 0: {' '.join(with_args)}"
    assert len(lines) == min(2, len(os.sched_getaffinity(0)))


def test_one_process(two_ranks):
    alone = losses("linear.py")
    # The first loss comes before the ranks have learnt from each other.
    assert alone[0] == two_ranks[0] and alone[1:] != two_ranks[1:]


def test_list_of_devices_on_a_machine_without():
    done = run("spawn_devices.py", "4,5")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[-1].endswith("cannot honour gpus=4,5. Drop the list, or use backend=nccl.")


@pytest.mark.gpu
@pytest.mark.skipif(not has_gpu, reason="there is no GPU")
def test_list_of_devices():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "spawn_devices.py", "0"]
    done = subprocess.run(command, env=environment, cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5
