"""SE-ResNeXt: residual blocks of grouped convolutions whose channels are weighted by squeeze and excitation.

Sources: S. Xie et al., "Aggregated Residual Transformations for Deep Neural Networks" (2016), the blocks; J. Hu et al.,
"Squeeze-and-Excitation Networks" (2017), the weights; PaddlePaddle's SE_ResNeXt, the variant of 152 layers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset

from recipes import require_count, require_fraction, require_positive
from recipes.data.digit_images import DigitImages
from recipes.data.idx import NUM_DIGITS
from recipes.data.image_folder import ImageFolder, class_folders
from recipes.metrics import of_classes


@dataclass(frozen=True)
class Architecture:
    """One published (or, at depth 11, reduced) form of the network.

    Attributes:
        blocks: Residual blocks in each stage; ``3 * sum(blocks) + 2`` is the depth.
        width: Channels of the stem. Stage i has blocks of ``2 * width * 2**i`` channels inside and twice as many outside.
        cardinality: Groups of the 3 x 3 convolutions.
        deep_stem: Three 3 x 3 convolutions before the first stage instead of one of 7 x 7.
    """

    blocks: tuple[int, ...]
    width: int
    cardinality: int
    deep_stem: bool = False


ARCHITECTURES: Mapping[int, Architecture] = {
    11: Architecture(blocks=(1, 1, 1), width=16, cardinality=8),
    50: Architecture(blocks=(3, 4, 6, 3), width=64, cardinality=32),
    101: Architecture(blocks=(3, 4, 23, 3), width=64, cardinality=32),
    152: Architecture(blocks=(3, 8, 36, 3), width=64, cardinality=64, deep_stem=True),
}


class SEResNeXt:
    """Images into classes by SE-ResNeXt, with momentum SGD, L2 weight decay and a learning rate that falls along a cosine.

    Args:
        depth: Layers with weights on the longest path, squeeze and excitation not counted: 50, 101, 152 as published, or 11.
        image_size: Side of the images in pixels.
        num_classes: Classes to tell apart; None takes as many as the data has.
        width: Channels of the stem; None takes the depth's own.
        cardinality: Groups of the 3 x 3 convolutions; None takes the depth's own.
        reduction: Channels of a block for each one inside its squeeze and excitation.
        dropout: Part of the features set to 0 before the classifier in training.
        root: A folder with one folder of images per class; None takes the 10,000 digits that are shipped.
        eval_root: A folder like ``root`` to evaluate on; it needs ``root``. None with ``root``: no evaluation.
        lr: Learning rate of the first step.
        momentum: Of SGD.
        weight_decay: L2 penalty on all parameters.

    Raises:
        ValueError: A setting out of range, or two that do not fit each other.
    """

    def __init__(  # noqa: PLR0913  the keys of conf/recipe/se_resnext.yaml
        self,
        *,
        depth: int = 11,
        image_size: int = 28,
        num_classes: int | None = None,
        width: int | None = None,
        cardinality: int | None = None,
        reduction: int = 16,
        dropout: float = 0.0,
        root: str | None = None,
        eval_root: str | None = None,
        lr: float = 0.05,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
    ) -> None:
        self._architecture = _architecture(depth, width, cardinality)
        require_count("reduction", reduction)
        require_fraction("dropout", dropout)
        require_positive("lr", lr)
        require_fraction("momentum", momentum)
        require_fraction("weight_decay", weight_decay)
        _require_image_size(image_size, self._architecture)
        if eval_root is not None and root is None:
            raise ValueError(f"recipe.eval_root={eval_root} needs images to train on: type recipe.root=FOLDER too.")
        self._root = None if root is None else Path(root)
        self._eval_root = None if eval_root is None else Path(eval_root)
        self._num_classes = _num_classes(num_classes, self._root)
        self._image_size, self._reduction, self._dropout = image_size, reduction, dropout
        self._lr, self._momentum, self._weight_decay = lr, momentum, weight_decay

    def dataset(self) -> Dataset[tuple[Tensor, Tensor]]:
        """Return the images to train on: pairs of uint8 [3, image_size, image_size] and a class, int64 []."""
        if self._root is None:
            return DigitImages("train", self._image_size)
        return ImageFolder(self._root, self._image_size)

    def eval_dataset(self) -> Dataset[tuple[Tensor, Tensor]] | None:
        """Return the images to evaluate on, in the form of ``dataset``; None where ``root`` was given without ``eval_root``."""
        if self._root is None:
            return DigitImages("test", self._image_size)
        if self._eval_root is None:
            return None
        classes = class_folders(self._root, "recipe.root")
        return ImageFolder(self._eval_root, self._image_size, setting="recipe.eval_root", classes=classes)

    def model(self) -> nn.Module:
        """Return a network from images, uint8 or float [n, 3, image_size, image_size] from 0 to 255, to logits [n, classes]."""
        return SEResNeXtNet(self._architecture, self._num_classes, self._reduction, self._dropout)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return SGD with momentum and L2 weight decay."""
        return SGD(model.parameters(), lr=self._lr, momentum=self._momentum, weight_decay=self._weight_decay)

    def scheduler(self, optimizer: Optimizer, num_steps: int) -> LRScheduler:
        """Return ``lr * (1 + cos(pi * step / num_steps)) / 2`` (I. Loshchilov, F. Hutter, "SGDR", 2016, one period)."""
        return LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / num_steps)))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross entropy, in nats, over a batch of images [n, 3, size, size] and classes [n]."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return, as (sum, number of images), the accuracy and the cross entropy in nats over one batch."""
        images, labels = batch
        return of_classes(model(images), labels)


class SEResNeXtNet(nn.Module):
    """Stem, stages of residual blocks, mean over the positions, classifier."""

    # The means of ImageNet's three means and deviations: with BatchNorm close behind, a constant per channel is needless.
    _MEAN, _DEVIATION = 0.449, 0.226

    def __init__(self, architecture: Architecture, num_classes: int, reduction: int, dropout: float) -> None:
        super().__init__()
        self.stem, channels = _stem(architecture)
        stages = []
        for stage, num_blocks in enumerate(architecture.blocks):
            inner = 2 * architecture.width * 2**stage
            for block in range(num_blocks):
                # The stem has divided both sides by 4 already.
                stride = 2 if stage > 0 and block == 0 else 1
                stages.append(Block(channels, inner, architecture.cardinality, reduction, stride))
                channels = 2 * inner
        self.blocks = nn.Sequential(*stages)
        self.dropout = nn.Dropout(dropout)
        self.classes = nn.Linear(channels, num_classes)
        self.apply(_initialise)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [n, classes] of images [n, 3, height, width] with values from 0 to 255."""
        x = (images.to(self.classes.weight.dtype) / 255 - self._MEAN) / self._DEVIATION
        x = self.blocks(self.stem(x))
        # A mean and not AdaptiveAvgPool2d, whose gradient is not deterministic on CUDA.
        return self.classes(self.dropout(x.mean(dim=(2, 3))))


class Block(nn.Module):
    """1 x 1, grouped 3 x 3 and 1 x 1 convolution with BatchNorm, squeeze and excitation, added to the input.

    Where the stride or the number of channels changes, the input passes a 1 x 1 convolution with BatchNorm first.

    Args:
        channels: Channels of the input; the output has ``2 * inner``.
        inner: Channels of the grouped convolution.
        cardinality: Its groups.
        reduction: Channels of the output for each one inside the squeeze and excitation, which has at least 1.
        stride: Of the grouped convolution.
    """

    def __init__(self, channels: int, inner: int, cardinality: int, reduction: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *_convolution(channels, inner, 1),
            nn.ReLU(inplace=True),
            *_convolution(inner, inner, 3, stride, cardinality),
            nn.ReLU(inplace=True),
            *_convolution(inner, 2 * inner, 1),
        )
        self.excitation = SqueezeExcitation(2 * inner, reduction)
        unchanged = stride == 1 and channels == 2 * inner
        self.shortcut = nn.Identity() if unchanged else nn.Sequential(*_convolution(channels, 2 * inner, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        """Return [n, 2 * inner, height / stride, width / stride] of [n, channels, height, width]."""
        return F.relu(self.excitation(self.residual(x)) + self.shortcut(x))


class SqueezeExcitation(nn.Module):
    """Each channel times a weight from 0 to 1 that follows from the means of all channels (Hu et al., equations 2 to 4)."""

    def __init__(self, channels: int, reduction: int) -> None:
        super().__init__()
        squeezed = max(1, channels // reduction)
        self.squeeze = nn.Linear(channels, squeezed)
        self.excite = nn.Linear(squeezed, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of the input, [n, channels, height, width]."""
        weights = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean(dim=(2, 3))))))
        return x * weights[:, :, None, None]


def _convolution(channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    # No bias: BatchNorm takes any constant away again, so its gradient would be nothing but rounding.
    convolution = nn.Conv2d(channels, out, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(out)]


def _stem(architecture: Architecture) -> tuple[nn.Module, int]:
    """Return the layers before the first stage and the number of their output channels; they divide both sides by 4."""
    width = architecture.width
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    if not architecture.deep_stem:
        return nn.Sequential(*_convolution(3, width, 7, stride=2), nn.ReLU(inplace=True), pool), width
    layers = [
        *(*_convolution(3, width, 3, stride=2), nn.ReLU(inplace=True)),
        *(*_convolution(width, width, 3), nn.ReLU(inplace=True)),
        *(*_convolution(width, 2 * width, 3), nn.ReLU(inplace=True)),
    ]
    return nn.Sequential(*layers, pool), 2 * width


def _initialise(module: nn.Module) -> None:
    """Draw a convolution's weights as in K. He et al., "Delving Deep into Rectifiers" (2015)."""
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _architecture(depth: int, width: int | None, cardinality: int | None) -> Architecture:
    if depth not in ARCHITECTURES:
        depths = ", ".join(map(str, ARCHITECTURES))
        raise ValueError(f"recipe.depth={depth} is not a depth of SE-ResNeXt: type one of {depths}.")
    own = ARCHITECTURES[depth]
    width = own.width if width is None else width
    cardinality = own.cardinality if cardinality is None else cardinality
    require_count("width", width)
    require_count("cardinality", cardinality)
    # The stages after the first double its channels, so that what divides these divides theirs.
    if 2 * width % cardinality:
        raise ValueError(
            f"recipe.cardinality={cardinality} does not divide the {2 * width} channels of the first stage (2 * width): "
            f"type a divisor of {2 * width}."
        )
    return Architecture(own.blocks, width, cardinality, own.deep_stem)


def _require_image_size(image_size: int, architecture: Architecture) -> None:
    """Refuse images of which the last stage would see a single position: BatchNorm cannot train on one of one image."""
    require_count("image_size", image_size)
    # Two in the stem, and one in each stage but the first; each rounds up, so one pixel more leaves two positions.
    halvings = 1 + len(architecture.blocks)
    least = 2**halvings + 1
    if image_size < least:
        raise ValueError(f"recipe.image_size={image_size} is too small for this depth: type {least} or more.")


def _num_classes(num_classes: int | None, root: Path | None) -> int:
    found = NUM_DIGITS if root is None else len(class_folders(root, "recipe.root"))
    if num_classes is None:
        return found
    require_count("num_classes", num_classes)
    if num_classes < found:
        raise ValueError(f"recipe.num_classes={num_classes} is less than the data's {found} classes: type {found} or more.")
    return num_classes
