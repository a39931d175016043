"""A folder of images with one folder per class, read one image at a time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})


class ImageFolder(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of an image, uint8 [3, image_size, image_size], and the number of its class, int64 [].

    The classes are the folders in ``root``, numbered in the order of their names; an image's class is the folder that it lies
    in, at any depth. Names are sorted by code point, so every machine numbers classes and images alike. Files without an
    image's suffix, and names that start with a dot, are passed over.

    Args:
        root: The folder that holds the folders of the classes.
        image_size: Side of the images in pixels.
        setting: The setting that ``root`` was typed as, for messages.
        classes: Names in the order of their numbers, where another folder decides it (the one that is trained on).

    Raises:
        ValueError: No folder, no class, a class without images, or a class that is not among ``classes``.
    """

    def __init__(self, root: Path, image_size: int, setting: str = "recipe.root", classes: Sequence[str] | None = None) -> None:
        found = class_folders(root, setting)
        self.classes = tuple(classes) if classes is not None else tuple(found)
        unknown = sorted(set(found) - set(self.classes))
        if unknown:
            raise ValueError(f"{setting}={root} holds the class folder {unknown[0]}, which the images to train on do not have.")
        self._image_size = image_size
        self._items = [(path, self.classes.index(name)) for name in found for path in _images_in(root / name, setting)]

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        path, label = self._items[index]
        return read_image(path, self._image_size), torch.tensor(label)


def class_folders(root: Path, setting: str) -> list[str]:
    """Return the names of the class folders in ``root``, sorted.

    Raises:
        ValueError: ``root`` is not a folder or holds no folders.
    """
    if not root.is_dir():
        raise ValueError(f"{setting}={root} is not a folder: type a folder that holds one folder of images per class.")
    names = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not names:
        raise ValueError(f"{setting}={root} holds no folders: it must hold one folder of images per class.")
    return names


def read_image(path: Path, image_size: int) -> Tensor:
    """Return the middle square of an image, scaled, as uint8 [3, image_size, image_size].

    Grey images get three equal channels, transparent ones lie on white, and what an EXIF note calls turned is turned back.

    Raises:
        ValueError: The file cannot be read as an image.
    """
    try:
        # All of it in here: Pillow decodes when pixels are asked for, not when it opens the file.
        with Image.open(path) as image:
            square = _middle_square(_to_rgb(ImageOps.exif_transpose(image)), image_size)
    # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error and more on damaged files; all mean the same here.
    except Exception as error:
        raise ValueError(f"{path} cannot be read as an image ({error}): replace it or take it out of the folder.") from error
    # np.array() copies: Pillow's own memory is read-only, of which torch warns.
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()


def _images_in(folder: Path, setting: str) -> list[Path]:
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file()
    )
    if not paths:
        suffixes = ", ".join(sorted(IMAGE_SUFFIXES))
        raise ValueError(f"{setting}: the class folder {folder} holds no images ({suffixes}): put some there or take it away.")
    return paths


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey: Pillow's own conversion to 8 bits cuts at 255 and leaves a white image.
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        # A plain conversion drops the transparency, and shows whatever colour lies below it.
        coloured = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", coloured.size, "white"), coloured).convert("RGB")
    return image.convert("RGB")


def _middle_square(image: Image.Image, size: int) -> Image.Image:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    # By box, in one go: what is cut off is not scaled first.
    return image.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
