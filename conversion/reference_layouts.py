"""Readers of foreign key layouts for the NumPy reference: a file's keys to the paths of its parameters.

A layout is a table of rows `pattern of the whole key, path, transform`. A reader takes the arrays as they are in the
file and returns `{path: float64 array}`; it is strict, so that nothing in a file is left out of the proof unnoticed.
Dense kernels become (in, out), convolutions (h, w, in, out), tokens and positions (rows, D).
"""

import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

Row = tuple[str, str, Callable[[np.ndarray], np.ndarray]]


def claim(arrays: Mapping[str, np.ndarray], rows: Iterable[Row], ignored: str = "") -> dict[str, np.ndarray]:
    """Give each array its path.

    Args:
        arrays: key → array.
        rows: (pattern, path, transform); the pattern matches a whole key, and the path may name its groups.
        ignored: pattern of keys that the forward pass has no use for; none by default.

    Returns:
        {path: array}, float64.

    Raises:
        ValueError: a key that no row claims, or two keys for one path.
    """
    paths, unclaimed, twice = {}, [], []
    for key, value in arrays.items():
        matches = ((re.fullmatch(pattern, key), path, transform) for pattern, path, transform in rows)
        match, path, transform = next((found for found in matches if found[0]), (None, "", None))
        if match is None:
            unclaimed += [] if re.fullmatch(ignored, key) else [key]
            continue
        path = match.expand(path)
        twice += [key] if path in paths else []
        paths[path] = transform(np.asarray(value, "float64"))
    if unclaimed or twice:
        raise ValueError(f"Expected every key to be a parameter's, once. Received: unknown={unclaimed}, twice={twice}")
    return paths


def nest(paths: Mapping[str, np.ndarray]) -> dict:
    """`{"blocks.0.norm1.scale": …}` to nested dicts, with a list where the names are numbers.

    Raises:
        ValueError: numbers with a gap, or a block that lacks what another block has.
    """
    tree: dict = {}
    for path, value in paths.items():
        *parents, name = path.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = value
    contents: dict[str, set[str]] = {}
    for path in paths:
        if match := re.fullmatch(r"blocks\.(\d+)\.(.*)", path):
            contents.setdefault(match[1], set()).add(match[2])
    # A bias that one block lacks would otherwise pass as "no bias".
    lacking = {i: sorted(set().union(*contents.values()) - names) for i, names in contents.items()}
    if any(lacking.values()):
        raise ValueError(f"Expected the same parameters in every block. Received: missing={lacking}")
    return _lists(tree, "")


def _lists(branch, path):
    if not isinstance(branch, dict):
        return branch
    branch = {name: _lists(part, f"{path}.{name}") for name, part in branch.items()}
    if not any(name.isdigit() for name in branch):
        return branch
    if set(branch) != {str(i) for i in range(len(branch))}:
        raise ValueError(f"Expected numbers from the first on without a gap. Received: {path[1:]}={sorted(branch)}")
    return [branch[str(i)] for i in range(len(branch))]


def _same(x):
    return x


def _flat(x):
    return x.reshape(-1)


def _rows(x):
    """(1, n, D) or (heads, head_dim, D) to (rows, D)."""
    return x.reshape(-1, x.shape[-1])


def _columns(x):
    """(D, heads, head_dim) to (D, heads * head_dim)."""
    return x.reshape(x.shape[0], -1)


def _transposed(x):
    return x.T


def _hwio(x):
    return x.transpose(2, 3, 1, 0)


def _jax_dense(pattern, path) -> tuple[Row, ...]:
    return ((pattern + "/kernel", path + ".kernel", _same), (pattern + "/bias", path + ".bias", _flat))


def _jax_norm(pattern, path) -> tuple[Row, ...]:
    # Group norms of old files are (1, 1, 1, C).
    return ((pattern + "/scale", path + ".scale", _flat), (pattern + "/bias", path + ".bias", _flat))


def _jax_attention(pattern, path) -> tuple[Row, ...]:
    groups = re.compile(pattern).groups
    return (
        (pattern + "/(query|key|value)/kernel", rf"{path}.\{groups + 1}.kernel", _columns),
        (pattern + "/(query|key|value|out)/bias", rf"{path}.\{groups + 1}.bias", _flat),
        (pattern + "/out/kernel", path + ".out.kernel", _rows),
    )


_JAX_UNIT = r"block(\d+)/unit(\d+)"
_JAX_BLOCK = r"Transformer/encoderblock_(\d+)"
# The second number of a pair is that of the released, pre-linen files.
ORIGINAL: tuple[Row, ...] = (
    ("conv_root/kernel", "stem.conv", _same),
    *_jax_norm("gn_root", "stem.norm"),
    (_JAX_UNIT + r"/conv(\d|_proj)/kernel", r"stem.stages.\1.\2.conv\3", _same),
    *_jax_norm(_JAX_UNIT + r"/gn(\d|_proj)", r"stem.stages.\1.\2.norm\3"),
    *_jax_dense("embedding", "embedding"),
    ("cls", "class_token", _rows),
    ("(?:Transformer/posembed_input/)?pos_embedding", "positions", _rows),
    *_jax_norm(_JAX_BLOCK + "/LayerNorm_0", r"blocks.\1.norm1"),
    *_jax_attention(_JAX_BLOCK + "/MultiHeadDotProductAttention_[01]", r"blocks.\1"),
    *_jax_norm(_JAX_BLOCK + "/LayerNorm_[12]", r"blocks.\1.norm2"),
    *_jax_dense(_JAX_BLOCK + "/MlpBlock_[03]/Dense_0", r"blocks.\1.dense1"),
    *_jax_dense(_JAX_BLOCK + "/MlpBlock_[03]/Dense_1", r"blocks.\1.dense2"),
    *_jax_norm("Transformer/encoder_norm", "norm"),
    ("MAPHead_0/probe", "map.probe", _rows),
    *_jax_attention("MAPHead_0/MultiHeadDotProductAttention_0", "map"),
    *_jax_norm("MAPHead_0/LayerNorm_0", "map.norm"),
    *_jax_dense("MAPHead_0/MlpBlock_0/Dense_0", "map.dense1"),
    *_jax_dense("MAPHead_0/MlpBlock_0/Dense_1", "map.dense2"),
    *_jax_dense("pre_logits", "pre_logits"),
    *_jax_dense("head", "head"),
)


def original(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Files of vision_transformer, current and released, and of big_vision; keys joined with `/`."""
    # Files with optimiser state keep the weights in a folder of their own.
    for folder in ("opt/target/", "params/"):
        if any(key.startswith(folder) for key in arrays):
            arrays = {key.removeprefix(folder): arrays[key] for key in arrays if key.startswith(folder)}
    single = {}
    for key, value in arrays.items():
        # Blocks trained under `scan` lie on each other, the first axis counting them.
        if key.startswith("Transformer/encoderblock/"):
            single |= {key.replace("encoderblock/", f"encoderblock_{i}/"): part for i, part in enumerate(value)}
        else:
            # The only numbers of this layout that start from 1.
            single[re.sub(_JAX_UNIT, lambda m: f"block{int(m[1]) - 1}/unit{int(m[2]) - 1}", key)] = value
    return claim(single, ORIGINAL)


def _torch_linear(pattern, path) -> tuple[Row, ...]:
    return ((pattern + r"\.weight", path + ".kernel", _transposed), (pattern + r"\.bias", path + ".bias", _flat))


def _torch_norm(pattern, path) -> tuple[Row, ...]:
    return ((pattern + r"\.weight", path + ".scale", _flat), (pattern + r"\.bias", path + ".bias", _flat))


def _torch_conv(pattern, path) -> tuple[Row, ...]:
    return ((pattern + r"\.weight", path + ".kernel", _hwio), (pattern + r"\.bias", path + ".bias", _flat))


_TIMM_BLOCK = r"blocks\.(\d+)\."
_TIMM_ROOT = r"patch_embed\.backbone\.(?:stem\.)?"
_TIMM_UNIT = r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\."
TIMM: tuple[Row, ...] = (
    # A stem without stages is the backbone itself, and its keys lack `stem.`.
    (_TIMM_ROOT + r"conv\.weight", "stem.conv", _hwio),
    *_torch_norm(_TIMM_ROOT + "norm", "stem.norm"),
    (_TIMM_UNIT + r"conv(\d)\.weight", r"stem.stages.\1.\2.conv\3", _hwio),
    *_torch_norm(_TIMM_UNIT + r"norm(\d)", r"stem.stages.\1.\2.norm\3"),
    (_TIMM_UNIT + r"downsample\.conv\.weight", r"stem.stages.\1.\2.conv_proj", _hwio),
    *_torch_norm(_TIMM_UNIT + r"downsample\.norm", r"stem.stages.\1.\2.norm_proj"),
    *_torch_conv(r"patch_embed\.proj", "embedding"),
    ("cls_token", "class_token", _rows),
    ("dist_token", "distillation_token", _rows),
    ("reg_token|register_tokens", "register_tokens", _rows),
    ("pos_embed", "positions", _rows),
    *_torch_norm(_TIMM_BLOCK + "norm1", r"blocks.\1.norm1"),
    *_torch_linear(_TIMM_BLOCK + r"attn\.qkv", r"blocks.\1.query_key_value"),
    *_torch_linear(_TIMM_BLOCK + r"attn\.proj", r"blocks.\1.out"),
    (_TIMM_BLOCK + r"ls([12])\.gamma", r"blocks.\1.scale\2", _flat),
    *_torch_norm(_TIMM_BLOCK + "norm2", r"blocks.\1.norm2"),
    *_torch_linear(_TIMM_BLOCK + r"mlp\.fc1", r"blocks.\1.dense1"),
    *_torch_linear(_TIMM_BLOCK + r"mlp\.fc2", r"blocks.\1.dense2"),
    *_torch_norm("norm", "norm"),
    *_torch_norm("fc_norm", "pooled_norm"),
    (r"attn_pool\.latent", "map.probe", _rows),
    *_torch_linear(r"attn_pool\.q", "map.query"),
    *_torch_linear(r"attn_pool\.kv", "map.key_value"),
    *_torch_linear(r"attn_pool\.proj", "map.out"),
    *_torch_norm(r"attn_pool\.norm", "map.norm"),
    *_torch_linear(r"attn_pool\.mlp\.fc1", "map.dense1"),
    *_torch_linear(r"attn_pool\.mlp\.fc2", "map.dense2"),
    *_torch_linear(r"pre_logits\.fc", "pre_logits"),
    *_torch_linear("head", "head"),
    *_torch_linear("head_dist", "head_distillation"),
)


def timm(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """State dicts of timm's `VisionTransformer`, and of facebookresearch's DeiT, MAE, MoCo v3, DINO and DINOv2."""
    paths = {}
    for path, value in claim(_unwrapped(arrays), TIMM, ignored="mask_token|decoder_.*").items():
        fused = re.fullmatch(r"(.*)\.((?:query_)?key_value)\.(kernel|bias)", path)
        if fused is None:
            paths[path] = value
            continue
        names = fused[2].split("_")
        for name, piece in zip(names, np.split(value, len(names), axis=-1)):
            paths[f"{fused[1]}.{name}.{fused[3]}"] = piece
    return paths


def _unwrapped(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of the encoder alone: DINO's teacher, MoCo's base encoder, or the only one, under the names of timm."""
    sign = "patch_embed.proj.weight"
    fronts = sorted(key.removesuffix(sign) for key in arrays if key.endswith(sign))
    chosen = [front for front in fronts if "teacher" in front or "base_encoder" in front] or fronts
    front = chosen[0] if chosen else ""
    inside = {key.removeprefix(front): value for key, value in arrays.items() if key.startswith(front)}
    # Projection heads of pre-training have numbered layers, or a name.
    heads = re.compile(r"head\.(\d+|mlp|last_layer)\.")
    inside = {key: value for key, value in inside.items() if not heads.match(key)}
    chunked = re.compile(r"blocks\.\d+\.(\d+\.)")
    deit3 = re.compile(r"(blocks\.\d+\.)gamma_([12])")
    return {deit3.sub(r"\1ls\2.gamma", chunked.sub(r"blocks.\1", key)): value for key, value in inside.items()}


_HF_LAYER = r"(?:encoder\.layer|layers)\.(\d+)\."
# The second name of a pair is transformers 5's.
HUGGINGFACE: tuple[Row, ...] = (
    *_torch_conv(r"embeddings\.patch_embeddings\.projection", "embedding"),
    (r"embeddings\.cls_token", "class_token", _rows),
    (r"embeddings\.distillation_token", "distillation_token", _rows),
    (r"embeddings\.register_tokens", "register_tokens", _rows),
    (r"embeddings\.position_embeddings", "positions", _rows),
    *_torch_norm(_HF_LAYER + "(?:layernorm_before|norm1)", r"blocks.\1.norm1"),
    *_torch_linear(_HF_LAYER + r"attention\.(?:attention\.query|q_proj)", r"blocks.\1.query"),
    *_torch_linear(_HF_LAYER + r"attention\.(?:attention\.key|k_proj)", r"blocks.\1.key"),
    *_torch_linear(_HF_LAYER + r"attention\.(?:attention\.value|v_proj)", r"blocks.\1.value"),
    *_torch_linear(_HF_LAYER + r"attention\.(?:output\.dense|o_proj)", r"blocks.\1.out"),
    (_HF_LAYER + r"layer_scale([12])\.lambda1", r"blocks.\1.scale\2", _flat),
    *_torch_norm(_HF_LAYER + "(?:layernorm_after|norm2)", r"blocks.\1.norm2"),
    *_torch_linear(_HF_LAYER + r"(?:intermediate\.dense|mlp\.fc1)", r"blocks.\1.dense1"),
    *_torch_linear(_HF_LAYER + r"(?:output\.dense|mlp\.fc2)", r"blocks.\1.dense2"),
    *_torch_norm("layernorm", "norm"),
    *_torch_linear(r"pooler\.dense", "pre_logits"),
    *_torch_linear("(?:cls_)?classifier", "head"),
    *_torch_linear("distillation_classifier", "head_distillation"),
)


def huggingface(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """State dicts of transformers' ViT, DeiT, Dinov2 and Dinov2WithRegisters, with or without a head."""
    model = re.compile(r"^(vit|deit|dinov2|dinov2_with_registers)\.")
    arrays = {model.sub("", key): value for key, value in arrays.items() if value.size}
    # The pooler is Dense + tanh, as pre_logits is, but the classifiers of transformers do not look at it.
    if any("classifier." in key for key in arrays):
        arrays = {key: value for key, value in arrays.items() if not key.startswith("pooler.")}
    return claim(arrays, HUGGINGFACE, ignored=r"embeddings\.mask_token")
