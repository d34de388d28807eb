"""The forward pass of ViT and its kin in float64 NumPy: the proof that converted weights compute what they should.

Written from the papers and from the facts of the original code. It shares no code with the library, whose models and
converters it judges. Axis letters: B batch, H W height and width, N tokens, D width, C channels, A heads.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import scipy.special

from conversion import reference_keras_layouts, reference_layouts
from conversion.reference_resizing import resize_grid, source_grid
from conversion.reference_resizing import resize_patch as resize_patch
from conversion.reference_stem import resnet

LAYOUTS = {
    "original": reference_layouts.original,
    "timm": reference_layouts.timm,
    "huggingface": reference_layouts.huggingface,
    "keras_hub": reference_keras_layouts.keras_hub,
    "vit_keras_legacy": reference_keras_layouts.vit_keras,
}

_CHOICES = {
    "gelu": ("tanh", "exact"),
    "pooling": ("token", "gap", "map", "token_gap", None),
    "remainder": ("error", "crop", "pad"),
    "resize": ("align_corners", "bicubic", "antialiased_bicubic"),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a file of weights does not tell.

    Args:
        num_heads: attention heads, of the MAP head too.
        gelu: "tanh" (the original's approximation, default) or "exact".
        epsilon: of LayerNorms.
        pooling: "token" (class token, default), "gap" (mean of the patch tokens), "map" (attention of one query to all
            tokens), "token_gap" (class token and mean of the patch tokens side by side) or None (every token).
        norm_after_pooling: the one LayerNorm stands behind the pooling (timm's `fc_norm`, MAE); default False.
        remainder: of an image that is no multiple of the patch: "error" (default), "crop", which drops it, or "pad",
            with zeros below and to the right.
        resize: of positions: "align_corners" (bilinear, the original, default), "bicubic" (PyTorch's) or
            "antialiased_bicubic" (PyTorch's with `antialias=True`).
        resize_offset: DINOv2's 0.1 in scale = (new + offset) / old; bicubic only; default 0.
        source_grid: (height, width) of the stored positions; None (default): a square.
        group_norm_epsilon: of the stem's GroupNorms.
        std_epsilon: of weight standardisation, (w - mean) / (std + epsilon).
        std_epsilon_in_variance: (w - mean) / sqrt(variance + epsilon) instead, as timm has it; default False.

    Raises:
        ValueError: a choice that does not exist, or an offset where it has no meaning.
    """

    num_heads: int
    gelu: str = "tanh"
    epsilon: float = 1e-6
    pooling: str | None = "token"
    norm_after_pooling: bool = False
    remainder: str = "error"
    resize: str = "align_corners"
    resize_offset: float = 0.0
    source_grid: tuple[int, int] | None = None
    group_norm_epsilon: float = 1e-6
    std_epsilon: float = 1e-5
    std_epsilon_in_variance: bool = False

    def __post_init__(self):
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"Expected {name} among {choices}. Received: {name}={getattr(self, name)!r}")
        if self.resize_offset and self.resize == "align_corners":
            raise ValueError(f"Expected no offset with aligned corners. Received: resize_offset={self.resize_offset}")


def read(arrays: Mapping[str, np.ndarray], layout: str) -> dict:
    """Parameters in the canonical form of `forward`, from a file's arrays.

    Args:
        arrays: key → array of any dtype.
        layout: a name of `LAYOUTS`.

    Returns:
        Nested float64 parameters: `embedding`, `blocks` (a list), `norm` or `pooled_norm`, and where the file has them
        `positions`, `stem`, `class_token`, `distillation_token`, `register_tokens`, `map`, `pre_logits`, `head`,
        `head_distillation`. Kernels are (in, out), convolutions (h, w, in, out), tokens and positions (rows, D).

    Raises:
        ValueError: an unknown layout, an unknown key, or a part that is missing.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"Expected a layout among {sorted(LAYOUTS)}. Received: layout={layout!r}")
    parameters = reference_layouts.nest(LAYOUTS[layout](arrays))
    missing = {"embedding", "blocks"} - parameters.keys()
    if missing or ("norm" in parameters) == ("pooled_norm" in parameters):
        raise ValueError(
            "Expected a patch embedding, blocks and one norm behind the blocks. "
            f"Received: layout={layout!r}, parts={sorted(parameters)}"
        )
    return parameters


def forward(parameters: dict, settings: Settings, images: np.ndarray) -> dict[str, np.ndarray]:
    """Every stage of the forward pass.

    Args:
        parameters: from `read`.
        settings: what the file does not tell.
        images: (B, H, W, C), preprocessed.

    Returns:
        float64 arrays: `embedding` (B, h, w, D); `tokens` (B, N, D), what the first block receives; `attn_{i}`
        (B, A, N, N), probabilities; `block_{i}` (B, N, D); `encoded` (B, N, D), normed unless the norm stands behind
        the pooling; `features`, what the head receives; `logits` where there is a head. With a distillation token and
        pooling "token" also `features_distillation`, and with its head `logits_class`, `logits_distillation`, `logits`
        being their mean. Hybrids: `resnet/conv_root`, `resnet/gn_root` (before ReLU), `resnet/block{b}/unit{u}`.

    Raises:
        ValueError: settings and parameters or image that do not fit each other.
    """
    outputs: dict[str, np.ndarray] = {}
    pixels = np.asarray(images, "float64")
    if "stem" in parameters:
        pixels = resnet(parameters["stem"], settings, pixels, outputs)
    outputs["embedding"] = _embed(parameters["embedding"], settings, pixels)
    tokens = outputs["tokens"] = _tokens(parameters, settings, outputs["embedding"])
    for i, block in enumerate(parameters["blocks"]):
        tokens, outputs[f"attn_{i}"] = _block(block, settings, tokens)
        outputs[f"block_{i}"] = tokens
    outputs["encoded"] = _encoder_norm(parameters, settings, tokens)
    _classify(parameters, settings, outputs)
    return outputs


def _embed(p, settings, pixels):
    """(B, H, W, C) to (B, h, w, D): one product for each patch."""
    size_h, size_w, _, width = p["kernel"].shape
    batch, height, across, channels = pixels.shape
    if settings.remainder == "pad":
        pixels = np.pad(pixels, [(0, 0), (0, -height % size_h), (0, -across % size_w), (0, 0)])
        height = pixels.shape[1]
    rows, columns = height // size_h, pixels.shape[2] // size_w
    cropped = pixels[:, : rows * size_h, : columns * size_w]
    if settings.remainder == "error" and cropped.shape != pixels.shape:
        raise ValueError(
            "Expected a multiple of the patch, or remainder='crop' or 'pad'. "
            f"Received: {pixels.shape[1:3]} pixels or features for a patch of {(size_h, size_w)}"
        )
    patches = cropped.reshape(batch, rows, size_h, columns, size_w, channels).transpose(0, 1, 3, 2, 4, 5)
    return _dense({**p, "kernel": p["kernel"].reshape(-1, width)}, patches.reshape(batch, rows, columns, -1))


def _tokens(parameters, settings, embedding):
    """(B, h, w, D) to (B, N, D): class and distillation token, registers, patches, with positions."""
    batch, height, width, _ = embedding.shape
    names = [name for name in ("class_token", "distillation_token") if name in parameters]
    table, positions, prefix = np.zeros((0, embedding.shape[-1])), 0.0, 0
    if "positions" in parameters:
        table = parameters["positions"]
        registers = len(parameters.get("register_tokens", ()))
        grid, prefix = source_grid(len(table), len(names), settings, (height, width), registers)
        places = table[prefix:].reshape(*grid, -1)
        positions = resize_grid(places, (height, width), settings.resize, settings.resize_offset)
    leading = np.concatenate([parameters[name] for name in names]) if names else table[:0]
    if prefix <= len(names):
        leading = leading + (table[:prefix] if prefix else 0.0)
    # Registers have no positions, but where timm has a row for each.
    if "register_tokens" in parameters:
        leading = np.concatenate([leading, parameters["register_tokens"]])
    if prefix > len(names):
        leading = leading + table[:prefix]
    patches = (embedding + positions).reshape(batch, height * width, -1)
    return np.concatenate([np.repeat(leading[None], batch, axis=0), patches], axis=1)


def _dense(p, x):
    x = x @ p["kernel"]
    return x + p["bias"] if "bias" in p else x


def _layer_norm(p, settings, x):
    centered = x - x.mean(axis=-1, keepdims=True)
    variance = np.mean(centered**2, axis=-1, keepdims=True)
    return centered / np.sqrt(variance + settings.epsilon) * p["scale"] + p["bias"]


def _mlp(p, settings, x):
    x = _dense(p["dense1"], x)
    if settings.gelu == "tanh":
        x = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    else:
        x = 0.5 * x * (1 + scipy.special.erf(x / math.sqrt(2)))
    return _dense(p["dense2"], x)


def _attention(p, settings, queries, tokens):
    """(B, Q, D) looking at (B, N, D): mixed values (B, Q, D) and probabilities (B, A, Q, N)."""

    def heads(name, x):
        x = _dense(p[name], x)
        return x.reshape(*x.shape[:2], settings.num_heads, -1).transpose(0, 2, 1, 3)

    query, key, value = heads("query", queries), heads("key", tokens), heads("value", tokens)
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
    probabilities = scipy.special.softmax(scores, axis=-1)
    mixed = (probabilities @ value).transpose(0, 2, 1, 3)
    return _dense(p["out"], mixed.reshape(*mixed.shape[:2], -1)), probabilities


def _block(p, settings, x):
    normed = _layer_norm(p["norm1"], settings, x)
    mixed, probabilities = _attention(p, settings, normed, normed)
    x = x + mixed * p.get("scale1", 1.0)
    return x + _mlp(p, settings, _layer_norm(p["norm2"], settings, x)) * p.get("scale2", 1.0), probabilities


def _encoder_norm(parameters, settings, tokens):
    if settings.norm_after_pooling:
        return tokens
    if "norm" not in parameters:
        raise ValueError("Expected norm_after_pooling, for the file's norm is of pooled features. Received: False")
    return _layer_norm(parameters["norm"], settings, tokens)


def _classify(parameters, settings, outputs):
    """From `encoded` to `features` and `logits`."""
    outputs["features"] = _features(parameters, settings, _pool(parameters, settings, outputs["encoded"]))
    distilled = settings.pooling == "token" and "distillation_token" in parameters
    if distilled:
        outputs["features_distillation"] = _features(parameters, settings, outputs["encoded"][:, 1])
    if "head" in parameters:
        outputs["logits"] = _dense(parameters["head"], outputs["features"])
    if "head_distillation" not in parameters:
        return
    if not distilled or "head" not in parameters:
        raise ValueError(
            "Expected a distillation token, two heads and pooling='token' for a distilled model. "
            f"Received: pooling={settings.pooling!r}, parts={sorted(parameters)}"
        )
    outputs["logits_class"] = outputs["logits"]
    outputs["logits_distillation"] = _dense(parameters["head_distillation"], outputs["features_distillation"])
    outputs["logits"] = (outputs["logits_class"] + outputs["logits_distillation"]) / 2


def _pool(parameters, settings, encoded):
    """(B, N, D) to (B, D), to (B, 2 D) for "token_gap", or unchanged for None."""
    needed = {"token": "class_token", "token_gap": "class_token", "map": "map"}.get(settings.pooling)
    if needed and needed not in parameters:
        raise ValueError(f"Expected {needed} in the parameters. Received: pooling={settings.pooling!r}")
    names = ("class_token", "distillation_token", "register_tokens")
    prefix = sum(len(parameters[name]) for name in names if name in parameters)
    mean = encoded[:, prefix:].mean(axis=1)
    if settings.pooling == "map":
        return _map_head(parameters["map"], settings, encoded)
    if settings.pooling == "token_gap":
        return np.concatenate([encoded[:, 0], mean], axis=-1)
    return {"token": encoded[:, 0], "gap": mean, None: encoded}[settings.pooling]


def _map_head(p, settings, tokens):
    """Attention pooling (Zhai et al. 2022, "Scaling Vision Transformers", section 2.2): one learned query."""
    probe = np.repeat(p["probe"][None], len(tokens), axis=0)
    x, _ = _attention(p, settings, probe, tokens)
    return (x + _mlp(p, settings, _layer_norm(p["norm"], settings, x)))[:, 0]


def _features(parameters, settings, x):
    """What the head receives of a pooled token."""
    if settings.norm_after_pooling:
        x = _layer_norm(parameters.get("pooled_norm", parameters.get("norm")), settings, x)
    return np.tanh(_dense(parameters["pre_logits"], x)) if "pre_logits" in parameters else x
