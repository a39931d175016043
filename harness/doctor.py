"""``python -m harness.doctor``: what this machine and this build of torch can run, and why not what not."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shutil
import socket
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.entrypoints.messages import details
from harness.entrypoints.run_job import run_job
from harness.entrypoints.settings import Settings, plan_of
from harness.errors import HarnessError
from harness.launchers import registry
from harness.launchers.signals import Interrupted
from harness.launchers.temp_dir import TempDir
from harness.run.environment import cgroup_quota, loopback_interface, require_loopback, usable_cores, wanted_threads
from harness.run.folder import RunDir, write_whole
from harness.run.placement import Machine, place
from harness.run.plan import RunPlan, Task

WIDTH = 80
LAUNCHERS = ("spawn", "launch", "torchrun")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        ok: True where it is as it should be; None where it is only a fact.
        text: In one or two short sentences.
        data: The same for a program.
        needed: False where the default job runs without it.
    """

    name: str
    ok: bool | None
    text: str
    data: Any = None
    needed: bool = True


def main(arguments: Sequence[str]) -> int:
    """Look, report, and return 0 if the default job would run."""
    parser = argparse.ArgumentParser(
        prog="python -m harness.doctor",
        description="Say what this machine and this build of torch can run, and try 2 ranks with each launcher.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, for a program")
    asked = parser.parse_args(arguments)
    try:
        findings = examine()
    except Interrupted as interruption:
        print(f"harness.doctor: {interruption}.", file=sys.stderr)
        # As shells have it for a program that a signal ended.
        return 128 + interruption.number
    runs = all(finding.ok is not False for finding in findings if finding.needed)
    print(as_json(findings, runs) if asked.json else as_text(findings, runs))
    return 0 if runs else 1


def examine() -> list[Finding]:
    """Return all findings; what needs torch is left out where torch cannot be imported."""
    findings = [*_machine_findings(), _name_finding(), _loopback_finding(), _memory_finding(), _files_finding()]
    try:
        # Asked of another process: a build of torch that crashes when it is imported is a finding too.
        seen = registry.machine()
    except HarnessError as error:
        # The text ends with what the child process printed, and that with the error itself.
        return [Finding("torch", False, str(error).splitlines()[-1]), *findings]
    torch = Finding("torch", None, f"{seen.torch}; Python {platform.python_version()}", seen.torch)
    return [torch, *_backend_findings(seen), *findings, *(try_launcher(method) for method in LAUNCHERS)]


def _backend_findings(seen: Machine) -> list[Finding]:
    devices = ", ".join(f"{count} {kind}" for kind, count in seen.devices.items()) or "no accelerator is visible"
    findings = [Finding("devices", None, devices, dict(seen.devices))]
    for name in ("gloo", "nccl", "bkcl"):
        findings.append(_backend_finding(name, seen))
    return [*findings, _default_job(seen)]


def _backend_finding(name: str, seen: Machine) -> Finding:
    # None of them is needed by itself: what the default job takes, its own finding says.
    if name not in seen.groups:
        hint = "; Kunlun's PyTorch plugin registers it" if name == "bkcl" else ""
        return Finding(f"backend {name}", False, f"not in this build of torch{hint}", needed=False)
    try:
        placement = place(name, -1, None, usable_cores(), os.environ, lambda: seen)
    except HarnessError:
        return Finding(f"backend {name}", False, "no device for it is visible", needed=False)
    where = "on the CPU" if placement.device == "cpu" else f"on {placement.nprocs} {placement.device}"
    return Finding(f"backend {name}", True, f"usable, {where}", needed=False)


def _default_job(seen: Machine) -> Finding:
    try:
        placement = place("auto", -1, None, usable_cores(), os.environ, lambda: seen)
        threads = wanted_threads(os.environ, "auto", usable_cores(), placement.nprocs)
    except HarnessError as error:
        return Finding("default job", False, str(error))
    data = {"backend": placement.backend, "device": placement.device, "nprocs": placement.nprocs, "threads": threads}
    text = f"backend={placement.backend} ({placement.reason}), nprocs={placement.nprocs}, threads={threads}"
    # gloo is placed without a look at the build, which may be one without torch.distributed.
    return Finding("default job", "gloo" in seen.groups or placement.backend != "gloo", text, data)


def _machine_findings() -> list[Finding]:
    # macOS has no affinity to ask for.
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cgroup_quota()
    limit = f"a quota of {quota:g}" if quota else "no quota"
    text = f"{usable_cores()} usable: {os.cpu_count()} in the machine, {affinity} by affinity, {limit}"
    data = {"usable": usable_cores(), "machine": os.cpu_count(), "affinity": affinity, "quota": quota}
    return [Finding("cores", None, text, data)]


def _name_finding() -> Finding:
    name = socket.gethostname()
    try:
        # gloo looks it up where no interface is named; a run on one machine names loopback.
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError:
        return Finding("host name", None, f"{name} does not resolve; runs on this machine do not need it", {"name": name})
    return Finding("host name", None, f"{name} is {address}", {"name": name, "address": address})


def _loopback_finding() -> Finding:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", loopback_interface())
    try:
        require_loopback()
    except HarnessError as error:
        return Finding("loopback", False, str(error).removesuffix("."))
    return Finding("loopback", True, f"127.0.0.1 works; gloo uses the interface {interface}", {"interface": interface})


def _memory_finding() -> Finding:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return Finding("shared memory", None, "no /dev/shm on this system", needed=False)
    free = shutil.disk_usage(shared).free / 2**20
    # DataLoader workers hand their batches over through it. Docker's default of 64 MiB, unused, passes.
    enough = free >= 64
    text = f"{free:.0f} MiB free in /dev/shm" + ("" if enough else ": DataLoader workers need more; use num_workers=0")
    return Finding("shared memory", enough, text, {"free_mib": round(free)}, needed=False)


def _files_finding() -> Finding:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Python has -1 for no limit, which is less than any number.
    enough = soft == resource.RLIM_INFINITY or soft >= 256
    more = f", which can be raised to {_limit(hard)}" if hard != soft else ""
    text = f"{_limit(soft)}{more}" + ("" if enough else ": use ulimit -n 1024")
    return Finding("open files", enough, text, {"soft": soft, "hard": hard}, needed=False)


def _limit(number: int) -> str:
    return "no limit" if number < 0 else str(number)


def try_launcher(method: str) -> Finding:
    """Return what came of an all-reduce of 2 gloo ranks under a launcher."""
    # The run's folder goes with it: nothing is left behind in the user's.
    with contextlib.closing(TempDir()) as folder:
        run = folder.run()
        script = run.path / "all_reduce.py"
        write_whole(script, _ALL_REDUCE)
        began = time.monotonic()
        task = Task(kind="script", path=str(script))
        # 2 ranks on gloo, which every machine can try; ranks that do not find each other are a finding, and no reason to hang.
        asked = Settings(task, "command", method=method, nprocs=2, backend="gloo", timeout_s=60.0, sys_path=sys.path)
        plan = plan_of(asked)
        text, ok = _try(run, plan)
        seconds = time.monotonic() - began
    name = f"try {method}"
    # The default job needs its own launcher alone.
    if not ok:
        return Finding(name, False, text, {"seconds": seconds}, needed=method == RunPlan.method)
    return Finding(
        name, True, f"2 ranks, one all-reduce, in {seconds:.1f} s", {"seconds": seconds}, needed=method == RunPlan.method
    )


_ALL_REDUCE = """\
import harness
import torch

harness.init_parallel_env("gloo")
total = torch.ones(1)
torch.distributed.all_reduce(total)
assert total.item() == 2, total
"""


def _try(run: RunDir, plan: RunPlan) -> tuple[str, bool]:
    result = run_job(plan, run)
    if result.status == "ok":
        return "", True
    last = details(result, run).splitlines()
    return last[-1] if last else result.message, False


def as_text(findings: Sequence[Finding], runs: bool) -> str:
    """Return the findings as one screen of 80 columns."""
    lines = []
    for finding in findings:
        first = f"{finding.name:<14} {_mark(finding):<3}"
        # Four lines at most, as an error of somebody else's may fill the screen.
        lines += textwrap.wrap(finding.text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first))[:4]
    verdict = "The default job runs here." if runs else "The default job does not run here: see the lines marked !!."
    return "\n".join([*lines, "", verdict])


def _mark(finding: Finding) -> str:
    if finding.ok is None:
        return ""
    if finding.ok:
        return "ok"
    return "!!" if finding.needed else "no"


def as_json(findings: Sequence[Finding], runs: bool) -> str:
    """Return the findings for a program."""
    return json.dumps({"runs": runs, "findings": [dataclasses.asdict(finding) for finding in findings]}, indent=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
