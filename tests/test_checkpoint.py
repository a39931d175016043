"""Checkpoints are whole at every moment, go on in bits, and fit any number of ranks and bare torch."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from harness.errors import ConfigError, HarnessError
from harness.training import checkpoint
from harness.training.seat import Seat
from harness.training.trainer import Trainer
from tests import toys
from tests.ranks import Outcomes, groups_of
from tests.test_trainer import ALONE, trainer

SIZES = (2, 3)


class Rich(toys.Scheduled):
    """All that has a state: Adam, a scheduler, BatchNorm, dropout, and a data set that draws."""

    def __init__(self, width: int = 5) -> None:
        super().__init__(12, optimizer="adam", batch_norm=True, dropout=0.5)
        self.width = width

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, self.width), nn.BatchNorm1d(self.width), nn.Dropout(0.5), nn.Linear(self.width, 1))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * (1 + numpy.random.rand())


def rich(seat: Seat = ALONE, width: int = 5, **settings: Any) -> Trainer:
    return trainer(Rich(width), seat, **{"steps": 8, "global_batch_size": 6, **settings})


def take(made: Trainer, begin: int, end: int) -> list[tuple[Any, ...]]:
    """Take steps ``begin`` to ``end``; return what came of each."""
    found = []
    for number, (batch, loaded) in enumerate(made.steps(begin), begin):
        result = made.step(batch, loaded)
        found.append((list(batch), result.loss_sum, made.lr, made.digests()))
        if number + 1 == end:
            break
    return found


def twice(seat: Seat, folder: Path) -> dict[str, Any]:
    """Take 8 steps; take 3, save, and 5 more in a trainer that was made anew; the same with an epoch's end in between."""
    whole = take(rich(seat), 0, 8)
    path = folder / f"checkpoint-{seat.world_size}.pt"
    found = []
    for middle in (3, 6):
        made = rich(seat)
        first = take(made, 0, middle)
        checkpoint.save(made, path, middle)
        torch.manual_seed(99)
        again = rich(seat)
        found.append(first + take(again, checkpoint.load(again, path), 8))
    return {"whole": whole, "found": found, "keys": list(made.model.state_dict())}


def of_others(seat: Seat, folder: Path) -> dict[str, Any]:
    """Load what 2 ranks saved, in 3; the steps after it have the same batches and learning rates."""
    made = rich(seat)
    if seat.world_size == 2:
        return {}
    begin = checkpoint.load(made, folder / "checkpoint-2.pt")
    born = made.digests()
    mask = nn.functional.dropout(torch.ones(64))
    return {"begin": begin, "born": born, "mask": mask, "rest": take(made, begin, 8)}


CASES: dict[str, Callable[[Seat, Path], dict[str, Any]]] = {"twice": twice, "of others": of_others}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def outcomes(shared: Path) -> Iterator[Outcomes]:
    with groups_of("tests.test_checkpoint", shared) as outcomes:
        outcomes.of(2, "twice")  # 3 ranks load what these save
        yield outcomes


@pytest.mark.ranks
@pytest.mark.parametrize("size", SIZES)
def test_going_on_is_the_same_in_bits(outcomes: Outcomes, size: int) -> None:
    for result in outcomes.of(size, "twice"):
        for found in result["found"]:
            assert found == result["whole"]


def test_one_rank_goes_on_in_bits_too(tmp_path: Path) -> None:
    result = twice(ALONE, tmp_path)
    assert result["found"] == [result["whole"]] * 2


def test_a_training_of_another_length_goes_on_by_its_own_schedule(tmp_path: Path) -> None:
    made = rich(steps=8)
    take(made, 0, 8)
    checkpoint.save(made, tmp_path / "checkpoint.pt", 8)
    longer = [step[2] for step in take(rich(steps=12), 0, 12)]
    again = rich(steps=12)
    begin = checkpoint.load(again, tmp_path / "checkpoint.pt")
    assert again.lr == longer[7] and [step[2] for step in take(again, begin, 12)] == longer[8:]


@pytest.mark.ranks
def test_3_ranks_go_on_from_2(outcomes: Outcomes) -> None:
    results, saved = outcomes.of(3, "of others"), outcomes.of(2, "twice")[0]
    for result in results:
        assert result["begin"] == 6
        assert result["born"] == saved["whole"][5][3]
        assert [step[0] for step in result["rest"]] == [step[0] for step in saved["whole"][6:]]
        assert [step[2] for step in result["rest"]] == [step[2] for step in saved["whole"][6:]]
    assert len({tuple(result["mask"].tolist()) for result in results}) == 3


@pytest.mark.ranks
def test_1_rank_and_bare_torch_go_on_from_2(outcomes: Outcomes, shared: Path) -> None:
    saved = outcomes.of(2, "twice")[0]
    made = rich()
    assert checkpoint.load(made, shared / "checkpoint-2.pt") == 6
    assert made.digests() == saved["whole"][5][3]
    content = torch.load(shared / "checkpoint-2.pt")
    bare = Rich().model().double()
    bare.load_state_dict(content["model"])
    Rich().optimizer(bare).load_state_dict(content["optimizer"])
    assert list(content["model"]) == list(bare.state_dict()) == saved["keys"]
    assert [p.tolist() for p in bare.parameters()] == [p.tolist() for p in made.model.parameters()]


@pytest.mark.ranks
def test_names_are_the_same_at_any_number_of_ranks(outcomes: Outcomes, tmp_path: Path) -> None:
    assert outcomes.of(2, "twice")[0]["keys"] == outcomes.of(3, "twice")[0]["keys"] == twice(ALONE, tmp_path)["keys"]


# --- written whole --------------------------------------------------------------------------------------------------


def dies_in(replaced: str, before_it: bool) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what makes this process kill itself at a call while it saves."""

    def arrange(patch: pytest.MonkeyPatch) -> None:
        owner, _, name = replaced.rpartition(".")
        target: Any = {"torch": torch, "os": os, "Path": Path}[owner]
        right = getattr(target, name)

        def dying(*args: Any, **kwargs: Any) -> Any:
            if replaced == "torch.save":
                args[1].write(b"half of it")
                args[1].flush()
            elif not before_it:
                right(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        patch.setattr(target, name, dying)

    return arrange


@pytest.mark.parametrize(
    ("arrange", "step"),
    [
        (dies_in("torch.save", True), 2),
        (dies_in("os.fsync", True), 2),
        (dies_in("os.fsync", False), 2),
        (dies_in("Path.replace", True), 2),
        (dies_in("Path.replace", False), 4),
    ],
    ids=["half written", "written", "on disk", "before the name", "after the name"],
)
def test_a_killed_writer_leaves_the_old_checkpoint_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrange: Callable[[pytest.MonkeyPatch], None], step: int
) -> None:
    path, made = tmp_path / "checkpoint.pt", rich()
    take(made, 0, 2)
    checkpoint.save(made, path, 2)
    child = os.fork()
    if child == 0:
        try:
            arrange(monkeypatch)
            checkpoint.save(made, path, 4)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert torch.load(path)["step"] == step
    checkpoint.save(made, path, 6)
    assert (torch.load(path)["step"], [file.name for file in tmp_path.iterdir()]) == (6, ["checkpoint.pt"])


# --- mistakes -------------------------------------------------------------------------------------------------------


def test_a_folder_of_a_run_is_as_good_as_the_file(odd_path: Path) -> None:
    made = rich()
    take(made, 0, 2)
    checkpoint.save(made, odd_path / "checkpoint.pt", 2)
    assert checkpoint.load(rich(), odd_path) == checkpoint.load(rich(), odd_path / "checkpoint.pt") == 2


def test_a_checkpoint_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"resume={tmp_path}: there is no checkpoint there. checkpoint_every=N writes some."):
        checkpoint.load(rich(), tmp_path)
    with pytest.raises(ConfigError, match=f"resume={tmp_path}/x: there is no checkpoint there."):
        checkpoint.load(rich(), tmp_path / "x")


def test_the_folder_of_a_sweep_leads_to_that_of_its_job(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "checkpoint.pt").write_text("")
    with pytest.raises(ConfigError, match=f"Did you mean resume={tmp_path}/0?"):
        checkpoint.load(rich(), tmp_path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no checkpoint")
    said = f"resume={path} cannot be read as a checkpoint: it is damaged, or something else has written it."
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        checkpoint.load(rich(), path)
    torch.save(rich().model.state_dict(), path)
    with pytest.raises(ConfigError, match="is no checkpoint of a run: it has no model, optimizer, random, scheduler, step"):
        checkpoint.load(rich(), path)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    class Alone(Rich):
        scheduler = None

    class Plain(Rich):
        def optimizer(self, model: nn.Module) -> Any:
            return torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)

    path = tmp_path / "checkpoint.pt"
    checkpoint.save(rich(), path, 2)
    with pytest.raises(ConfigError, match=r"the checkpoint is of another model. size mismatch for 0.weight"):
        checkpoint.load(rich(width=7), path)
    with pytest.raises(ConfigError, match="the checkpoint is of another optimizer"):
        checkpoint.load(trainer(Plain()), path)
    with pytest.raises(ConfigError, match="the checkpoint has a scheduler, and the recipe has none"):
        checkpoint.load(trainer(Alone()), path)


def test_what_goes_on_is_told_before_anything_is_verified(tmp_path: Path) -> None:
    path, plan = tmp_path / "checkpoint.pt", rich().plan
    checkpoint.save(rich(), path, 2)
    assert checkpoint.look(tmp_path, plan, 1) == f"The training of {tmp_path} goes on after step 2 of 8."
    other = dataclasses.replace(plan, seed=7, steps=9, global_batch_size=4, compare="full", recipe={**plan.recipe, "lr": 2})
    told = checkpoint.look(path, other, 3)
    for said in (
        "after step 2 of 9",
        "nprocs is 3 and was 1",
        "seed is 7 and was 0",
        "global_batch_size is 4 and was 6",
        "Set otherwise",
    ):
        assert said in told
    assert "compare" not in told
    with pytest.raises(ConfigError, match=r"has 2 steps behind it, .* has 2 in all. None is left: use steps=3"):
        checkpoint.look(path, dataclasses.replace(plan, steps=2), 1)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ConfigError, match="cannot be read as a checkpoint: it is damaged"):
        checkpoint.look(path, plan, 1)


def test_a_run_without_a_step_left_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(rich(), path, 8)
    with pytest.raises(ConfigError, match=r"has 8 steps behind it, .* has 8 in all. None is left: use steps=9"):
        checkpoint.load(rich(), path)
    assert checkpoint.load(rich(steps=9), path) == 8


def with_content(path: Path, **changed: Any) -> Path:
    """Return the path of a checkpoint in which these entries are others."""
    checkpoint.save(rich(), path, 2)
    torch.save({**torch.load(path), **changed}, path)
    return path


class Program:
    """What runs code when it is unpickled without care."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_checkpoint_is_data_and_never_a_program(tmp_path: Path) -> None:
    path = with_content(tmp_path / "checkpoint.pt", settings=Program(tmp_path / "ran"))
    for read in (lambda: checkpoint.look(path, rich().plan, 1), lambda: checkpoint.load(rich(), path)):
        with pytest.raises(ConfigError, match=r"is no checkpoint: it holds posix\.mkdir, which is a program, and no data\."):
            read()
    assert not (tmp_path / "ran").exists()


def test_a_flipped_bit_is_seen_in_every_part(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    checkpoint.save(rich(), path, 2)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        parts = [(entry.header_offset, archive.read(entry)) for entry in archive.infolist() if entry.file_size >= 40]
    assert len(parts) >= 7
    for begin, content in parts:
        flipped = bytearray(whole)
        flipped[whole.index(content, begin) + len(content) // 2] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(ConfigError, match="cannot be read as a checkpoint: it is damaged"):
            checkpoint.load(rich(), path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step": 5.7}, r"its step is 5\.7"),
        ({"step": True}, "its step is True"),
        ({"step": -1}, "its step is -1"),
        ({"model": [1, 2]}, r"its model is \[1, 2\]"),
        ({"optimizer": "adam"}, "its optimizer is 'adam'"),
        ({"random": None}, "its random is None"),
        ({"settings": 3}, "its settings is 3"),
    ],
)
def test_an_odd_entry_is_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    path = with_content(tmp_path / "checkpoint.pt", **changed)
    with pytest.raises(ConfigError, match=f"is no checkpoint of a run: {message}"):
        checkpoint.load(rich(), path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"resume={path} is no checkpoint: it is a pipe, a device or the like"):
            checkpoint.load(rich(), path)


def test_a_full_disk_costs_the_new_checkpoint_and_not_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = tmp_path / "checkpoint.pt", rich()
    checkpoint.save(made, path, 2)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    said = f"The checkpoint after step 4 cannot be written: No space left on device. The one before it is whole: {path}."
    with pytest.raises(HarnessError, match=f"^{re.escape(said)}$"):
        checkpoint.save(made, path, 4)
    assert (torch.load(path)["step"], [file.name for file in tmp_path.iterdir()]) == (2, ["checkpoint.pt"])


def test_a_state_that_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    class Odd(Rich):
        def optimizer(self, model: nn.Module) -> Any:
            return torch.optim.SGD([{"params": list(model.parameters()), "owner": Program(tmp_path)}], lr=0.1)

    with pytest.raises(ConfigError, match="the optimizer's state holds what is no data"):
        checkpoint.save(trainer(Odd(), checkpoint_every=1), tmp_path / "checkpoint.pt", 2)
    assert list(tmp_path.iterdir()) == []
