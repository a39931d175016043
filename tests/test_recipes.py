"""The recipes: data in, loss out, and the published numbers; no process is started."""

from __future__ import annotations

import copy
import gzip
import importlib
import inspect
import itertools
import math
import random
import re
import struct
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # the first optimizer would import it inside a test, and it sets an environment variable for good
from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import default_collate

from recipes.data import dates
from recipes.data.dates import date_pairs
from recipes.data.image_folder import ImageFolder, read_image
from recipes.data.text_pairs import TextPairs, batches_by_length, read_lines
from recipes.data.vocabulary import BOS, EOS, PAD, UNK, Vocabulary, words
from recipes.encoder_decoder import EncoderDecoder, Shape, greedy, positions
from recipes.mnist import Mnist
from recipes.se_resnext import SEResNeXt
from recipes.sparse_adam import SparseDenseAdam
from recipes.transformer import Transformer

CONF = Path(__file__).parents[1] / "conf" / "recipe"
MULTI30K = Path(__file__).resolve().parents[2] / "shared" / "data" / "multi30k"
RECIPES: tuple[Callable[[], Any], ...] = (Mnist, SEResNeXt, Transformer)

needs_multi30k = pytest.mark.skipif(
    not MULTI30K.is_dir(), reason=f"Multi30k is not at {MULTI30K}; it is not part of the project"
)


def collate_of(recipe: Any) -> Callable[[Sequence[Any]], Any]:
    return getattr(recipe, "collate", default_collate)


def a_batch(recipe: Any, numbers: Sequence[int]) -> Any:
    dataset = recipe.dataset()
    return collate_of(recipe)([dataset[number] for number in numbers])


def mean_loss(recipe: Any, model: nn.Module, batch: Any) -> Tensor:
    loss = recipe.loss(model, batch)
    return loss[0] / loss[1] if isinstance(loss, tuple) else loss


def train(recipe: Any, batches: Sequence[Any], seed: int = 0) -> tuple[nn.Module, list[float]]:
    """Return a model after one step on each batch, and the loss at each step."""
    torch.manual_seed(seed)
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    takes_steps = len(inspect.signature(recipe.scheduler).parameters) == 2
    scheduler = recipe.scheduler(optimizer, len(batches)) if takes_steps else recipe.scheduler(optimizer)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = mean_loss(recipe, model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return model, losses


def learning_rates(recipe: Any, num_steps: int) -> list[float]:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = recipe.optimizer(nn.ParameterList([parameter]))
    takes_steps = len(inspect.signature(recipe.scheduler).parameters) == 2
    scheduler = recipe.scheduler(optimizer, num_steps) if takes_steps else recipe.scheduler(optimizer)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- all three -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["allreduce", "mnist", "se_resnext", "transformer"])
def test_the_yaml_has_exactly_the_keys_and_defaults_of_the_class(name: str) -> None:
    settings: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    module, _, class_name = settings["recipe"].pop("_target_").rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), class_name)).parameters
    assert settings["recipe"] == {key: parameter.default for key, parameter in parameters.items()}


@pytest.mark.parametrize("name", ["allreduce", "mnist", "se_resnext", "transformer"])
def test_the_yaml_starts_with_the_command_and_explains_each_key(name: str) -> None:
    lines = (CONF / f"{name}.yaml").read_text().splitlines()
    # Hydra reads the package from the first line only.
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith(f"# python run.py recipe={name} ")
    unexplained = [line for line in lines[5:] if line.strip() and "#" not in line]
    assert [line for line in unexplained if "eval_target" not in line and "_target_" not in line] == []


@pytest.mark.parametrize("make", RECIPES)
@pytest.mark.parametrize("size", [1, 3])
def test_two_steps_with_any_batch_size(make: Callable[[], Any], size: int) -> None:
    recipe = make()
    batches = [a_batch(recipe, range(step * size, (step + 1) * size)) for step in range(2)]
    _, losses = train(recipe, batches)
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("make", RECIPES)
def test_the_same_seed_gives_the_same_model_and_every_parameter_a_gradient(make: Callable[[], Any]) -> None:
    recipe = make()
    batch = a_batch(recipe, range(8))
    torch.manual_seed(3)
    first = recipe.model()
    torch.manual_seed(3)
    second = make().model()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    mean_loss(recipe, first, batch).backward()
    assert [name for name, parameter in first.named_parameters() if parameter.grad is None or not parameter.grad.any()] == []


@pytest.mark.parametrize("make", RECIPES)
def test_evaluation_counts_every_sample_once_however_it_is_split(make: Callable[[], Any]) -> None:
    recipe = make()
    dataset, collate = recipe.eval_dataset(), collate_of(recipe)
    torch.manual_seed(0)
    model = recipe.model().double().eval()
    with torch.no_grad():
        whole = recipe.evaluate(model, collate([dataset[i] for i in range(9)]))
        parts = [recipe.evaluate(model, collate([dataset[i] for i in part])) for part in (range(1), range(1, 9))]
    assert set(whole) >= {"loss"}
    for name, (total, count) in whole.items():
        assert count == sum(int(part[name][1]) for part in parts)
        assert float(total) == pytest.approx(sum(float(part[name][0]) for part in parts), rel=1e-12)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (Mnist, {"width": 0}, "recipe.width=0 is not a whole number of at least 1"),
        (Mnist, {"hidden": 1.5}, "recipe.hidden=1.5 is not a whole number"),
        (Mnist, {"dropout": 1}, "recipe.dropout=1 is not a number from 0 to less than 1"),
        (Mnist, {"lr": "fast"}, "recipe.lr=fast is not a number greater than 0"),
        (SEResNeXt, {"depth": 34}, "recipe.depth=34 is not a depth of SE-ResNeXt: type one of 11, 50, 101, 152"),
        (SEResNeXt, {"cardinality": 7}, "recipe.cardinality=7 does not divide the 32 channels"),
        (SEResNeXt, {"image_size": 16}, "recipe.image_size=16 is too small for this depth: type 17 or more"),
        (SEResNeXt, {"depth": 50, "image_size": 32}, "recipe.image_size=32 is too small for this depth: type 33 or more"),
        (SEResNeXt, {"num_classes": 9}, "recipe.num_classes=9 is less than the data's 10 classes"),
        (SEResNeXt, {"eval_root": "x"}, "recipe.eval_root=x needs images to train on"),
        (Transformer, {"width": 30}, "recipe.width=30 is not even or not a multiple of recipe.num_heads=4"),
        (Transformer, {"pre_norm": "yes"}, "recipe.pre_norm=yes is neither true nor false"),
        (Transformer, {"share_embeddings": True, "sparse_embeddings": True}, "sparse_embeddings=true does not go with"),
        (Transformer, {"eps": 0}, "recipe.eps=0 is not a number greater than 0"),
    ],
)
def test_bad_settings_are_named_as_typed(make: Callable[..., Any], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**settings)


# --- digits ----------------------------------------------------------------------------------------------------------


def write_idx(path: Path, values: np.ndarray[Any, Any], magic: int | None = None) -> None:
    content = struct.pack(">I", 0x800 + values.ndim if magic is None else magic)
    content += struct.pack(f">{values.ndim}I", *values.shape) + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_digits(root: Path, suffix: str = "", num_train: int = 5, num_test: int = 3) -> None:
    draw = np.random.default_rng(0)
    for prefix, number in (("train", num_train), ("t10k", num_test)):
        write_idx(root / f"{prefix}-images-idx3-ubyte{suffix}", draw.integers(0, 256, (number, 28, 28)))
        write_idx(root / f"{prefix}-labels-idx1-ubyte{suffix}", np.arange(number) % 10)


def test_mnist_ships_8000_and_2000_digits_none_of_them_twice() -> None:
    recipe = Mnist()
    train_images, train_labels = recipe.dataset().tensors
    test_images, test_labels = recipe.eval_dataset().tensors
    assert (train_images.shape, train_images.dtype) == ((8000, 1, 28, 28), torch.uint8)
    assert (test_images.shape, test_labels.dtype) == ((2000, 1, 28, 28), torch.int64)
    assert set(train_labels.tolist()) == set(test_labels.tolist()) == set(range(10))
    assert len({image.numpy().tobytes() for image in torch.cat([train_images, test_images])}) == 10_000


def test_mnist_logits_and_parameters() -> None:
    model = Mnist().model()
    assert model(torch.zeros(1, 1, 28, 28, dtype=torch.uint8)).shape == (1, 10)
    assert num_parameters(model) == 207_178


def test_mnist_learns() -> None:
    recipe = Mnist()
    dataset = recipe.dataset()
    model, losses = train(recipe, [default_collate([dataset[64 * step + i] for i in range(64)]) for step in range(60)])
    images, labels = recipe.eval_dataset().tensors
    with torch.no_grad():
        accuracy, count = recipe.evaluate(model.eval(), (images, labels))["accuracy"]
    assert losses[0] == pytest.approx(math.log(10), abs=0.1)
    assert accuracy / count > 0.85


def test_mnist_schedule_rises_falls_and_never_stands_at_zero() -> None:
    rates = learning_rates(Mnist(), 100)
    assert rates[0] == pytest.approx(0.005)
    assert max(rates) == rates[9] == pytest.approx(0.05)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] > 0
    assert learning_rates(Mnist(), 1) == [pytest.approx(0.05)]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_reads_a_folder(odd_path: Path, suffix: str) -> None:
    write_digits(odd_path, suffix)
    recipe = Mnist(root=str(odd_path))
    assert (len(recipe.dataset()), len(recipe.eval_dataset())) == (5, 3)
    image, label = recipe.dataset()[4]
    assert (image.shape, int(label)) == ((1, 28, 28), 4)
    assert image.max() > 200


def test_mnist_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not a folder: type the folder that holds train-images-idx3-ubyte"):
        Mnist(root=str(tmp_path / "nowhere"))
    write_digits(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=r"holds neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte\.gz"):
        Mnist(root=str(tmp_path))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def broken_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(path.read_bytes())[:-20])


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("train-images-idx3-ubyte", cut_short, "declares 5 x 28 x 28 bytes but holds 3918"),
        ("train-labels-idx1-ubyte", broken_gzip, "is damaged or cut short"),
        ("train-images-idx3-ubyte", lambda p: p.write_bytes(b"GIF89a"), "is no IDX file of 3 dimensions: its magic number is"),
        ("train-labels-idx1-ubyte", lambda p: write_idx(p, np.zeros(5), magic=0x803), "magic number is 2051, not 2049"),
        ("train-labels-idx1-ubyte", lambda p: write_idx(p, np.zeros(6)), "5 images but train-labels-idx1-ubyte holds 6 labels"),
        (
            "train-labels-idx1-ubyte",
            lambda p: write_idx(p, np.full(5, 11)),
            "holds the label 11; those of digits go from 0 to 9",
        ),
        (
            "train-images-idx3-ubyte",
            lambda p: write_idx(p, np.zeros((5, 32, 28))),
            "images of 32 x 28 pixels; they must be 28 x 28",
        ),
        ("train-images-idx3-ubyte", lambda p: p.write_bytes(b""), "is no IDX file"),
    ],
)
def test_mnist_refuses_files_that_are_not_what_they_should_be(
    tmp_path: Path, name: str, spoil: Callable[[Path], Any], message: str
) -> None:
    write_digits(tmp_path)
    spoil(tmp_path / name)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        Mnist(root=str(tmp_path)).dataset()
    assert name in str(raised.value)


def test_mnist_refuses_an_empty_set(tmp_path: Path) -> None:
    write_digits(tmp_path, num_train=0)
    with pytest.raises(ValueError, match="train-images-idx3-ubyte holds no images"):
        Mnist(root=str(tmp_path)).dataset()


# --- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "parameters"),
    [
        # 50 and 101 are the numbers of the published 32x4d networks (timm, pretrainedmodels). Of 152 there is none to compare
        # with: this is PaddlePaddle's form, with 64 groups of 2 channels and three convolutions in the stem.
        (50, 27_559_896),
        (101, 48_955_416),
        (152, 64_858_200),
        (11, 403_476),
    ],
)
def test_se_resnext_has_the_published_number_of_parameters(depth: int, parameters: int) -> None:
    with torch.device("meta"):
        model = SEResNeXt(depth=depth, image_size=224, num_classes=1000).model()
    assert num_parameters(model) == parameters


@pytest.mark.parametrize(
    ("depth", "cardinality", "stem"), [(50, 32, (64, 3, 7, 7)), (101, 32, (64, 3, 7, 7)), (152, 64, (64, 3, 3, 3))]
)
def test_se_resnext_is_as_published(depth: int, cardinality: int, stem: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model = SEResNeXt(depth=depth, image_size=224, num_classes=102).model()
        features = model.blocks(model.stem(torch.empty(2, 3, 224, 224)))
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert convolutions[0].weight.shape == stem
    assert {module.groups for module in convolutions} == {1, cardinality}
    assert features.shape == (2, 2048, 7, 7)
    assert model.blocks[0].excitation.squeeze.weight.shape == (256 // 16, 256)
    # Each block counts 3; the stem 1, of which 152 has two more; the classifier 1.
    assert 3 * len(model.blocks) + 2 == depth


def test_se_resnext_50_of_full_size_takes_a_batch_of_one() -> None:
    recipe = SEResNeXt(depth=50, image_size=224, num_classes=102)
    torch.manual_seed(0)
    with torch.no_grad():
        logits = recipe.model()(torch.randint(256, (1, 3, 224, 224), dtype=torch.uint8))
    assert logits.shape == (1, 102)
    assert logits.isfinite().all()


def test_se_resnext_optimizer_and_schedule() -> None:
    recipe = SEResNeXt(lr=0.2)
    group = recipe.optimizer(recipe.model()).param_groups[0]
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.9, 1e-4, False)
    rates = learning_rates(recipe, 8)
    assert rates == [pytest.approx(0.1 * (1 + math.cos(math.pi * step / 8))) for step in range(8)]


def test_se_resnext_drops_features_only_in_training() -> None:
    recipe = SEResNeXt(dropout=0.5)
    torch.manual_seed(0)
    model = recipe.model()
    images, _ = a_batch(recipe, range(4))
    model(images)
    model.eval()
    assert torch.equal(model(images), model(images))
    model.dropout.train()
    assert not torch.equal(model(images), model(images))


@pytest.mark.parametrize("size", [28, 40])
def test_se_resnext_digits_are_grey_images_of_the_size_asked_for(size: int) -> None:
    image, label = SEResNeXt(image_size=size).dataset()[0]
    assert (image.shape, image.dtype, label.dtype) == ((3, size, size), torch.uint8, torch.int64)
    assert torch.equal(image[0], image[2])
    assert image.max() > 200


def picture(path: Path, mode: str = "RGB", size: tuple[int, int] = (40, 30), colour: Any = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour if colour is not None else 0).save(path)


def test_image_folder_numbers_classes_and_images_by_name(odd_path: Path) -> None:
    picture(odd_path / "zebra" / "1.png", colour=(255, 0, 0))
    picture(odd_path / "ant" / "deeper" / "b.JPG", colour=(0, 255, 0))
    picture(odd_path / "ant" / "a.bmp", colour=(0, 0, 255))
    (odd_path / "ant" / "notes.txt").write_text("no image")
    (odd_path / "ant" / ".hidden.png").write_text("no image")
    (odd_path / ".cache").mkdir()
    folder = ImageFolder(odd_path, 20)
    assert folder.classes == ("ant", "zebra")
    labels = [int(label) for _, label in folder]
    brightest = [int(image[:, 10, 10].argmax()) for image, _ in folder]
    assert (labels, brightest) == ([0, 0, 1], [2, 1, 0])
    assert SEResNeXt(root=str(odd_path)).eval_dataset() is None
    images, _ = a_batch(SEResNeXt(root=str(odd_path)), range(3))
    assert SEResNeXt(root=str(odd_path)).model()(images).shape == (3, 2)


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("L", 100, (100, 100, 100)),
        ("1", 1, (255, 255, 255)),
        ("RGB", (10, 20, 30), (10, 20, 30)),
        ("RGBA", (200, 0, 0, 0), (255, 255, 255)),
        ("LA", (50, 255), (50, 50, 50)),
        ("I;16", 100 * 256, (100, 100, 100)),
        ("CMYK", (0, 255, 255, 0), (255, 0, 0)),
    ],
)
@pytest.mark.parametrize("size", [(1, 1), (3, 200), (57, 33)])
def test_images_of_all_kinds_become_rgb_squares(
    tmp_path: Path, mode: str, colour: Any, expected: tuple[int, ...], size: tuple[int, int]
) -> None:
    path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
    picture(path, mode, size, colour)
    image = read_image(path, 24)
    assert (image.shape, image.dtype) == ((3, 24, 24), torch.uint8)
    assert image.flatten(1).unique(dim=1).flatten().tolist() == list(expected)


def test_palette_images_with_and_without_transparency(tmp_path: Path) -> None:
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 9, 8, 7])
    image.save(tmp_path / "opaque.png")
    image.save(tmp_path / "clear.png", transparency=1)
    assert read_image(tmp_path / "opaque.png", 8)[:, 0, 0].tolist() == [9, 8, 7]
    assert read_image(tmp_path / "clear.png", 8)[:, 0, 0].tolist() == [255, 255, 255]


def test_images_are_cut_to_their_middle_square(tmp_path: Path) -> None:
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = 255
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    assert read_image(tmp_path / "wide.png", 10).min() == 255


@pytest.mark.parametrize("content", [b"", b"not an image", None])
def test_an_unreadable_image_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "cats" / "broken one.png"
    picture(path, size=(200, 200))
    path.write_bytes(path.read_bytes()[:100] if content is None else content)
    with pytest.raises(ValueError, match=r"cats/broken one\.png cannot be read as an image"):
        ImageFolder(tmp_path, 20)[0]


def test_folders_without_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"recipe\.root=.*nowhere is not a folder"):
        SEResNeXt(root=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="holds no folders: it must hold one folder of images per class"):
        SEResNeXt(root=str(tmp_path))
    picture(tmp_path / "cats" / "1.png")
    (tmp_path / "dogs").mkdir()
    with pytest.raises(ValueError, match=r"the class folder .*dogs holds no images"):
        SEResNeXt(root=str(tmp_path)).dataset()


def test_images_to_evaluate_on_take_the_numbers_of_the_trained_classes(tmp_path: Path) -> None:
    for name in ("ant", "bee", "cat"):
        picture(tmp_path / "train" / name / "1.png")
    picture(tmp_path / "eval" / "cat" / "1.png")
    recipe = SEResNeXt(root=str(tmp_path / "train"), eval_root=str(tmp_path / "eval"))
    assert [int(label) for _, label in recipe.eval_dataset()] == [2]
    picture(tmp_path / "eval" / "dog" / "1.png")
    with pytest.raises(ValueError, match=r"recipe\.eval_root=.* holds the class folder dog"):
        recipe.eval_dataset()
    with pytest.raises(ValueError, match=r"recipe\.num_classes=2 is less than the data's 3 classes"):
        SEResNeXt(root=str(tmp_path / "train"), num_classes=2)
    assert SEResNeXt(root=str(tmp_path / "train"), num_classes=102).model().classes.out_features == 102


# --- dates -----------------------------------------------------------------------------------------------------------


def test_no_text_means_two_dates() -> None:
    meanings: dict[str, date] = {}
    for offset in range((dates.LAST_DAY - dates.FIRST_DAY).days + 1):
        day = dates.FIRST_DAY + timedelta(days=offset)
        for style in dates.STYLES:
            assert meanings.setdefault(style(day), day) == day


def test_dates_are_disjoint_and_the_same_every_time() -> None:
    train_pairs, eval_pairs = date_pairs()
    assert (len(train_pairs), len(eval_pairs)) == (20_000, 1_000)
    assert not {iso for _, iso in train_pairs} & {iso for _, iso in eval_pairs}
    assert not {text for text, _ in train_pairs} & {text for text, _ in eval_pairs}
    assert date_pairs() == (train_pairs, eval_pairs)
    # Pinned: another Python or another machine must make the same data.
    assert train_pairs[:3] == [("1st of April 1992", "1992-04-01"), ("13-DEC-61", "1961-12-13"), ("5 Sep 1989", "1989-09-05")]
    assert set("".join(text for text, _ in eval_pairs)) <= set("".join(text for text, _ in train_pairs))


def test_dates_are_written_as_people_write_them() -> None:
    written = {style(date(1997, 3, 3)) for style in dates.STYLES} | {style(date(2012, 11, 22)) for style in dates.STYLES}
    assert written >= {
        "3rd of March 1997",
        "Mar 3, 97",
        "Monday, 3 March 1997",
        "3.3.1997",
        "3/3/1997",
        "22nd of November 2012",
    }
    endings = [dates._ordinal(date(2000, 1, day)) for day in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 30, 31)]
    assert " ".join(endings) == "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 23rd 30th 31st"


# --- text pairs ------------------------------------------------------------------------------------------------------


def write_texts(folder: Path, sources: Sequence[str], targets: Sequence[str]) -> dict[str, str]:
    (folder / "text.en").write_text("".join(f"{line}\n" for line in sources), encoding="utf-8")
    (folder / "text.de.gz").write_bytes(gzip.compress("\n".join(targets).encode()))
    return {"source": str(folder / "text.en"), "target": str(folder / "text.de.gz")}


def test_texts_plain_and_gzip_become_token_numbers(odd_path: Path) -> None:
    files = write_texts(odd_path, ["a dog barks .", "", "a cat\u2028sleeps"], ["ein Hund bellt .", "nichts", "eine Katze"])
    recipe = Transformer(**files, min_frequency=1)
    pairs = recipe.dataset()
    assert len(pairs) == 2
    source, target = pairs[0]
    assert (len(source), int(source[-1])) == (5, EOS)
    assert (len(target), int(target[0]), int(target[-1])) == (6, BOS, EOS)
    sources, targets = a_batch(recipe, [0, 1])
    assert (sources.shape, targets.shape) == ((2, 5), (2, 6))
    assert sources[1].tolist().count(PAD) == 1
    assert recipe.eval_dataset() is None


def test_vocabulary() -> None:
    vocabulary = Vocabulary([["b", "a", "b"], ["c", "a", "<eos>", "<eos>"]], min_frequency=2)
    assert len(vocabulary) == 4 + 3
    assert vocabulary.encode(["a", "b", "c"]) == [5, 6, UNK]
    assert vocabulary.encode(["<eos>"]) == [4] != [EOS]
    assert vocabulary.decode([BOS, 6, UNK, PAD, EOS, 5]) == ["b", "<unk>"]
    assert words("Zwei Männer, im Freien.") == ["Zwei", "Männer", ",", "im", "Freien", "."]


def test_pairs_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    files = write_texts(tmp_path, ["a b c d", "a b"], ["x", "y z"])
    assert len(Transformer(**files, max_length=3).dataset()) == 1
    with pytest.raises(ValueError, match=r"recipe\.max_length=1 leaves out all 2 pairs .* the shortest has 2 tokens"):
        Transformer(**files, max_length=1).dataset()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "here"}, "recipe.source=here needs recipe.target=FILE"),
        ({"target": "here"}, "recipe.target=here needs recipe.source=FILE"),
        ({"source": "nowhere.en", "target": "nowhere.de"}, "recipe.source=nowhere.en is not a file"),
        ({"eval_source": __file__, "eval_target": __file__}, "needs texts to train on"),
        ({"source": __file__, "target": __file__, "eval_source": __file__}, "needs recipe.eval_target=FILE"),
    ],
)
def test_text_files_that_do_not_fit_are_named(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Transformer(**settings)


def test_texts_of_different_length_are_refused_with_both_numbers(tmp_path: Path) -> None:
    files = write_texts(tmp_path, ["one", "two", "three"], ["eins", "zwei"])
    with pytest.raises(ValueError, match=r"text\.en has 3 lines but .*text\.de\.gz has 2: line i of one must"):
        Transformer(**files).dataset()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"caf\xe9", "is not UTF-8 text (byte 3)"),
        (gzip.compress(b"one\ntwo\n" * 100, mtime=0)[:-12], "is damaged or cut short"),
    ],
)
def test_a_damaged_text_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "text.en"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path} {message}")):
        read_lines(path)


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("\ufeffone\r\ntwo\u2028halves\nlast".encode())
    assert read_lines(tmp_path / "text") == ["one", "two\u2028halves", "last"]


@pytest.mark.parametrize(("number", "size"), [(1000, 64), (128, 64), (7, 64), (7000, 64), (13, 1)])
def test_batches_hold_each_number_once_and_little_padding(number: int, size: int) -> None:
    draw = random.Random(0)
    pairs = TextPairs([([5] * draw.randint(1, 40), [5] * draw.randint(1, 40)) for _ in range(number)])
    order = list(range(number))
    draw.shuffle(order)
    batches = batches_by_length(pairs, order, size)
    assert sorted(itertools.chain(*batches)) == sorted(order)
    assert [len(batch) for batch in batches] == [size] * (number // size) + [number % size] * (number % size > 0)
    assert batches == batches_by_length(pairs, order, size)
    if number >= 1000:
        spreads = [max(lengths) - min(lengths) for lengths in ([pairs.length(i)[0] for i in batch] for batch in batches[:-1])]
        assert sum(spreads) / len(spreads) < 6
        firsts = [pairs.length(batch[0])[0] for batch in batches]
        assert firsts != sorted(firsts)


def test_batches_differ_between_epochs() -> None:
    recipe = Transformer()
    order = list(range(20_000))
    first = recipe.batches(order, 64)
    assert first != recipe.batches(order[::-1], 64)
    assert len(first) == math.ceil(20_000 / 64)


# --- Transformer -----------------------------------------------------------------------------------------------------


def test_transformer_base_has_about_the_published_number_of_parameters() -> None:
    # The paper says 65 million, with "about 37000" shared tokens. 18.9 (tokens) + 18.9 (encoder) + 25.2 (decoder) is 63.1.
    with torch.device("meta"):
        model = EncoderDecoder(Shape(6, 512, 8, 2048, 0.1, pre_norm=False), 37_000, 37_000, share_embeddings=True)
    attention, feedforward, norm = 4 * 512**2, 2 * 512 * 2048 + 2048 + 512, 2 * 512
    expected = 37_000 * 512 + 6 * (attention + feedforward + 2 * norm) + 6 * (2 * attention + feedforward + 3 * norm)
    assert num_parameters(model) == expected == 63_045_632


def test_transformer_hyper_parameters_are_the_published_ones() -> None:
    recipe = Transformer(width=512, num_heads=8, lr_factor=1.0, warmup_steps=4000, num_layers=1)
    optimizer = recipe.optimizer(nn.Linear(1, 1))
    assert isinstance(optimizer, torch.optim.Adam)
    assert (optimizer.param_groups[0]["betas"], optimizer.param_groups[0]["eps"]) == ((0.9, 0.98), 1e-9)
    rates = learning_rates(recipe, 4005)
    assert rates[0] == pytest.approx(512**-0.5 * 4000**-1.5)
    assert max(rates) == rates[3999] == pytest.approx(512**-0.5 * 4000**-0.5)
    assert rates[4003] == pytest.approx(512**-0.5 * 4004**-0.5)
    assert Transformer(beta2=0.997).optimizer(nn.Linear(1, 1)).param_groups[0]["betas"] == (0.9, 0.997)


def test_positions_are_the_published_sinusoids() -> None:
    table = positions(torch.zeros(1, 7, 8, dtype=torch.float64))
    for place, i in itertools.product(range(7), range(4)):
        angle = place / 10_000 ** (2 * i / 8)
        assert table[place, i].item() == pytest.approx(math.sin(angle), abs=1e-12)
        assert table[place, 4 + i].item() == pytest.approx(math.cos(angle), abs=1e-12)


def test_transformer_shapes() -> None:
    recipe = Transformer()
    source, target = a_batch(recipe, range(3))
    model = recipe.model()
    logits = model(source, target[:, :-1])
    assert logits.shape == (3, target.shape[1] - 1, 4 + 11)
    total, count = recipe.loss(model, (source, target))
    assert (total.shape, count.item()) == ((), 3 * 11)
    assert not list(model.buffers())


@pytest.mark.parametrize("pre_norm", [False, True])
def test_padding_and_later_tokens_change_nothing(pre_norm: bool) -> None:
    torch.manual_seed(0)
    model = Transformer(pre_norm=pre_norm).model().double().eval()
    source, target = torch.randint(4, 15, (2, 9)), torch.randint(4, 15, (2, 6))
    logits = model(source, target)
    padded = model(nn.functional.pad(source, (0, 5), value=PAD), nn.functional.pad(target, (0, 3), value=PAD))[:, :6]
    torch.testing.assert_close(padded, logits, rtol=1e-11, atol=1e-11)
    changed = target.clone()
    changed[:, 4:] = 5
    torch.testing.assert_close(model(source, changed)[:, :4], logits[:, :4], rtol=1e-11, atol=1e-11)
    other = source.clone()
    other[:, 8] = source[:, 8] % 11 + 4
    assert not torch.allclose(model(other, target), logits)


def test_sum_and_count_over_30_and_3_tokens_give_the_mean_of_the_whole() -> None:
    recipe = Transformer(dropout=0.0)
    torch.manual_seed(0)
    model = recipe.model().double()
    samples = [
        (torch.randint(4, 15, (9,)), torch.randint(4, 15, (31,))),
        (torch.randint(4, 15, (4,)), torch.randint(4, 15, (4,))),
    ]

    def sums(part: Sequence[Any]) -> tuple[Tensor, int, list[Tensor]]:
        total, count = recipe.loss(model, recipe.collate(part))
        return total.detach(), int(count), list(torch.autograd.grad(total, list(model.parameters())))

    whole, first, second = sums(samples), sums(samples[:1]), sums(samples[1:])
    assert (first[1], second[1], whole[1]) == (30, 3, 33)
    torch.testing.assert_close((first[0] + second[0]) / 33, whole[0] / 33, rtol=1e-12, atol=0)
    for a, b, both in zip(first[2], second[2], whole[2], strict=True):
        torch.testing.assert_close((a + b) / 33, both / 33, rtol=1e-9, atol=1e-13)
    naive = (first[0] / 30 + second[0] / 3) / 2
    assert not torch.isclose(naive, whole[0] / 33, rtol=1e-4)


def test_label_smoothing_spreads_over_all_tokens() -> None:
    recipe = Transformer(dropout=0.0, label_smoothing=0.1)
    torch.manual_seed(0)
    model = recipe.model().double()
    source, target = a_batch(recipe, range(4))
    log_p = model(source, target[:, :-1]).log_softmax(dim=-1)
    labels = target[:, 1:]
    expected = -(0.9 * log_p.gather(2, labels[:, :, None])[:, :, 0] + 0.1 * log_p.mean(dim=2))
    total, _ = recipe.loss(model, (source, target))
    torch.testing.assert_close(total, expected[labels != PAD].sum(), rtol=1e-12, atol=0)


class Scripted(nn.Module):
    """Answers with given tokens, whatever is asked."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.answers, self.calls = nn.Parameter(torch.tensor(answers), requires_grad=False), 0

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.one_hot(self.answers[:, : target.shape[1]], 20).float()


def test_greedy_decoding_ends_at_eos_and_at_the_longest_length() -> None:
    source = torch.ones(2, 3, dtype=torch.long)
    ends = Scripted([[5, EOS, 7, 7, 7, 7], [6, 6, EOS, 8, 8, 8]])
    assert greedy(ends, source, 6).tolist() == [[5, EOS, PAD, PAD, PAD, PAD], [6, 6, EOS, PAD, PAD, PAD]]
    assert ends.calls == 3
    endless = Scripted([[5] * 6, [6] * 6])
    assert greedy(endless, source, 6).tolist() == [[5] * 6, [6] * 6]


def test_exact_match_counts_wholly_right_sequences_only() -> None:
    right, wrong = [5, 6, EOS], [5, 7, EOS]
    metrics = Transformer().evaluate(
        Scripted([right, right]), (torch.ones(2, 3).long(), torch.tensor([[BOS, *right], [BOS, *wrong]]))
    )
    assert [int(value) for value in metrics["exact_match"]] == [1, 2]
    assert [int(value) for value in metrics["token_accuracy"]] == [5, 6]


def test_translate_writes_text() -> None:
    recipe = Transformer()
    encoded = recipe._vocabularies[1].encode(list("1997-03-03"))
    model = Scripted([[*encoded, EOS]])
    assert recipe.translate(model, "Mar 3, 97") == "1997-03-03"


def test_shared_embeddings_are_one_matrix_and_one_vocabulary() -> None:
    recipe = Transformer(share_embeddings=True)
    model = recipe.model()
    assert model.source.vectors.weight is model.target.vectors.weight is model.output.weight
    _, losses = train(recipe, [a_batch(recipe, range(4))] * 2)
    assert all(map(math.isfinite, losses))


def test_sparse_embeddings_are_updated_only_where_a_token_occurred() -> None:
    recipe = Transformer(sparse_embeddings=True, dropout=0.0)
    batches = [a_batch(recipe, [0, 1]), a_batch(recipe, [2])]
    torch.manual_seed(0)
    model = recipe.model()
    optimizer, weight = recipe.optimizer(model), model.source.vectors.weight
    assert isinstance(optimizer, SparseDenseAdam)
    for batch in batches:
        before, output = weight.detach().clone(), model.output.weight.detach().clone()
        optimizer.zero_grad()
        mean_loss(recipe, model, batch).backward()
        assert weight.grad is not None
        assert weight.grad.is_sparse
        optimizer.step()
        moved = (weight.detach() != before).any(dim=1).nonzero().flatten().tolist()
        assert moved == sorted(set(batch[0].flatten().tolist()) - {PAD})
        assert not torch.equal(model.output.weight, output)


def test_sparse_and_dense_embeddings_agree_in_the_first_step() -> None:
    weights = []
    for sparse in (False, True):
        recipe = Transformer(sparse_embeddings=sparse, dropout=0.0)
        model, _ = train(recipe, [a_batch(recipe, range(4))])
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    # Rows without a gradient stand still in both; later steps differ, as Adam goes on moving rows by their averages.
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


def test_sparse_adam_goes_on_after_a_copy_and_after_a_checkpoint() -> None:
    recipe = Transformer(sparse_embeddings=True, dropout=0.0)
    batch = a_batch(recipe, range(4))
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    scheduler = recipe.scheduler(optimizer)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        mean_loss(recipe, model, batch).backward()
        optimizer.step()

    step(model, optimizer)
    scheduler.step()
    assert len({group["lr"] for group in optimizer.param_groups}) == 1
    resumed = recipe.model()
    resumed.load_state_dict(model.state_dict())
    resumed_optimizer = recipe.optimizer(resumed)
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied, copied_optimizer = copy.deepcopy((model, optimizer))
    step(model, optimizer)
    step(resumed, resumed_optimizer)
    step(copied, copied_optimizer)
    for a, b, c in zip(model.parameters(), resumed.parameters(), copied.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert len(optimizer.state) == len(list(model.parameters()))


def test_dates_are_learned() -> None:
    recipe = Transformer(num_layers=1, dropout=0.0, warmup_steps=40)
    batches = [a_batch(recipe, range(32 * step, 32 * (step + 1))) for step in range(40)]
    _, losses = train(recipe, batches)
    assert losses[0] > 2.2
    assert sum(losses[-5:]) / 5 < 1.7


@needs_multi30k
def test_english_to_german_is_learned() -> None:
    recipe = Transformer(
        source=str(MULTI30K / "val.en.gz"),
        target=str(MULTI30K / "val.de.gz"),
        eval_source=str(MULTI30K / "test_2016_flickr.en.gz"),
        eval_target=str(MULTI30K / "test_2016_flickr.de.gz"),
        num_layers=1,
        warmup_steps=60,
    )
    assert len(recipe.dataset()) > 1000
    assert len(recipe.eval_dataset()) > 950
    order = list(range(len(recipe.dataset())))
    random.Random(0).shuffle(order)
    batches = [a_batch(recipe, numbers) for numbers in recipe.batches(order, 32)[:31]] * 2
    _, losses = train(recipe, batches[:60])
    assert losses[0] == pytest.approx(math.log(len(recipe._vocabularies[1])), abs=1.0)
    assert sum(losses[-5:]) / 5 < losses[0] - 2.0
