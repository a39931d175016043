"""Where ranks run, and every refusal."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import BackendUnavailable, ConfigError
from harness.rank import backend
from harness.run import placement
from harness.run.placement import Machine, Placement, place

CPU = Machine("2.13", ("gloo",))
CUDA = Machine("2.13", ("gloo", "nccl"), {"cuda": 4})
XPU = Machine("2.13", ("gloo", "bkcl"), {"xpu": 2})
NO_XPU = Machine("2.13", ("gloo", "bkcl"), group_devices={"bkcl": ["xpu"]})
TRIAL = Machine("", ("gloo", "bkcl"), group_devices={"bkcl": ["cpu"]})
"""bkcl as a plugin registers it for a trial on the CPU."""


@pytest.fixture(autouse=True)
def _may_have_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "may_have_accelerator", lambda: True)


def put(backend: str = "auto", nprocs: int = 2, devices: str | None = None, machine: Machine = CPU, **env: str) -> Placement:
    return place(backend, nprocs, devices, 6, env, lambda: machine)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Placement("gloo", "auto: no accelerator", "cpu", 2)),
        ({"nprocs": -1}, Placement("gloo", "auto: no accelerator", "cpu", 6)),
        ({"backend": "gloo", "machine": CUDA, "nprocs": 9}, Placement("gloo", "as asked", "cpu", 9)),
        ({"machine": CUDA}, Placement("nccl", "auto: 4 GPUs are visible", "cuda", 2, ("0", "1"))),
        ({"machine": CUDA, "nprocs": -1}, Placement("nccl", "auto: 4 GPUs are visible", "cuda", 4, ("0", "1", "2", "3"))),
        ({"machine": CUDA, "devices": "3,1"}, Placement("nccl", "auto: 4 GPUs are visible", "cuda", 2, ("3", "1"))),
        ({"machine": CUDA, "devices": "3", "nprocs": -1}, Placement("nccl", "auto: 4 GPUs are visible", "cuda", 1, ("3",))),
        ({"machine": XPU}, Placement("bkcl", "auto: 2 XPUs are visible", "xpu", 2, ("0", "1"))),
        ({"backend": "bkcl", "machine": TRIAL}, Placement("bkcl", "as asked", "cpu", 2)),
        ({"backend": "bkcl", "machine": TRIAL, "nprocs": -1}, Placement("bkcl", "as asked", "cpu", 6)),
    ],
)
def test_places(settings: dict[str, Any], expected: Placement) -> None:
    assert put(**settings) == expected


def test_ids_are_absolute() -> None:
    seen = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert put(machine=CUDA, **seen).devices == ("4", "5")
    assert put(machine=CUDA, devices="7,4", **seen).devices == ("7", "4")
    uuid = {"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}
    assert put(machine=Machine("", ("nccl",), {"cuda": 2}), **uuid).devices == ("GPU-aa", "GPU-bb")
    assert put(machine=XPU, XPU_VISIBLE_DEVICES="3,1").devices == ("3", "1")


def test_cpu_and_gloo_ask_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "may_have_accelerator", lambda: False)

    def never() -> Machine:
        raise AssertionError("asked")

    assert place("auto", 2, None, 6, {}, never).backend == "gloo"
    assert place("gloo", 2, None, 6, {}, never).backend == "gloo"


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"nprocs": 0}, ConfigError, "nprocs=0 must be at least 1, or -1 for every visible device"),
        ({"nprocs": -2}, ConfigError, "nprocs=-2 must be at least 1"),
        ({"backend": "glo"}, BackendUnavailable, "backend=glo is unknown.*auto, gloo, nccl, bkcl; usable here: gloo"),
        ({"backend": "nccl"}, BackendUnavailable, r"backend=nccl is not available.*\(2.13\) has no NCCL.*Available here: gloo"),
        ({"backend": "bkcl"}, BackendUnavailable, "backend=bkcl is not available.*Available here: gloo"),
        ({"backend": "gloo", "devices": "0"}, ConfigError, "cannot honour backend.devices=0"),
        ({"devices": "0,1"}, ConfigError, "backend=auto found no accelerator.*cannot honour backend.devices=0,1"),
        ({"machine": CUDA, "nprocs": 5}, BackendUnavailable, "nprocs=5, but 4 GPUs are visible. Use backend=gloo or nprocs=4"),
        ({"machine": CUDA, "devices": "0,9"}, ConfigError, "backend.devices=0,9: 9 is not visible here. Visible: 0, 1, 2, 3"),
        ({"machine": CUDA, "devices": "1,1"}, ConfigError, "backend.devices=1,1 names a device twice"),
        ({"machine": CUDA, "devices": "0,1,2"}, ConfigError, "names 3 devices, but nprocs=2"),
        ({"machine": CUDA, "devices": "0", "CUDA_VISIBLE_DEVICES": "4,5"}, ConfigError, "0 is not visible here. Visible: 4, 5"),
        (
            {"backend": "nccl", "machine": Machine("2.13", ("gloo", "nccl"))},
            BackendUnavailable,
            "backend=nccl needs one GPU per rank: nprocs=2, but 0 GPUs are visible. Use backend=gloo.$",
        ),
        (
            {"backend": "nccl", "machine": Machine("2.13", ("gloo", "nccl")), "nprocs": -1},
            BackendUnavailable,
            "backend=nccl needs one GPU per rank.*0 GPUs are visible",
        ),
        (
            {"backend": "bkcl", "machine": NO_XPU},
            BackendUnavailable,
            "backend=bkcl needs one XPU per rank: nprocs=2, but 0 XPUs are visible. Use backend=gloo.$",
        ),
        ({"backend": "bkcl", "machine": NO_XPU, "nprocs": -1}, BackendUnavailable, "0 XPUs are visible"),
        ({"backend": "glo", "machine": NO_XPU}, BackendUnavailable, "usable here: gloo.$"),
        ({"backend": "glo", "machine": TRIAL}, BackendUnavailable, "usable here: gloo, bkcl.$"),
        (
            {"machine": Machine("2.13", ("gloo",), {"npu": 8})},
            BackendUnavailable,
            r"unknown for the accelerator npu \(8 visible\).*Use backend=gloo",
        ),
        # A build without the group for the accelerator that it sees.
        ({"machine": Machine("2.13", ("gloo",), {"xpu": 2})}, BackendUnavailable, "unknown for the accelerator xpu"),
    ],
)
def test_refusals(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        put(**settings)


def test_a_torch_without_distributed_has_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    monkeypatch.delattr("torch.distributed.is_gloo_available")
    monkeypatch.delattr("torch.distributed.Backend")
    seen = Machine(**backend.probe())
    assert (list(seen.groups), placement.listed_usable(seen, {})) == ([], "none")
