"""A Hydra app that knows nothing of harness, under every launcher."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.processes import PATIENCE_S

REPOSITORY = Path(__file__).resolve().parents[1]
METHODS = ["spawn", "launch", "torchrun", "inline"]

pytestmark = pytest.mark.ranks

LOCAL = '''
import functools, json, pickle
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

def plain(function):
    def wrapper(*args, **named):
        return function(*args, **named)
    return wrapper

def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **named):
        return function(*args, **named)
    return wrapper

class Thing:
    def __init__(self, size):
        self.size = size

class Broken:
    def __init__(self):
        import no_such_module

class Keep(Callback):
    """What the parent sees, for comparison."""
    def __init__(self, folder):
        self.folder = folder
    def on_job_start(self, config, **kwargs):
        with open(f"{self.folder}/parent-{config.hydra.job.num}.json", "w") as file:
            json.dump({"cfg": content(config), "hydra": OmegaConf.to_container(config.hydra, resolve=False)}, file, default=str)
    def on_job_end(self, config, job_return, **kwargs):
        value = job_return.return_value if job_return.status.name == "COMPLETED" else None
        with open(f"{self.folder}/return-{config.hydra.job.num}.json", "w") as file:
            json.dump([job_return.status.name, type(value).__name__, repr(value)], file)

def content(config):
    plain = {k: v for k, v in OmegaConf.to_container(config, resolve=True).items() if k != "hydra"}
    return repr(sorted(plain.items(), key=lambda item: item[0]))
'''

PROBE = """
import dataclasses, json, logging, os, sys, time
import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import OmegaConf
from local_module import content, plain, wrapped

@dataclasses.dataclass
class Answer:
    rank: int
    nan: float
    pair: tuple

@plain
def another(cfg):
    raise RuntimeError("the wrong function")

@plain
@hydra.main(version_base="1.3", config_path="conf", config_name="probe")
@plain
@wrapped
@plain
def main(cfg):
    rank = int(os.environ["RANK"])
    hydra_cfg = HydraConfig.get()
    told = {
        "cfg": content(cfg), "hydra": OmegaConf.to_container(hydra_cfg, resolve=False),
        "cwd": os.getcwd(), "argv": sys.argv, "path": sys.path, "original": hydra.utils.get_original_cwd(),
        "hashseed": os.environ["PYTHONHASHSEED"], "threads": os.environ["OMP_NUM_THREADS"],
        "set": [os.environ["FROM_JOB"], os.environ["COPIED"]], "size": instantiate(cfg.thing).size,
        "same": Answer is sys.modules["__main__"].Answer,
    }
    with open(f"{cfg.folder}/rank-{hydra_cfg.job.num}-{rank}.json", "w") as file:
        json.dump(told, file, default=str)
    logging.getLogger("x").info("record of x")
    logging.getLogger("x").debug("debug of x")
    logging.getLogger("y").debug("debug of y")
    open(f"{cfg.folder}/done-{hydra_cfg.job.num}-{rank}", "w").close()
    while not os.path.exists(f"{cfg.folder}/done-{hydra_cfg.job.num}-0"):
        time.sleep(0.01)
    if cfg.x != 2 and rank == int(os.environ["WORLD_SIZE"]) - 1:
        deeper(cfg.x)
    return Answer(rank, float("nan"), (1, "2"))

def deeper(x):
    raise ValueError(f"bad x: {x}")

if __name__ == "__main__":
    OmegaConf.register_new_resolver("twice", lambda number: 2 * number)
    main()
"""

CONFIG = """
x: 0
folder: ???
here: ${hydra:runtime.output_dir}
clock: ${now:%S-%f}
mine: ${twice:4}
drop: 1
msg: ""
thing: {_target_: local_module.Thing, size: 5}
hydra:
  sweep: {dir: out, subdir: "${hydra.job.num}_${now:%f}_${x}"}
  job: {name: probe, chdir: true, env_set: {FROM_JOB: "job ${x}"}, env_copy: [COPIED]}
  verbose: x
  callbacks: {keep: {_target_: local_module.Keep, folder: "${folder}"}}
"""

TRICKY = ['msg="a, b=c {x} [y] # $HOME & \\"q\\""', '+l=[1,"2",null]', '+e=""', "~drop"]


def environment(**more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    return {**env, "PYTHONPATH": f".{os.pathsep}{REPOSITORY}", **more}


def run(
    folder: Path, *arguments: str, env: Mapping[str, str] | None = None, before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run an app as a user does."""
    command = [*before, sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(**(env or {})), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def with_launcher(method: str, nprocs: int | None = None) -> list[str]:
    nprocs = nprocs or (1 if method == "inline" else 2)
    return ["hydra/launcher=harness", f"hydra.launcher.method={method}", f"hydra.launcher.nprocs={nprocs}"]


@pytest.fixture
def project(odd_path: Path) -> Path:
    """Return a project with a local module, an app in a package, and a configuration."""
    for name in ("app", "conf", "told", "extra"):
        (odd_path / name).mkdir()
    (odd_path / "local_module.py").write_text(LOCAL)
    (odd_path / "app" / "__init__.py").write_text("")
    (odd_path / "app" / "probe.py").write_text(PROBE)
    # Hydra looks beside the innermost function, which is the decorator's.
    (odd_path / "conf" / "__init__.py").write_text("")
    (odd_path / "conf" / "probe.yaml").write_text(CONFIG)
    (odd_path / "extra" / "alt.yaml").write_text(CONFIG)
    return odd_path


def read(folder: Path, name: str) -> dict[str, object]:
    return json.loads((folder / "told" / f"{name}.json").read_text())


@pytest.mark.parametrize("method", METHODS)
def test_one_sweep(method: str, project: Path) -> None:
    ranks = 1 if method == "inline" else 2
    form = ["-m", "app.probe"] if method == "launch" else ["app/probe.py"]
    done = run(
        project,
        *form,
        "-m",
        *(["--config-dir=extra", "--config-name=alt"] if method == "spawn" else []),
        *with_launcher(method),
        "x=1,2,3",
        "folder=${oc.env:TOLD}",
        *TRICKY,
        env={
            **{"TOLD": str(project / "told"), "SECRET": "s3cr3t-value", "COPIED": "yes"},
            "HYDRA_FULL_ERROR": "1" if method == "launch" else "0",
        },
    )
    screen = done.stdout + done.stderr
    assert done.returncode == 1, screen
    assert (project / "out").exists(), screen
    check_configs(project, ranks, screen)
    check_failures(project, ranks, screen)
    check_records(project, ranks, done.stdout)
    check_returns(project)
    assert "s3cr3t" not in screen
    assert [path for path in (project / "out").rglob("*") if path.is_file() and b"s3cr3t" in path.read_bytes()] == []


def job_folders(project: Path) -> list[Path]:
    return sorted(path for path in (project / "out").iterdir() if path.is_dir())


def check_configs(project: Path, ranks: int, screen: str) -> None:
    folders = job_folders(project)
    assert [re.sub(r"_\d+_", "_", folder.name) for folder in folders] == ["0_1", "1_2", "2_3"], screen
    for job, folder in enumerate(folders):
        parent = read(project, f"parent-{job}")
        for rank in range(ranks):
            told = read(project, f"rank-{job}-{rank}")
            assert told["cfg"] == parent["cfg"]
            assert "a, b=c {x} [y] # $HOME & " in str(told["cfg"]) and "[1, '2', None]" in str(told["cfg"])
            assert "('mine', 8)" in str(told["cfg"]) and "drop" not in str(told["cfg"])
            assert str(folder) in str(told["cfg"]).replace("\\'", "'")
            assert told["hydra"] == parent["hydra"]
            assert (told["cwd"], told["original"]) == (str(folder), str(project))
            assert (told["set"], told["size"], told["same"]) == ([f"job {job + 1}", "yes"], 5, True)
            assert str(project) in told["path"] and told["argv"][0].endswith("probe.py")
            assert told["threads"] == str(max(1, len(os.sched_getaffinity(0)) // ranks))
        assert len({read(project, f"rank-{job}-{rank}")["hashseed"] for rank in range(ranks)}) == 1
        assert (folder / ".hydra" / "config.yaml").exists()
    assert len(list((project / "out").rglob(".hydra"))) == 3


def check_failures(project: Path, ranks: int, screen: str) -> None:
    line = next(n for n, text in enumerate(PROBE.splitlines(), 1) if "bad x" in text)
    for job in (0, 2):
        sentence = rf"rank {ranks - 1} of {ranks} failed: ValueError: bad x: {job + 1} \(app/probe.py:{line}\)"
        assert re.search(sentence, screen), screen
        assert re.search(sentence, (job_folders(project)[job] / "probe.log").read_text())
    assert "bad x: 2" not in screen


def check_records(project: Path, ranks: int, console: str) -> None:
    for job, folder in enumerate(job_folders(project)):
        text = (folder / "probe.log").read_text()
        for rank in range(ranks):
            for record in ("record of x", "debug of x"):
                assert text.count(f"[rank {rank}] {record}") == 1, (job, text)
                assert console.count(f"[rank {rank}] {record}") == 3, console
        assert "debug of y" not in text


def check_returns(project: Path) -> None:
    assert [read(project, f"return-{job}")[0] for job in range(3)] == ["FAILED", "COMPLETED", "FAILED"]
    assert read(project, "return-1")[1:] == ["Answer", "Answer(rank=0, nan=nan, pair=(1, '2'))"]


SMALL = """
import logging, os, sys
import hydra

@hydra.main(version_base=None, config_path=None)
def main(cfg):
    logging.getLogger("a").info("hello")
    print("printed by", os.environ.get("RANK"), flush=True)
    {body}

if __name__ == "__main__":
    main()
"""


def small(folder: Path, body: str = "pass") -> str:
    (folder / "small.py").write_text(SMALL.replace("{body}", body))
    return "small.py"


def test_the_folder_of_a_single_run_is_that_of_its_job(tmp_path: Path) -> None:
    done = run(tmp_path, small(tmp_path), *with_launcher("launch"), "hydra.run.dir='out, here'")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out, here" / ".hydra" / "config.yaml").exists() and not (tmp_path / "multirun").exists()


@pytest.mark.parametrize("group", ["disabled", "none"])
def test_job_logging_overrides_are_respected(group: str, tmp_path: Path) -> None:
    done = run(tmp_path, small(tmp_path), *with_launcher("launch"), f"hydra/job_logging={group}", "hydra.sweep.dir=out")
    assert done.returncode == 0 and "hello" not in done.stdout + done.stderr, done.stderr
    assert "printed by 0" in done.stdout and not list((tmp_path / "out").rglob("small.log"))


@pytest.mark.parametrize("method", ["spawn", "launch"])
def test_each_ranks_warnings_are_shown_once(method: str, tmp_path: Path) -> None:
    app = small(tmp_path, "import warnings; warnings.warn(f'from rank {os.environ[\"RANK\"]}')")
    done = run(tmp_path, app, *with_launcher(method), "hydra.sweep.dir=out")
    screen = done.stdout + done.stderr
    assert done.returncode == 0 and screen.count("UserWarning: from rank 0") == 1, screen
    assert screen.count("[rank 1] UserWarning: from rank 1") == 1, screen


REFUSED = {
    "hydra.launcher.nprocs=0": "nprocs=0 must be at least 1",
    "hydra.launcher.nprocs=-2": "nprocs=-2 must be at least 1",
    "hydra.launcher.backend=glo": "backend=glo is unknown.*usable here: gloo",
    "hydra.launcher.backend=nccl": "backend=nccl is not available.*Available here: gloo",
    "hydra.launcher.backend=bkcl": "backend=bkcl is not available.*Available here: gloo",
    "hydra.launcher.devices='4,5' hydra.launcher.backend=gloo": "cannot honour backend.devices=4,5",
    "hydra.launcher.method=inline": "launcher=inline runs one rank in this process, but nprocs=2",
    "hydra.launcher.method=slurm": (
        r"launcher slurm \(hydra.launcher.method\) is unknown; use spawn, launch, torchrun, inline"
    ),
    "hydra.launcher.threads=0": "threads=0 must be auto or at least 1",
    "hydra.launcher.timeout_s=-1": "timeout_s=-1.0 must be above 0, or null",
    "hydra.launcher.timeout_s=1e300": r"timeout_s=1e\+300 must be at most 1000000000, or null\.",
    "hydra.launcher.grace_s=nan": r"grace_s=nan must be 0 or more\.",
    "hydra.launcher.nprocs=100000": r"nprocs=100000 must be at most 4096\.",
    "hydra.launcher.threads=100000": "threads=100000 must be at most 4096",
}
IN_TURN = """
import runpy, sys
common, settings = sys.argv[1].split(), sys.argv[2:]
for setting in settings:
    sys.argv = ["small.py", *common, *setting.split()]
    print(f"--- {setting}", file=sys.stderr, flush=True)
    try:
        runpy.run_path("small.py", run_name="__main__")
    except SystemExit as end:
        print(f"status {end.code}", file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what one program says when its app is run with each wrong setting in turn."""
    folder = tmp_path_factory.mktemp("refused")
    small(folder)
    (folder / "in_turn.py").write_text(IN_TURN)
    done = run(folder, "in_turn.py", " ".join(["-m", *with_launcher("launch")]), *REFUSED)
    assert "printed by" not in done.stdout and not list(folder.glob("**/*.jsonl"))
    parts = [part.partition("\n") for part in done.stderr.split("--- ")[1:]]
    return {setting: said for setting, _, said in parts}


@pytest.mark.parametrize("setting", REFUSED)
def test_wrong_settings_are_refused_before_any_rank_starts(setting: str, refused: dict[str, str]) -> None:
    assert re.search(REFUSED[setting], refused[setting], re.DOTALL), refused[setting]
    assert refused[setting].endswith("status 1\n")
    assert [word for word in ("Traceback", "HYDRA_FULL_ERROR") if word in refused[setting]] == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("hydra.mode=RUN", "hydra.mode=RUN bypasses the launcher: nprocs=2 would be one process"),
        ("hydra.launcher.nprocs=0", "nprocs=0 must be at least 1"),
    ],
)
def test_a_single_run_with_a_wrong_setting_ends_with_status_1(setting: str, message: str, tmp_path: Path) -> None:
    done = run(tmp_path, small(tmp_path), *with_launcher("launch"), setting)
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "printed by" not in done.stdout


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ("def main():\n    @decorate\n    def inner(cfg): pass\n    inner()", "lies inside another function"),
        ("def main():\n    decorate(lambda cfg: None)()", "it is a lambda or lies inside another function"),
        ("main = decorate(lambda cfg: None)", ""),
    ],
)
def test_function_that_no_rank_could_find(definition: str, message: str, tmp_path: Path) -> None:
    """A nested function is refused; one that a module-level name leads to is found, lambda or not."""
    head = "import hydra\ndecorate = hydra.main(version_base=None, config_path=None)\n"
    (tmp_path / "app.py").write_text(f"{head}{definition}\nif __name__ == '__main__':\n    main()\n")
    done = run(tmp_path, "app.py", *with_launcher("launch"))
    assert done.returncode == (1 if message else 0) and message in done.stderr, done.stderr


def test_import_error_behind_a_target_names_the_users_line(tmp_path: Path) -> None:
    (tmp_path / "local_module.py").write_text(LOCAL)
    app = small(tmp_path, "from hydra.utils import instantiate; instantiate({'_target_': 'local_module.Broken'})")
    done = run(tmp_path, app, *with_launcher("launch"), "hydra.sweep.dir=out")
    line = next(n for n, text in enumerate(LOCAL.splitlines(), 1) if "no_such_module" in text)
    assert done.returncode == 1 and f"local_module.py:{line}" in done.stderr, done.stderr
    assert "No module named 'no_such_module'" in done.stderr


@pytest.mark.parametrize("body", ["sys.exit(7)", "os.kill(os.getpid(), 9)"])
def test_no_failure_ends_with_status_0(body: str, tmp_path: Path) -> None:
    done = run(tmp_path, small(tmp_path, body), *with_launcher("launch"), "hydra.sweep.dir=out")
    assert done.returncode == 1 and len(re.findall(r"rank [01] of 2 ", done.stderr)) == 1, done.stderr
    assert "HYDRA_FULL_ERROR" not in done.stderr, "Hydra has told again what the terminal had told"


@pytest.mark.skipif(shutil.which("taskset") is None, reason="no taskset here")
def test_one_core_means_one_rank_of_one_thread(tmp_path: Path) -> None:
    app = small(tmp_path, "print('threads', os.environ['OMP_NUM_THREADS'], 'of', os.environ['WORLD_SIZE'])")
    done = run(tmp_path, app, *with_launcher("launch", -1), "hydra.sweep.dir=out", before=["taskset", "-c", "0"])
    assert "threads 1 of 1" in done.stdout, done.stderr
    plan = json.loads((tmp_path / "out" / "0" / "plan.json").read_text())
    assert (plan["nprocs"], plan["threads"]) == (1, 1)


def test_users_thread_count_is_respected(tmp_path: Path) -> None:
    app = small(tmp_path, "print('threads', os.environ['OMP_NUM_THREADS'])")
    done = run(tmp_path, app, *with_launcher("launch"), "hydra.sweep.dir=out", env={"OMP_NUM_THREADS": "7"})
    assert "threads 7" in done.stdout, done.stderr


REDUCE = (
    "import torch, torch.distributed as dist; dist.init_process_group('gloo'); "
    "total = torch.ones(1); dist.all_reduce(total); print(total.item())"
)


def can_unshare() -> bool:
    ways = ["unshare", "-nu", "sh", "-c", "ip link set lo up && hostname no.such.host.invalid"]
    if not all(map(shutil.which, ("unshare", "ip", "hostname"))):
        return False
    return subprocess.run(ways, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="needs the right to make a network namespace")
@pytest.mark.parametrize("method", ["spawn", "torchrun"])
def test_loopback_is_network_enough(method: str, tmp_path: Path) -> None:
    prepare = 'ip link set lo up; hostname no.such.host.invalid; echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; exec "$@"'
    done = run(
        tmp_path,
        small(tmp_path, REDUCE),
        *with_launcher(method),
        "hydra.sweep.dir=out",
        before=["unshare", "-nu", "sh", "-c", prepare, "sh"],
        env={"http_proxy": "http://10.1.1.1:3128", "HTTP_PROXY": "http://10.1.1.1:3128"},
    )
    assert done.returncode == 0 and "2.0" in done.stdout, done.stdout + done.stderr


def test_users_interface_is_respected(tmp_path: Path) -> None:
    done = run(
        tmp_path, small(tmp_path, REDUCE), *with_launcher("spawn"), "hydra.sweep.dir=out", env={"GLOO_SOCKET_IFNAME": "none0"}
    )
    assert done.returncode == 1 and "none0" in done.stderr + (tmp_path / "out" / "0" / "rank-0.log").read_text()


@pytest.mark.parametrize("method", ["torchrun", "inline"])
def test_app_of_the_examples(method: str, tmp_path: Path) -> None:
    app = REPOSITORY / "examples" / "hydra_app" / "app.py"
    done = run(tmp_path, str(app), "-m", *with_launcher(method), "hydra.sweep.dir=out")
    assert done.returncode == 0, done.stderr
    ranks = 1 if method == "inline" else 2
    assert all(done.stdout.count(f"[rank {rank}] rank {rank} of {ranks}") == 1 for rank in range(ranks)), done.stdout
    assert done.stdout.count("[rank ") == ranks


def test_a_job_whose_ranks_cannot_be_started_costs_the_others_nothing(tmp_path: Path) -> None:
    app = tmp_path / small(tmp_path)
    thread = "    import threading\n    threading.Thread(target=threading.Event().wait, daemon=True).start()\n    main()\n"
    app.write_text(app.read_text().removesuffix("    main()\n") + thread)
    ways = ["hydra/launcher=harness", "hydra.launcher.nprocs=2", "hydra.launcher.start_method=fork"]
    done = run(
        tmp_path,
        "small.py",
        "-m",
        *ways,
        "hydra.launcher.method=${oc.select:how,launch}",
        "+how=spawn,launch",
        "hydra.sweep.dir=out",
    )
    screen = done.stdout + done.stderr
    assert done.returncode == 1 and "ranks cannot be forked from a process of 2 threads" in screen, screen
    assert "cannot be written" not in screen and "printed by 0" in done.stdout, screen
    results = [json.loads((tmp_path / "out" / job / "result.json").read_text())["status"] for job in "01"]
    assert results == ["failed", "ok"]
    assert "ranks cannot be forked" in (tmp_path / "out" / "0" / "small.log").read_text(), screen


def test_an_app_without_a_main_guard_does_not_start_ranks_without_end(tmp_path: Path) -> None:
    decorator = "@hydra.main(version_base='1.3', config_path=None)"
    (tmp_path / "app.py").write_text(f"import hydra\n\n\n{decorator}\ndef main(cfg):\n    pass\n\n\nmain()\n")
    done = run(tmp_path, "app.py", *with_launcher("launch"))
    assert done.returncode == 1
    assert 'runs its app when it is imported: put the call under if __name__ == "__main__":' in done.stderr
