"""Readers of the files that Keras writes for the NumPy reference: of keras-hub's ViT, and of the old vit-keras package.

Keras names the parts of a `.weights.h5` after Python attributes and counts them from nothing: `block`, `block_1`, ….
"""

import re
from collections.abc import Mapping

import numpy as np

from conversion.reference_layouts import Row, _columns, _flat, _rows, claim

_ENCODER = "layers/vi_t_encoder/"
_BLOCK = _ENCODER + r"encoder_layers/vi_t_encoder_block_(\d+)/"
_EMBEDDING = "layers/vi_t_patching_and_embedding/"


def _dense(pattern, path, kernel=_columns) -> tuple[Row, ...]:
    return ((pattern + "/vars/0", path + ".kernel", kernel), (pattern + "/vars/1", path + ".bias", _flat))


def _norm(pattern, path) -> tuple[Row, ...]:
    return ((pattern + "/vars/0", path + ".scale", _flat), (pattern + "/vars/1", path + ".bias", _flat))


KERAS_HUB: tuple[Row, ...] = (
    (_EMBEDDING + "patch_embedding/vars/0", "embedding.kernel", np.asarray),
    (_EMBEDDING + "patch_embedding/vars/1", "embedding.bias", _flat),
    (_EMBEDDING + "position_embedding/vars/0", "positions", _rows),
    (_EMBEDDING + "vars/0", "class_token", _rows),
    *_norm(_BLOCK + "layer_norm_1", r"blocks.\1.norm1"),
    *_dense(_BLOCK + "mha/query_dense", r"blocks.\1.query"),
    *_dense(_BLOCK + "mha/key_dense", r"blocks.\1.key"),
    *_dense(_BLOCK + "mha/value_dense", r"blocks.\1.value"),
    *_dense(_BLOCK + "mha/output_dense", r"blocks.\1.out", _rows),
    *_norm(_BLOCK + "layer_norm_2", r"blocks.\1.norm2"),
    *_dense(_BLOCK + "mlp/dense_1", r"blocks.\1.dense1"),
    *_dense(_BLOCK + "mlp/dense_2", r"blocks.\1.dense2"),
    *_norm(_ENCODER + "layer_norm", "norm"),
    *_dense("task/layers/last", "head"),
    *_dense("task/layers/first", "pre_logits"),
)


def keras_hub(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Preset folders of keras-hub's `ViTBackbone` and `ViTImageClassifier`; keys of `task.weights.h5` after `task/`."""
    named = {}
    top = {"task/layers/dense/": "task/layers/last/"}
    if "task/layers/dense_1/vars/0" in arrays:  # a Dense before the head
        top = {"task/layers/dense/": "task/layers/first/", "task/layers/dense_1/": "task/layers/last/"}
    for key, value in arrays.items():
        key = key.replace("/vi_t_encoder_block/", "/vi_t_encoder_block_0/")
        for old, new in top.items():
            key = new + key.removeprefix(old) if key.startswith(old) else key
        named[key] = value
    return claim(named, KERAS_HUB, ignored=r"task/optimizer/.*")


_OLD_BLOCK = r"(?:layers/transformer_block_(\d+)|Transformer_encoderblock_(\d+))/"


def _old(pattern, path, transform=np.asarray) -> tuple[Row, ...]:
    """A layer's two variables, in the names of Keras 3 files and of Keras 2 files."""
    first, second, kind = ("gamma", "beta", "scale") if "norm" in path else ("kernel", "bias", "kernel")
    return (
        (f"{pattern}/(?:vars/0|{first})", f"{path}.{kind}", transform),
        (f"{pattern}/(?:vars/1|{second})", f"{path}.bias", transform),
    )


VIT_KERAS: tuple[Row, ...] = (
    *_old("(?:layers/conv2d|embedding)", "embedding"),
    ("layers/class_token/vars/0|class_token/cls", "class_token", _rows),
    ("layers/add_position_embs/vars/0|Transformer_posembed_input/pos_embedding", "positions", _rows),
    *_old(_OLD_BLOCK + "(?:layernorm1|LayerNorm_0)", r"blocks.\1\2.norm1"),
    *_old(_OLD_BLOCK + "(?:att/query_dense|MultiHeadDotProductAttention_1/query)", r"blocks.\1\2.query"),
    *_old(_OLD_BLOCK + "(?:att/key_dense|MultiHeadDotProductAttention_1/key)", r"blocks.\1\2.key"),
    *_old(_OLD_BLOCK + "(?:att/value_dense|MultiHeadDotProductAttention_1/value)", r"blocks.\1\2.value"),
    *_old(_OLD_BLOCK + "(?:att/combine_heads|MultiHeadDotProductAttention_1/out)", r"blocks.\1\2.out"),
    *_old(_OLD_BLOCK + "(?:layernorm2|LayerNorm_2)", r"blocks.\1\2.norm2"),
    *_old(_OLD_BLOCK + r"(?:mlpblock/layers/dense|(?:MlpBlock_3/)?(?:\w+[_/])?Dense_0)", r"blocks.\1\2.dense1"),
    *_old(_OLD_BLOCK + r"(?:mlpblock/layers/dense_1|(?:MlpBlock_3/)?(?:\w+[_/])?Dense_1)", r"blocks.\1\2.dense2"),
    *_old("(?:layers/layer_normalization|Transformer_encoder_norm)", "norm"),
    *_old("(?:layers/first|pre_logits)", "pre_logits"),
    *_old("(?:layers/last|head)", "head"),
)


def vit_keras(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights of the vit-keras package: Keras 3's `.weights.h5`, and `.h5` of Keras 2 and 3."""
    two = "layers/dense_1/vars/0" in arrays
    named = {}
    for key, value in arrays.items():
        if key.startswith("layers/"):
            key = key.replace("layers/transformer_block/", "layers/transformer_block_0/")
            key = re.sub(r"^layers/dense/", "layers/first/" if two else "layers/last/", key)
            key = re.sub(r"^layers/dense_1/", "layers/last/", key)
        else:  # `layer/layer/kernel:0`, in whole models below `model_weights`; in 0.1 with slashes in a layer's name
            key = key.removeprefix("model_weights/").removesuffix(":0").replace("Transformer/", "Transformer_")
            key = re.sub(r"^(.+?)/\1/", r"\1/", key)
        named[key] = value
    return claim(named, VIT_KERAS, ignored=r"(?:.*/)?(?:_?optimizer|optimizer_weights).*")
