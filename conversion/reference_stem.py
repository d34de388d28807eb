"""The ResNet stem of hybrids, for the NumPy reference."""

from collections.abc import Iterator
from typing import Any

import numpy as np


def resnet(p: dict, settings: Any, x: np.ndarray, outputs: dict[str, np.ndarray]) -> np.ndarray:
    """The ResNet (v1, post-activation) that a hybrid puts before its patches.

    Args:
        p: parameters: `conv` and `norm` of the root, `stages`, lists of units.
        settings: `conversion.reference.Settings`; the epsilons.
        x: images (B, H, W, C).
        outputs: receives `resnet/conv_root`, `resnet/gn_root` (before ReLU) and `resnet/block{b}/unit{u}`, from 1.

    Returns:
        Features (B, h, w, C'), of stride 4 without stages, else 4, 8, 16, 32 for 1 to 4 stages.

    Reference: Dosovitskiy et al. 2021 (arXiv 2010.11929), section 4.1; Qiao et al. 2019 for weight standardisation.
    """
    x = outputs["resnet/conv_root"] = _conv(p["conv"], settings, x, stride=2)
    x = outputs["resnet/gn_root"] = _group_norm(p["norm"], settings, x)
    x = np.maximum(x, 0)
    x = np.max([tap for _, _, tap in _taps(x, size=3, stride=2, border=-np.inf)], axis=0)
    for b, stage in enumerate(p.get("stages", [])):
        for u, unit in enumerate(stage):
            x = _unit(unit, settings, x, stride=2 if b and not u else 1)
            outputs[f"resnet/block{b + 1}/unit{u + 1}"] = x
    return x


def _unit(p, settings, x, stride):
    """A bottleneck, its stride on the 3 x 3 convolution."""
    y = np.maximum(_group_norm(p["norm1"], settings, _conv(p["conv1"], settings, x)), 0)
    y = np.maximum(_group_norm(p["norm2"], settings, _conv(p["conv2"], settings, y, stride)), 0)
    y = _group_norm(p["norm3"], settings, _conv(p["conv3"], settings, y))
    if "conv_proj" in p:
        x = _group_norm(p["norm_proj"], settings, _conv(p["conv_proj"], settings, x, stride))
    return np.maximum(x + y, 0)


def _conv(kernel, settings, x, stride=1):
    """SAME convolution with a standardised kernel (h, w, C, C')."""
    kernel = kernel - kernel.mean(axis=(0, 1, 2))
    variance = np.mean(kernel**2, axis=(0, 1, 2))
    if settings.std_epsilon_in_variance:
        kernel = kernel / np.sqrt(variance + settings.std_epsilon)
    else:
        kernel = kernel / (np.sqrt(variance) + settings.std_epsilon)
    return sum(tap @ kernel[row, column] for row, column, tap in _taps(x, len(kernel), stride, 0.0))


def _taps(x, size, stride, border) -> Iterator[tuple[int, int, np.ndarray]]:
    """What each place of a SAME window sees: (row, column, (B, h, w, C)); TensorFlow's padding, more at the end."""
    rows, columns = (-(-length // stride) for length in x.shape[1:3])
    missing = [max((n - 1) * stride + size - length, 0) for n, length in zip((rows, columns), x.shape[1:3])]
    pads = [(0, 0), *((total // 2, total - total // 2) for total in missing), (0, 0)]
    x = np.pad(x, pads, constant_values=border)
    for row in range(size):
        for column in range(size):
            yield row, column, x[:, row::stride, column::stride][:, :rows, :columns]


def _group_norm(p, settings, x, groups=32):
    grouped = x.reshape(len(x), -1, groups, x.shape[-1] // groups)
    centered = grouped - grouped.mean(axis=(1, 3), keepdims=True)
    variance = np.mean(centered**2, axis=(1, 3), keepdims=True)
    return (centered / np.sqrt(variance + settings.group_norm_epsilon)).reshape(x.shape) * p["scale"] + p["bias"]
