"""The configuration: every option of every group composes; help says what each setting does; mistakes are named."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from omegaconf import OmegaConf

from harness.config import GROUPS, Conf, declared, nodes
from harness.run.faults import FAULTS
from harness.run.launch_settings import LaunchSettings, SweepSettings
from harness.run.plan import Ddp, TrainPlan
from harness.run.setting import out_of_bounds, settings_of

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"


@pytest.fixture(autouse=True)
def _hydra_as_before():
    """Hydra keeps the version_base of the last composition for the whole process."""
    before = copy.deepcopy(Singleton.get_state())
    yield
    Singleton.set_state(before)


def composed(*overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=list(overrides), return_hydra_config=True)


FILES = [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml"))]
NAMES = [tuple(path.split("/")) for path in nodes() if "/" in path]


@pytest.mark.parametrize(("group", "name"), [*FILES, *NAMES], ids="=".join)
def test_every_option_composes(group, name):
    config = composed(f"{group}={name}")
    if group in ("launcher", "backend"):
        assert config[group].name == name
    if group == "compare":
        assert config.compare.tier == name
    if group == "fault":
        assert config.fault.name == (None if name == "none" else name)
    if group == "recipe":
        assert config.recipe._target_.startswith(f"recipes.{name}.")


def test_a_fault_has_the_smallest_size_that_must_be_caught():
    assert composed("fault=bit_flipped_on_wire").fault.size == 3.0
    assert composed("fault=one_gradient_scaled").fault.size is None


def test_another_app_does_not_list_the_options_of_run_py():
    app = ROOT / "examples" / "hydra_app" / "app.py"
    done = subprocess.run([sys.executable, str(app), "--help"], capture_output=True, text=True, check=True)
    assert "Configuration groups" in done.stdout and not any(f"{group}:" in done.stdout for group in GROUPS)
    done = subprocess.run([sys.executable, str(app), "--info", "plugins"], capture_output=True, text=True, check=True)
    assert "RunOptions" in done.stdout


def test_a_copy_of_the_configuration_has_its_options(tmp_path):
    (tmp_path / "mine.yaml").write_text((CONF / "config.yaml").read_text().replace("  - experiment: null\n", ""))
    for group in ("recipe", "report"):
        (tmp_path / group).mkdir()
        for path in (CONF / group).glob("*.yaml"):
            (tmp_path / group / path.name).write_text(path.read_text())
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert compose("mine", overrides=["fault=stale_bucket", "launcher=launch"]).launcher.name == "launch"


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_says_which_command_uses_it(path):
    header = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    assert header[0].startswith("# python run.py")


def test_the_plugin_gets_every_setting_of_training():
    config = composed("epochs=2", "clip_norm=1.5", "hydra.job.num=0", "hydra.job.id=0")
    train = OmegaConf.to_container(config.hydra.launcher.train, resolve=True)
    assert set(train) <= {field.name for field in dataclasses.fields(TrainPlan)}
    plan = TrainPlan.from_config(train)
    assert (plan.epochs, plan.steps, plan.clip_norm) == (2, None, 1.5)
    assert set(train) == {setting.name for setting in settings_of(TrainPlan)}


def test_the_plugin_gets_every_setting_from_where_it_stands():
    overrides = ["launcher=launch", "launcher.timeout_s=7", "backend=gloo", "compare=full", "compare.aa=true", "nprocs=3"]
    config = composed(*overrides, "fault=one_ulp_at_birth", "hydra.job.num=0", "hydra.job.id=0")
    told = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    assert (told["method"], told["timeout_s"], told["backend"], told["aa"], told["nprocs"]) == ("launch", 7.0, "gloo", True, 3)
    assert (told["train"]["compare"], told["train"]["fault"], told["train"]["fault_size"]) == ("full", "one_ulp_at_birth", 1.0)
    assert told["report"]["reporters"]["terminal"]["_target_"] == "harness.report.terminal.Terminal"


def test_every_setting_says_what_it_does():
    """What shows no line of its own is what the chosen option says, or holds others."""
    silent = {setting.typed for setting in [*declared(), *settings_of(Ddp)] if not setting.text}
    assert silent == {*GROUPS, "ddp", "fault.name"} - {"fault"}
    assert len({setting.name for setting in declared()}) == len(declared())
    assert {setting.heading for setting in declared()} == {
        *("How ranks start", "Training", "Evaluation, checkpoints", "Proof", "Output")
    }
    assert [field.name for field in dataclasses.fields(Conf)][: len(GROUPS)] == list(GROUPS)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (TrainPlan({}, steps=-1), "steps=-1 must be 0 (only evaluate) or more."),
        (TrainPlan({}, steps=99999999999999999999), "steps=99999999999999999999 must be at most 1000000000000."),
        (TrainPlan({}, steps="5"), "steps=5 must be a number."),
        (TrainPlan({}, steps=None, epochs=0), "epochs=0 must be at least 1, or null to count steps."),
        (TrainPlan({}, seed=2**64), f"seed={2**64} must be at most {2**64 - 1}."),
        (TrainPlan({}, seed=2**70), f"seed={2**70} must be at most {2**64 - 1}."),
        (TrainPlan({}, num_workers=1000000), "num_workers=1000000 must be at most 1024."),
        (TrainPlan({}, global_batch_size=10**13), f"global_batch_size={10**13} must be at most {2**31 - 1}."),
        (TrainPlan({}, clip_norm=math.nan), "clip_norm=nan must be above 0, or null."),
        (TrainPlan({}, clip_norm=math.inf), "clip_norm=inf must be finite, or null."),
        (TrainPlan({}, eval_every=-1), "eval_every=-1 must be 0 (only at the end) or more."),
        (TrainPlan({}, checkpoint_every=-1), "checkpoint_every=-1 must be 0 (none) or more."),
        (TrainPlan({}, precision="int8"), "precision=int8 is unknown; use float32, float64, bfloat16."),
        (TrainPlan({}, on_nonfinite="go"), "on_nonfinite=go must be stop or skip."),
        (TrainPlan({}, compare="some"), "compare=some is unknown; use quick, full, audit, off."),
        (TrainPlan({}, on_mismatch="go"), "compare.on_mismatch=go must be stop or warn."),
        (LaunchSettings(timeout_s=math.nan), "launcher.timeout_s=nan must be above 0, or null."),
        (LaunchSettings(timeout_s=math.inf), "launcher.timeout_s=inf must be at most 1000000000, or null."),
        (LaunchSettings(timeout_s=1e300), "launcher.timeout_s=1e+300 must be at most 1000000000, or null."),
        (LaunchSettings(grace_s=math.nan), "launcher.grace_s=nan must be 0 or more."),
        (LaunchSettings(start_method="x"), "launcher.start_method=x is unknown; use forkserver, spawn, fork."),
        (SweepSettings(pairs=-1), "compare.pairs=-1 must be 0 (one launch per job) or more."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_lies_out_of_bounds_is_said_in_one_sentence(values, sentence):
    assert out_of_bounds(values) == [sentence]


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.unit])
@pytest.mark.parametrize("size", [math.nan, math.inf, -math.inf, -1.0])
def test_a_size_that_no_fault_can_have_is_said_in_one_sentence(name, size):
    plan = TrainPlan({"_target_": "x"}, fault=name, fault_size=size, compare="full", epochs=2)
    (sentence,) = plan.problems(2)
    assert sentence.startswith(f"fault.size={size} is not a size of fault={name} ")


def test_what_lies_on_a_bound_is_within():
    plan = TrainPlan({}, steps=1, seed=2**64 - 1, clip_norm=1e300, num_workers=1024, ddp=Ddp(bucket_cap_mb=1e-4))
    assert out_of_bounds(plan) == out_of_bounds(plan.ddp, "ddp.") == out_of_bounds(LaunchSettings()) == []
    assert out_of_bounds(Ddp(bucket_cap_mb=math.inf), "ddp.") == ["ddp.bucket_cap_mb=inf must be at most 1048576."]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("nprocs=two", "Value 'two' of type 'str' could not be converted to Integer"),
        ("steps=1.5", "Value '1.5' of type 'float' could not be converted to Integer"),
        ("seed=null", "field 'seed' is not Optional"),
        ("global_batchsize=3", "Key 'global_batchsize' is not in struct|Key 'global_batchsize' not in 'Conf'"),
        ("launcher=spwan", "Could not find 'launcher/spwan'"),
        ("launcher.timeout=3", "Key 'timeout' not in 'LauncherConf'"),
        ("sync_bn=perhaps", "not a valid bool"),
    ],
)
def test_hydra_names_the_setting_that_is_wrong(override, message):
    with pytest.raises(HydraException) as caught:
        composed(override)
    said, error = "", caught.value
    while error is not None:
        said, error = f"{said}\n{error}", error.__cause__
    assert re.search(message, said)


def run_py(*arguments):
    command = [sys.executable, str(ROOT / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["steps=50", "epochs=1"], "steps=50 and epochs=1 exclude each other: give one of them."),
        (
            ["hydra.run.dir=here"],
            "hydra.run.dir=here names the folder of a single run, and every run is a sweep: use hydra.sweep.dir=here.",
        ),
        (["~recipe"], "The configuration is incomplete: "),
        (["nprocs=1,${no_such_setting}"], "Interpolation key 'no_such_setting' not found (hydra.launcher.nprocs)"),
        (["hydra.sweep.dir=${no_such_setting}"], "Interpolation key 'no_such_setting' not found (hydra.sweep.dir)"),
        (["hydra.sweep.subdir=${no_such_setting}"], "Interpolation key 'no_such_setting' not found (hydra.sweep.subdir)"),
        (["recipe=mnist,null"], "recipe=mnist,null names no option of recipe: allreduce, mnist, se_resnext, transformer."),
        (["fault=33"], "fault=33 names no option of fault: "),
        (["backend=[1,2]"], "backend=[1,2] names no option of backend: auto, bkcl, gloo, nccl."),
        (["experiment=null"], "experiment=null is how a command is without one: leave it out."),
        (["recipe.lr=range(3,1)"], "recipe.lr=range(3,1) leaves no value, and so no job."),
        (["global_batch_size=glob(*)"], "glob() chooses among the options of a group, and global_batch_size is none."),
        (["threads=interval(0,1)"], "interval() is for a sweeper that searches"),
    ],
)
def test_settings_that_mean_nothing_are_refused(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_py("nprocs=1", "backend=gloo", "launcher=launch", *arguments)
    assert done.returncode == 1 and message in done.stderr
    assert "Traceback" not in done.stderr and "\n  File " not in done.stderr
    assert not (tmp_path / "here").exists() and not list(tmp_path.glob("**/plan.json"))


def test_help_shows_values_groups_and_what_they_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_py("--help", "recipe=transformer", "steps=7")
    assert done.returncode == 0
    for text in (
        "How ranks start",
        "steps=7",
        "optimizer steps; null: count epochs",
        "recipe.width=64",
        "launcher: inline, launch",
    ):
        assert text in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags", [["--cfg", "job"], ["--info", "defaults"], ["--hydra-help"], ["--cfg", "hydra", "-p", "hydra.launcher"]]
)
def test_hydras_own_flags_work(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_py(*flags)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_shell_completion_offers_options_and_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    query = {"COMP_LINE": f"python {ROOT / 'run.py'} launcher=", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, str(ROOT / "run.py"), "-sc", "query=bash"]
    done = subprocess.run(command, capture_output=True, text=True, env=query, check=False)
    assert {"launcher=spawn", "launcher=launch", "launcher=torchrun", "launcher=inline"} <= set(done.stdout.split())


def test_all_broken_settings_of_all_jobs_are_reported_before_any_rank_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_py("backend=gloo", "nprocs=2,0", "steps=-1", "precision=float16", "launcher=launch", "threads=1")
    assert done.returncode == 1
    for text in (
        "job 0",
        "job 1",
        "nprocs=0 must be at least 1",
        "steps=-1 must be 0 (only evaluate) or more",
        "precision=float16 is unknown",
    ):
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("rank-*"))


def test_inline_refuses_to_pass_one_rank_for_many(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_py("launcher=inline", "nprocs=4", "backend=gloo")
    assert (done.returncode, "launcher=inline runs one rank in this process" in done.stderr) == (1, True)


def test_gloo_refuses_devices(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_py("backend=gloo", "backend.devices=0", "nprocs=1", "launcher=launch")
    assert "backend=gloo runs ranks on the CPU and cannot honour backend.devices=0" in done.stderr
