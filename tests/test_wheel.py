"""The wheel: built, installed in an empty environment, and run from another folder."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command, cwd):
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(cwd)}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of a copy of the tracked files, so that nothing of the working folder gets into it."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in tracked.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, copy, cwd=copy)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Python of an environment that has the wheel; what it depends on is read from this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=folder).strip())
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", site, wheel, cwd=folder)
    # A .pth names a folder without reading the .pth files in it: this checkout's editable install stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def test_the_wheel_holds_everything_a_run_needs(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    wanted = {
        name
        for name in tracked
        if name.startswith(("harness/", "hydra_plugins/", "conf/", "recipes/")) and name.endswith((".py", ".yaml", ".gz"))
    }
    assert wanted <= names
    assert {"run.py", "harness/py.typed"} <= names
    assert not {name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))}


def test_it_is_imported_from_the_environment(installed, tmp_path):
    where = run(installed, "-c", "import harness, conf, recipes, run; print(harness.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent.parent)


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", ["spawn", "launch"])
def test_it_trains_from_another_folder(installed, tmp_path, launcher):
    overrides = [f"launcher={launcher}", "backend=gloo", "nprocs=2", "steps=3", "threads=1", "compare=off"]
    said = run(installed, "-m", "run", *overrides, cwd=tmp_path)
    assert "step 3 of 3" in said
    assert len(list(tmp_path.glob("outputs/*/*/0/rank-*.jsonl"))) == 2


@pytest.mark.ranks
def test_its_command_trains_too(installed, tmp_path):
    script = tmp_path / "harness"
    ask = "from importlib.metadata import entry_points as found; print(*found(name='harness'))"
    module, function = re.search(r"value='(\w+):(\w+)'", run(installed, "-c", ask, cwd=tmp_path)).groups()
    # As pip writes it.
    script.write_text(
        f"#!{installed}\nimport sys\nfrom {module} import {function}\nif __name__ == '__main__':\n    sys.exit({function}())\n"
    )
    said = run(installed, script, "backend=gloo", "nprocs=2", "steps=2", "threads=1", "compare=off", cwd=tmp_path)
    assert "step 2 of 2" in said
