"""The configuration: every option of every group composes; help says what each setting does; mistakes are named."""

from __future__ import annotations

import copy
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.singleton import Singleton
from hydra.errors import HydraException
from omegaconf import OmegaConf

from harness.config import GROUPS, Conf
from harness.run.plan import TrainPlan

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


@pytest.mark.parametrize("path", sorted(CONF.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_option_composes(path):
    config = composed(f"{path.parent.name}={path.stem}")
    if path.parent.name in ("launcher", "backend"):
        assert config[path.parent.name].name == path.stem
    if path.parent.name == "compare":
        assert config.compare.tier == path.stem
    if path.parent.name == "recipe":
        assert config.recipe._target_.startswith(f"recipes.{path.stem}.")


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
    names = {field.name for field in dataclasses.fields(Conf)} - {"launcher", "backend", "report", "nprocs", "threads", "fault"}
    assert names <= set(train)


def test_defaults_of_the_schema_are_those_of_the_plan():
    plan = {field.name: field.default for field in dataclasses.fields(TrainPlan)}
    schema = {field.name: field.default for field in dataclasses.fields(Conf)}
    shared = (set(plan) & set(schema)) - {"recipe", "compare", "fault"}
    assert {name: plan[name] for name in shared} == {name: schema[name] for name in shared}


def test_every_setting_stands_in_the_help():
    named = [name for names in GROUPS.values() for name in names]
    assert sorted(named) == sorted(field.name for field in dataclasses.fields(Conf))


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
    done = run_py("backend=gloo", "nprocs=2,0", "steps=0", "precision=float16", "launcher=launch", "threads=1")
    assert done.returncode == 1
    for text in ("job 0", "job 1", "nprocs=0 must be at least 1", "steps=0 must be at least 1", "precision=float16 is unknown"):
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
