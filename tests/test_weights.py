"""Weights are written full and plainly named, and read whole, in part, or not at all, in one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from harness.errors import ConfigError
from harness.export import main
from harness.training.weights import load_weights, read_weights, save_weights
from tests.test_checkpoint import Program


class Tied(nn.Module):
    """A model with a tied parameter, a frozen one, and a buffer."""

    def __init__(self, size: int = 10, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(size, 4)
        self.head = nn.Linear(4, size, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("seen", torch.arange(6.0).reshape(2, 3).t())


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_weights_are_read_without_us(tmp_path: Path) -> None:
    model, other = Tied(), Tied(seed=1)
    file = save_weights(model.state_dict(), tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert load_model(other, str(file)) == (set(), [])
    assert same(model, other) and other.head.weight is other.embedding.weight
    assert sorted(load_file(file)) == ["embedding.weight", "frozen", "seen"]


def test_weights_are_read_by_us(tmp_path: Path) -> None:
    model, other = Tied(), Tied(seed=1)
    file = save_weights(model.state_dict(), tmp_path / "model.safetensors")
    assert load_weights(other, tmp_path) == f"Weights of {file}: 4 of the model's 4 tensors taken over."
    assert same(model, other) and other.head.weight is other.embedding.weight


@pytest.mark.parametrize(
    "buffer", [torch.ones(2, dtype=torch.complex128), torch.ones(2, 2).to_sparse()], ids=["complex128", "sparse"]
)
def test_what_safetensors_cannot_hold_is_written_by_torch(tmp_path: Path, buffer: torch.Tensor) -> None:
    model = nn.Linear(2, 2)
    save_weights(model.state_dict(), tmp_path / "model.safetensors")
    model.register_buffer("odd", buffer)
    file = save_weights(model.state_dict(), tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"] == [file.name]
    assert set(torch.load(file)) == {"weight", "bias", "odd"} and set(read_weights(file)) == {"weight", "bias", "odd"}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_names_lose_what_wrappers_put_before_them(tmp_path: Path, prefix: str) -> None:
    model, file = nn.Linear(2, 2), tmp_path / "weights.pt"
    torch.save({"model": {f"{prefix}{name}": value for name, value in model.state_dict().items()}, "step": 3}, file)
    other = nn.Linear(2, 2)
    load_weights(other, file)
    assert same(model, other)


def test_another_model_is_refused_or_read_in_part(tmp_path: Path) -> None:
    save_weights(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5)).state_dict(), tmp_path / "model.safetensors")
    other = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 7), nn.Linear(7, 1, bias=False))
    differences = "'1.weight' is [5, 3] there and [7, 3] here; '1.bias' is [5] there and [7] here; '2.weight' is missing there"
    with pytest.raises(ConfigError, match=re.escape(f"another model: {differences}. weights_partial=true takes over")):
        load_weights(other, tmp_path)
    told = load_weights(other, tmp_path, partial=True)
    assert told.endswith(f"2 of the model's 5 tensors taken over, and not: {differences}.")
    with pytest.raises(ConfigError, match=r"'2\.weight' is missing there"):
        load_weights(nn.ModuleDict({"2": nn.Linear(1, 1)}), tmp_path, partial=True)


def test_views_of_one_memory_are_tensors_of_their_own(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("row", torch.arange(6.0)[2:4])
    model.register_buffer("wide", torch.ones(1).expand(4))
    model.register_buffer("all", model.row)
    save_weights(model.state_dict(), tmp_path / "model.safetensors")
    weights = read_weights(tmp_path / "model.safetensors")
    assert weights["row"].tolist() == weights["all"].tolist() == [2.0, 3.0] and weights["wide"].tolist() == [1.0] * 4


def test_weights_are_data(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save({"weight": Program(tmp_path / "ran")}, file)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_weights(nn.Linear(1, 1), file)
    assert not (tmp_path / "ran").exists()
    file.write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_weights(nn.Linear(1, 1), file)
    torch.save([1, 2], file)
    with pytest.raises(ConfigError, match="holds no weights"):
        load_weights(nn.Linear(1, 1), file)


def test_where_there_are_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_weights(nn.Linear(1, 1), tmp_path / "no.safetensors")
    with pytest.raises(ConfigError, match=r"no job has left weights there\.$"):
        load_weights(nn.Linear(1, 1), tmp_path)
    (tmp_path / "0").mkdir()
    save_weights(nn.Linear(1, 1).state_dict(), tmp_path / "0" / "model.safetensors")
    with pytest.raises(ConfigError, match=re.escape(f"Did you mean weights={tmp_path}/0?")):
        load_weights(nn.Linear(1, 1), tmp_path)


def test_the_export_command_takes_weights_out_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Tied()
    torch.save({"model": model.state_dict(), "step": 3}, tmp_path / "checkpoint.pt")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "model.safetensors")
    other = Tied(seed=1)
    load_model(other, str(tmp_path / "model.safetensors"))
    assert same(model, other)
    assert main([str(tmp_path / "nothing")]) == 1 and "there is no such file" in capsys.readouterr().err
    assert main([str(tmp_path), "x.bin"]) == 1 and "must end in .safetensors" in capsys.readouterr().err
