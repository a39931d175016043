"""A small convolutional network on handwritten digits."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset, TensorDataset

from recipes import require_count, require_fraction, require_positive
from recipes.data.idx import DIGIT_SIZE, NUM_DIGITS, SHIPPED_DIGITS, read_digits, require_digits
from recipes.metrics import of_classes

_WARMUP_FRACTION = 0.1
_MEAN, _DEVIATION = 0.1307, 0.3081  # of the pixels of MNIST's 60,000 training images, from 0 to 1


class Mnist:
    """Digits of 28 x 28 pixels into ten classes, by momentum SGD.

    Args:
        root: A folder with MNIST's four IDX files, plain or ``.gz``; None takes the 10,000 digits that are shipped.
        width: Channels of the first convolution; the second has twice as many.
        hidden: Units of the layer between the convolutions and the classes.
        dropout: Part of the hidden units set to 0 in training.
        lr: The highest learning rate, reached after a tenth of the steps; it falls to 0 over the others.
        momentum: Of SGD.

    Raises:
        ValueError: A setting out of range, or a file missing in ``root``.
    """

    def __init__(
        self,
        root: str | None = None,
        width: int = 16,
        hidden: int = 128,
        dropout: float = 0.0,
        lr: float = 0.05,
        momentum: float = 0.9,
    ) -> None:
        require_count("width", width)
        require_count("hidden", hidden)
        require_fraction("dropout", dropout)
        require_positive("lr", lr)
        require_fraction("momentum", momentum)
        self._root = SHIPPED_DIGITS if root is None else Path(root)
        # Looked for now, so that a wrong folder is told at once, and read when the data are asked for.
        require_digits(self._root)
        self._width, self._hidden, self._dropout = width, hidden, dropout
        self._lr, self._momentum = lr, momentum

    def dataset(self) -> Dataset[tuple[Tensor, ...]]:
        """Return the digits to train on: pairs of an image, uint8 [1, 28, 28], and a label, int64 []."""
        return self._digits("train")

    def eval_dataset(self) -> Dataset[tuple[Tensor, ...]]:
        """Return the digits to test on, none of which is trained on, in the form of ``dataset``."""
        return self._digits("test")

    def model(self) -> nn.Module:
        """Return a network from images, uint8 or any float type [n, 1, 28, 28] from 0 to 255, to logits [n, 10]."""
        return ConvNet(self._width, self._hidden, self._dropout)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return SGD with momentum."""
        return SGD(model.parameters(), lr=self._lr, momentum=self._momentum)

    def scheduler(self, optimizer: Optimizer, num_steps: int) -> LRScheduler:
        """Return a schedule over ``num_steps`` steps: linearly up for the first tenth, linearly down to 0 after it."""
        warmup = max(1, round(_WARMUP_FRACTION * num_steps))

        def factor(step: int) -> float:
            # From step + 1, as a first step with a learning rate of 0 would be for nothing. A single step is all warm-up.
            return min((step + 1) / warmup, (num_steps - step) / max(1, num_steps - warmup))

        return LambdaLR(optimizer, factor)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross entropy, in nats, over a batch of images [n, 1, 28, 28] and labels [n]."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return, as (sum, number of images), the accuracy and the cross entropy in nats over one batch."""
        images, labels = batch
        return of_classes(model(images), labels)

    def _digits(self, split: str) -> Dataset[tuple[Tensor, ...]]:
        images, labels = read_digits(self._root, split)
        return TensorDataset(images.unsqueeze(1), labels)


class ConvNet(nn.Module):
    """Two convolutions and two linear layers.

    The first convolution has stride 2, in place of a pooling layer behind it: about 40 % less time a step, as accurate.
    """

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        # Halved by the first convolution's stride and by the pooling behind the second.
        side = DIGIT_SIZE // 4
        self.conv1 = nn.Conv2d(1, width, kernel_size=5, stride=2, padding=2)
        self.conv2 = nn.Conv2d(width, 2 * width, kernel_size=3, padding=1)
        self.hidden = nn.Linear(2 * width * side * side, hidden)
        self.dropout = nn.Dropout(dropout)
        self.classes = nn.Linear(hidden, NUM_DIGITS)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [n, 10] of images [n, 1, 28, 28] with values from 0 to 255."""
        # Scaled here and not in the data set: bytes are a quarter of the memory, and the result has the model's precision.
        x = (images.to(self.conv1.weight.dtype) / 255 - _MEAN) / _DEVIATION
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.hidden(torch.flatten(x, 1)))
        return self.classes(self.dropout(x))
