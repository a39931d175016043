"""The shipped digits as colour images, for a network that expects photographs."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from recipes.data.idx import DIGIT_SIZE, SHIPPED_DIGITS, read_digits


class DigitImages(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of a shipped digit, uint8 [3, image_size, image_size] with equal channels, and its label, int64 [].

    Args:
        split: ``train`` or ``test``.
        image_size: Side of the images in pixels.
    """

    def __init__(self, split: str, image_size: int) -> None:
        self._images, self._labels = read_digits(SHIPPED_DIGITS, split)
        self._image_size = image_size

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self._images[index].unsqueeze(0)
        if self._image_size != DIGIT_SIZE:
            scaled = F.interpolate(image.unsqueeze(0).float(), size=self._image_size, mode="bilinear", antialias=True)
            # The conversion alone would cut off what lies behind the point.
            image = scaled.squeeze(0).round().to(torch.uint8)
        # A view: the channels are copied only where samples are joined to a batch.
        return image.expand(3, -1, -1), self._labels[index]
