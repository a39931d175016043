"""torch's own tests of DDP and of its SyncBatchNorm, on gloo and CPU, with ours in their place.

A test that passes with torch's DDP here and not with ``DataParallel`` is a difference that a user meets. SyncBatchNorm of torch
refuses CPU tensors, so that its tests pass with ours alone. Writes docs/ddp-tests.md::

    make ddp-tests
    python -m benchmarks.ddp_tests --only SyncBatchNorm --stdout
"""

from __future__ import annotations

import argparse
import inspect
import io
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from harness import DataParallel, SyncBatchNorm
from harness.training.parallel.batchnorm import convert_sync_batchnorm
from harness.training.parallel.ddp import Reduction

RANKS = 2
MOST_S = 60.0
"""Of one test; one that takes longer hangs."""

WANTED = re.compile(r"DistributedDataParallel\(|SyncBatchNorm\(|convert_sync_batchnorm\(")

PAGE = """# torch's own tests of DDP, with DataParallel in its place

`make ddp-tests` takes those tests of `torch.testing._internal.distributed.distributed_test` that build DDP or SyncBatchNorm,
moves them to gloo, the CPU and {ranks} ranks, runs each with torch's classes and with `harness.DataParallel` and our
`SyncBatchNorm`, and writes this page. What asks for a GPU or more ranks passes with neither, and is left out.

"""


@dataclass(frozen=True)
class Outcome:
    """What came of a test.

    Attributes:
        torch: Why it fails with torch's classes; empty where it passes.
        ours: The same with ours.
    """

    name: str
    torch: str
    ours: str


# --- ours in the place of torch's --------------------------------------------------------------------------------------------

DEFAULTS: Mapping[str, Any] = {"broadcast_buffers": True, "init_sync": True, "check_reduction": False, "mixed_precision": None}
"""Of DDP's options that DataParallel does not have; given with these values they ask for nothing."""


class TorchOnCpu(DistributedDataParallel):
    """torch's, without the devices that a test names."""

    def __init__(
        self, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **options: Any
    ) -> None:
        super().__init__(module, None, None, *args, **options)


class Ours(DataParallel):
    """DataParallel under the arguments of DDP; one that it does not have is an error, as a user would find."""

    def __init__(
        self, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0, **options: Any
    ) -> None:
        known = {
            "comm_buffer_size": options.pop("bucket_cap_mb", None) or 25,
            "find_unused_parameters": options.pop("find_unused_parameters", False),
            "group": options.pop("process_group", None),
            "reduction": Reduction(
                gradient_as_bucket_view=options.pop("gradient_as_bucket_view", False),
                static_graph=options.pop("static_graph", False),
            ),
        }
        asked = inspect.signature(DataParallel).parameters
        left = {name: value for name, value in options.items() if name in asked or value != DEFAULTS.get(name, not value)}
        super().__init__(module, **known, **left)


class OurBatchNorm(SyncBatchNorm):
    """Our SyncBatchNorm under the arguments of torch's."""

    def __init__(self, num_features: int, process_group: Any = None, **options: Any) -> None:
        super().__init__(num_features, group=process_group, **options)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        return convert_sync_batchnorm(module, process_group)


def put_in_place(case: type[Any], ours: bool) -> None:
    """Have a test case build ours, or torch's."""
    tests, parallel, network = sys.modules[case.__mro__[1].__module__], torch.nn.parallel, torch.nn
    wrapper = Ours if ours else TorchOnCpu
    for module in (tests, parallel):
        module.DistributedDataParallel = wrapper  # type: ignore[attr-defined]
    if ours:
        network.SyncBatchNorm = OurBatchNorm  # type: ignore[misc, assignment]


# --- the CPU in the place of GPUs --------------------------------------------------------------------------------------------


def move_to_cpu() -> None:
    """Have what is asked of a GPU be done on the CPU: nothing of torch's tests is skipped for the want of one."""
    from torch.testing._internal import common_distributed

    def kept(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    common: Any = common_distributed
    common.skip_if_no_gpu = kept
    common.skip_if_rocm_multiprocess = kept
    common.skip_if_lt_x_gpu = lambda *_, **__: kept
    common.nccl_skip_if_lt_x_gpu = lambda *_: kept
    cuda: Any = torch.cuda
    cuda.device_count = lambda: RANKS
    cuda.set_device = cuda.synchronize = cuda.manual_seed = lambda *_: None
    cuda.current_device = lambda: 0
    cuda.device = lambda *_: nullcontext()
    module: Any = nn.Module
    to = module.to
    module.to = lambda self, *args, **options: to(self, *(OnCpu.moved(value, True) for value in args), **options)


class OnCpu(TorchFunctionMode):
    """A mode in which every device is the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        takes_device = function in (torch.Tensor.to, torch.device)
        options = {name: self.moved(value, name == "device") for name, value in (kwargs or {}).items()}
        return function(
            *(self.moved(value, takes_device and place == (function is torch.Tensor.to)) for place, value in enumerate(args)),
            **options,
        )

    @staticmethod
    def moved(value: Any, is_device: bool) -> Any:
        """Return the CPU in the place of a GPU; a number is one where it can be nothing else."""
        named = isinstance(value, str) and value.startswith("cuda")
        known = isinstance(value, torch.device) and value.type == "cuda"
        return torch.device("cpu") if named or known or (is_device and type(value) is int) else value


# --- one test ----------------------------------------------------------------------------------------------------------------


def tests() -> type[Any]:
    """Return torch's test case, on gloo."""
    os.environ.update(BACKEND="gloo", PYTORCH_PRINT_REPRO_ON_FAILURE="0", WORLD_SIZE=str(RANKS), TEMP_DIR=tempfile.mkdtemp())
    move_to_cpu()
    from torch.testing._internal.distributed import distributed_test

    base = distributed_test.DistributedTest._DistTestBase
    return type("TestGloo", (distributed_test.TestDistBackend, base), {})


def wanted(case: type[Any], only: str) -> list[str]:
    """Return the names of the tests that build DDP or SyncBatchNorm, themselves or by what they call."""
    names = [name for name in dir(case) if name.startswith("test_")]
    return [name for name in names if only.lower() in name.lower() and _concerns(case, name, set())]


def _concerns(case: type[Any], name: str, seen: set[str]) -> bool:
    if name in seen:
        return False
    seen.add(name)
    source = inspect.getsource(inspect.unwrap(getattr(case, name)))
    called = set(re.findall(r"self\.(_\w+)\(", source))
    return bool(WANTED.search(source)) or any(_concerns(case, other, seen) for other in called if _is_own(case, other))


def _is_own(case: type[Any], name: str) -> bool:
    function = inspect.unwrap(getattr(case, name, None))  # type: ignore[arg-type]
    return inspect.isfunction(function) and function.__module__.endswith("distributed_test")


def _rank(case: type[Any], name: str, rank: int, ours: bool, folder: str, said: Connection) -> None:
    """Run a test as one rank of it, and say why it failed; empty where it passed."""
    os.environ.update(TEMP_DIR=folder, RANK=str(rank))
    text = io.StringIO()
    try:
        with redirect_stdout(text), redirect_stderr(text):
            why = _passed(case, name, rank, ours, folder)
    except BaseException as error:
        # SystemExit is how these tests skip.
        why = f"skipped ({error})" if isinstance(error, SystemExit | unittest.SkipTest) else _why(error)
    said.send(why)
    said.close()
    os._exit(0)


def _passed(case: type[Any], name: str, rank: int, ours: bool, folder: str) -> str:
    torch.set_num_threads(1)
    put_in_place(case, ours)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=MOST_S / 2)
    )
    test = case(name)
    test.rank = rank
    test.file_name = f"{folder}/shared"
    with OnCpu():
        getattr(test, name)()
    return ""


def _why(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "harness" in frame.filename]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames[-1:] else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"


def run(case: type[Any], name: str, ours: bool) -> str:
    """Return why a test fails, of the first rank that said so; empty where it passes."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        for part in ("barrier", "test_dir", "init_dir"):
            Path(folder, part).mkdir()
        pairs = [context.Pipe(duplex=False) for _ in range(RANKS)]
        ranks = [context.Process(target=_rank, args=(case, name, rank, ours, folder, pairs[rank][1])) for rank in range(RANKS)]
        for process, (_, mine) in zip(ranks, pairs, strict=True):
            process.start()
            mine.close()
        answers = _answers([pair[0] for pair in pairs])
        for process in ranks:
            process.kill()
            process.join()
    return next((answer for answer in answers if answer), "")


def _answers(readers: Sequence[Connection]) -> list[str]:
    """Return what ranks said, until all or one that failed, and a while for the others, have."""
    said: list[str] = []
    left, end = list(readers), time.monotonic() + MOST_S
    while left and time.monotonic() < end:
        for reader in wait(left, max(0, end - time.monotonic())):
            assert isinstance(reader, Connection)
            left.remove(reader)
            try:
                said.append(reader.recv())
            except EOFError:
                said.append("the process died")
            if said[-1]:
                end = min(end, time.monotonic() + 1)
    return said if not left or any(said) else ["hangs"]


# --- the page ----------------------------------------------------------------------------------------------------------------


def page(outcomes: Sequence[Outcome]) -> str:
    """Return docs/ddp-tests.md."""
    lines = [*summary(outcomes), "", "| test | torch's | ours |", "| --- | --- | --- |"]
    lines += [f"| {o.name} | {_cell(o.torch)} | {_cell(o.ours)} |" for o in outcomes if not (o.torch and o.ours)]
    return PAGE.format(ranks=RANKS) + "\n".join([*lines, ""])


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the counts."""
    norms = [o for o in outcomes if "SyncBatchNorm" in o.name]
    lines = []
    for title, some in (("DDP", [o for o in outcomes if o not in norms]), ("SyncBatchNorm", norms)):
        passed = sum(not o.torch for o in some)
        both, alone = sum(not (o.torch or o.ours) for o in some), sum(bool(o.torch) and not o.ours for o in some)
        here = f"{passed} pass here with torch's, {both} of these with ours; {alone} more with ours alone"
        lines.append(f"- Of {len(some)} tests of {title}, {here}.")
    return lines


def _cell(why: str) -> str:
    return why.replace("|", "/") if why else "passes"


def main() -> int:
    """Run all tests, and write the page; 1 where one passes with torch's classes and not with ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="tests whose name has this in it")
    parser.add_argument("--page", type=Path, default=Path(__file__).parents[1] / "docs" / "ddp-tests.md")
    parser.add_argument("--stdout", action="store_true", help="print the page instead of writing it")
    asked = parser.parse_args()
    case = tests()
    outcomes = []
    for name in wanted(case, asked.only):
        outcomes.append(Outcome(name, run(case, name, ours=False), run(case, name, ours=True)))
        print(f"{name}: torch's {_cell(outcomes[-1].torch)}; ours {_cell(outcomes[-1].ours)}", file=sys.stderr, flush=True)
    if asked.stdout:
        print(page(outcomes))
    else:
        asked.page.write_text(page(outcomes), encoding="utf-8")
        print(*summary(outcomes), sep="\n")
    return int(any(o.ours and not o.torch for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
