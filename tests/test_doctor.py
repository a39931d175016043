"""The doctor: one look at this machine, and what it would say of others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import doctor
from harness.doctor import Finding, as_json, as_text
from harness.errors import HarnessError
from harness.run.placement import Machine
from tests.processes import PATIENCE_S

ROOT = Path(__file__).resolve().parent.parent
has_gpu = os.path.exists("/dev/nvidia0")


@pytest.fixture(scope="module")
def examined():
    """Return what one real look at this machine came to, as the command prints it for a program."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "harness.doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


@pytest.mark.ranks
def test_this_machine(examined):
    found = {finding["name"]: finding for finding in examined["findings"]}
    assert examined["runs"] is True
    assert list(found) == [
        *("torch", "devices", "backend gloo", "backend nccl", "backend bkcl", "default job", "cores", "host name", "loopback"),
        *("shared memory", "open files", "try spawn", "try launch", "try torchrun"),
    ]
    assert found["cores"]["data"]["usable"] == len(os.sched_getaffinity(0)) or found["cores"]["data"]["quota"]
    for method in ("spawn", "launch", "torchrun"):
        assert found[f"try {method}"]["ok"] and found[f"try {method}"]["data"]["seconds"] > 0
    assert found["backend gloo"]["ok"] and found["loopback"]["ok"]
    if not has_gpu:
        data = found["default job"]["data"]
        assert data["backend"] == "gloo" and data["nprocs"] == found["cores"]["data"]["usable"] and data["threads"] >= 1


def names_and_marks(findings):
    return {finding.name: finding.ok for finding in findings}


@pytest.fixture
def asks_torch(monkeypatch):
    """Have ``auto`` ask torch, as it does where there is a device file."""
    monkeypatch.setattr("harness.run.placement.may_have_accelerator", lambda: True)


def test_machine_with_gpus(asks_torch, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    findings = doctor._backend_findings(Machine("2.13.0", ("gloo", "nccl"), {"cuda": 2}))
    assert names_and_marks(findings) == {
        "devices": None,
        "backend gloo": True,
        "backend nccl": True,
        "backend bkcl": False,
        "default job": True,
    }
    assert "usable, on 2 cuda" in as_text(findings, True)
    assert "backend=nccl (auto: 2 GPUs are visible), nprocs=2, threads=" in " ".join(as_text(findings, True).split())


def test_build_for_gpus_without_one():
    (nccl,) = (f for f in doctor._backend_findings(Machine("2.13.0", ("gloo", "nccl"), {})) if f.name == "backend nccl")
    assert (nccl.ok, nccl.text) == (False, "no device for it is visible")


def test_accelerator_that_nobody_knows(asks_torch):
    (job,) = (f for f in doctor._backend_findings(Machine("2.13.0", ("gloo",), {"npu": 1})) if f.name == "default job")
    assert job.ok is False and "unknown for the accelerator npu" in job.text


def test_torch_that_cannot_be_imported(monkeypatch):
    def fail():
        raise HarnessError("torch cannot be imported by python:\nImportError: libgone.so")

    monkeypatch.setattr(doctor.registry, "machine", fail)
    findings = doctor.examine()
    assert findings[0] == Finding("torch", False, "ImportError: libgone.so")
    assert not [finding for finding in findings if finding.name.startswith("try")]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert doctor.main([]) == 1


def test_host_name_that_does_not_resolve(monkeypatch):
    def fail(*arguments):
        raise OSError

    monkeypatch.setattr(doctor.socket, "getaddrinfo", fail)
    finding = doctor._name_finding()
    assert finding.ok is None and "does not resolve" in finding.text


def test_few_open_files(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 4096))
    finding = doctor._files_finding()
    assert (finding.ok, finding.text) == (False, "64, which can be raised to 4096: use ulimit -n 1024")


@pytest.mark.ranks
def test_launcher_that_fails_tells_the_last_line(monkeypatch):
    monkeypatch.setattr(doctor, "_ALL_REDUCE", "raise ValueError('no way')\n")
    finding = doctor.try_launcher("launch")
    assert (finding.ok, finding.text, finding.needed) == (False, "ValueError: no way", False)
    assert doctor.try_launcher("spawn").needed is True


def test_text_fits_one_screen():
    marks = [True, False, None, True, False]
    findings = [Finding(f"name {n}", mark, "word " * 40, needed=n % 2 == 0) for n, mark in enumerate(marks)]
    text = as_text(findings, False)
    assert all(len(line) <= 80 for line in text.splitlines()) and len(text.splitlines()) <= 24
    assert [line[15:17] for line in text.splitlines() if line.startswith("name")] == ["ok", "no", "  ", "ok", "!!"]
    assert text.endswith("The default job does not run here: see the lines marked !!.")


def test_json():
    said = json.loads(as_json([Finding("a", True, "b", {"c": 1})], True))
    assert said == {"runs": True, "findings": [{"name": "a", "ok": True, "text": "b", "data": {"c": 1}, "needed": True}]}


def test_exit_status_looks_at_what_is_needed(monkeypatch, capsys):
    for needed, status in ((False, 0), (True, 1)):
        findings = [Finding("a", False, "b", needed=needed)]
        monkeypatch.setattr(doctor, "examine", lambda findings=findings: findings)
        assert doctor.main(["--json"]) == status
    assert json.loads(capsys.readouterr().out.partition("}\n{")[0] + "}")["runs"] is True
