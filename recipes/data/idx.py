"""IDX, the file format of MNIST and its relatives.

A file is two zero bytes, one byte for the type of the elements (8: unsigned bytes), one byte for the number of dimensions,
each dimension as a big-endian 32-bit number, then the elements in C order. Source: Y. LeCun, "The MNIST database of
handwritten digits".
"""

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from recipes.data.files import read_bytes

SHIPPED_DIGITS = Path(__file__).parent / "mnist-10k"
NUM_DIGITS = 10
DIGIT_SIZE = 28

_UNSIGNED_BYTE = 0x08
_SPLITS = {"train": "train", "test": "t10k"}  # MNIST's own name for its test set is t10k


def read_digits(root: Path, split: str) -> tuple[Tensor, Tensor]:
    """Return the images and the labels of one split of MNIST, or of a set with the same names and sizes.

    Args:
        root: A folder with ``train-images-idx3-ubyte`` and the like, each plain or with ``.gz`` behind its name.
        split: ``train`` or ``test``.

    Returns:
        Images, uint8 of shape [n, 28, 28] from 0 (paper) to 255 (ink), and labels, int64 of shape [n] from 0 to 9.

    Raises:
        ValueError: A file is missing, is no IDX file of the right form, or the two do not belong together.
    """
    image_path = find_idx(root, f"{_SPLITS[split]}-images-idx3-ubyte")
    label_path = find_idx(root, f"{_SPLITS[split]}-labels-idx1-ubyte")
    images, labels = read_idx(image_path, num_dims=3), read_idx(label_path, num_dims=1)
    if len(images) != len(labels):
        raise ValueError(
            f"{image_path} holds {len(images)} images but {label_path.name} holds {len(labels)} labels: the two files do "
            "not belong together."
        )
    if len(images) == 0:
        raise ValueError(f"{image_path} holds no images.")
    if images.shape[1:] != (DIGIT_SIZE, DIGIT_SIZE):
        height, width = images.shape[1:]
        raise ValueError(f"{image_path} holds images of {height} x {width} pixels; they must be {DIGIT_SIZE} x {DIGIT_SIZE}.")
    # Not left to the loss: on a GPU, a class out of range ends the process by an assertion in a kernel.
    if int(labels.max()) >= NUM_DIGITS:
        raise ValueError(f"{label_path} holds the label {int(labels.max())}; those of digits go from 0 to {NUM_DIGITS - 1}.")
    return images, labels.long()


def require_digits(root: Path) -> None:
    """Refuse a folder that lacks one of MNIST's four files, without reading any of them.

    Raises:
        ValueError: Names the first file that is missing.
    """
    for prefix in _SPLITS.values():
        find_idx(root, f"{prefix}-images-idx3-ubyte")
        find_idx(root, f"{prefix}-labels-idx1-ubyte")


def find_idx(root: Path, name: str) -> Path:
    """Return the path of ``name`` or ``name.gz`` in a folder.

    Raises:
        ValueError: The folder, or the file in it, is missing.
    """
    if not root.is_dir():
        raise ValueError(f"recipe.root={root} is not a folder: type the folder that holds {name}, plain or .gz.")
    for path in (root / name, root / f"{name}.gz"):
        if path.is_file():
            return path
    raise ValueError(f"recipe.root={root} holds neither {name} nor {name}.gz: put one of them there or type another folder.")


def read_idx(path: Path, num_dims: int) -> Tensor:
    """Return the elements of an IDX file of unsigned bytes, uint8, in the shape that the file declares.

    Raises:
        ValueError: The magic number is not that of ``num_dims`` dimensions of unsigned bytes, or there are more or fewer bytes
            than declared.
    """
    content = read_bytes(path)
    header_size = 4 + 4 * num_dims
    # The header's first four bytes, as one number.
    wanted = _UNSIGNED_BYTE << 8 | num_dims
    magic = int.from_bytes(content[:4], "big")
    if len(content) < header_size or magic != wanted:
        raise ValueError(f"{path} is no IDX file of {num_dims} dimensions: its magic number is {magic}, not {wanted}.")
    shape = struct.unpack(f">{num_dims}I", content[4:header_size])
    if len(content) - header_size != math.prod(shape):
        declared = " x ".join(map(str, shape))
        raise ValueError(f"{path} declares {declared} bytes but holds {len(content) - header_size}: copy or download it again.")
    # torch.frombuffer() refuses a buffer with nothing behind the offset.
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=torch.uint8)
    # A copy that can be written to: torch warns of a tensor over bytes, which cannot.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header_size).reshape(shape)
