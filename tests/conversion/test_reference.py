"""The NumPy reference against the original code's outputs, and its readers of other layouts against each other."""

import ast
import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import scipy.special

from conversion import reference
from conversion.reference import Settings, forward, read, resize_patch
from conversion.reference_resizing import resize_grid, resize_images
from tests.conftest import GOLDEN, golden, images

VIT = ["vit_token", "vit_token_prelogits", "vit_gap", "vit_token_unpooled", "vit_unpooled", "vit_patch32", "vit_rect"]
CASES = [*VIT, "vit_cropped", "vit_token_lowvar", "hybrid_r50", "hybrid_r3_odd", "hybrid_rti", "hybrid_gap_norep"]
POOLING = {"token": "token", "gap": "gap", "token_unpooled": None, "unpooled": None}
FOUR_HEADS = Settings(num_heads=4)


@pytest.fixture(autouse=True)
def _fresh_keras_state():
    """Nothing here touches Keras, and cleaning up behind it takes longer than most of these tests."""


def settings_of(name):
    config = json.loads((GOLDEN / f"{name}.json").read_text())["config"]
    return Settings(
        num_heads=config["transformer"]["num_heads"],
        pooling=POOLING[config["classifier"]],
        remainder="crop" if name == "vit_cropped" else "error",
        source_grid=(4, 6) if name == "vit_rect" else None,
    )


def assert_near(found, expected, what=""):
    """Within 2e-5 of the largest value."""
    difference, scale = np.abs(found - expected).max(), np.abs(expected).max()
    assert found.shape == expected.shape, what
    assert difference <= 2e-5 * scale, f"{what}: {difference:.1e} off, scale {scale:.1e}"


def assert_same_outputs(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, atol=1e-12 * max(1.0, np.abs(value).max()), rtol=0, err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_every_output_is_the_original_codes(name):
    expected = golden(f"{name}_io")
    found = forward(read(golden(name), "original"), settings_of(name), expected["images"])
    found["pre_logits"] = found["features"]
    keys = [key for key in expected if key != "images" and not key.startswith("block_0_parts/")]
    assert len(keys) > 8 or name == "vit_token_lowvar"
    for key in keys:
        assert_near(found[key], expected[key], key)
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=2e-5, rtol=0)


def test_low_variance_sees_the_epsilon_of_group_norm():
    parameters, expected = read(golden("hybrid_r50"), "original"), golden("hybrid_r50_lowvar_io")
    found = forward(parameters, FOUR_HEADS, expected["images"])
    found["resnet/gn_root"] = found["resnet/gn_root"][:, ::3, ::3]
    for key in expected.keys() - {"images"}:
        assert_near(found[key], expected[key], key)
    wrong = forward(parameters, dataclasses.replace(FOUR_HEADS, group_norm_epsilon=1e-5), expected["images"])
    assert np.abs(wrong["logits"] - expected["logits"]).max() > 1e-3


@pytest.mark.parametrize("name", ["vit_token", "vit_token_prelogits", "hybrid_r50"])
def test_released_names_are_the_same_parameters(name):
    pixels = golden(f"{name}_io")["images"][:1]
    found, expected = (
        forward(read(golden(file), "original"), settings_of(name), pixels) for file in (f"{name}_prelinen", name)
    )
    assert_same_outputs(found, expected)


@pytest.mark.parametrize("case", ["token", "prelogits_drop", "prelogits_keep", "gap"])
def test_features_at_another_size(case):
    expected = golden(f"load_pretrained_{case}")
    record = json.loads((GOLDEN / f"load_pretrained_{case}.json").read_text())
    arrays = golden(Path(record["source"]).stem)
    if case == "prelogits_drop":
        arrays = {key: value for key, value in arrays.items() if not key.startswith(("pre_logits", "head"))}
    pooling = POOLING[record["target_config"]["classifier"]]
    found = forward(read(arrays, "original"), Settings(num_heads=4, pooling=pooling), expected["images"])
    assert_near(found["features"], expected["pre_logits"])


def test_original_resize_of_positions():
    cases = golden("posembed_resize")
    for name in {key.split("/")[0] for key in cases}:
        old, new = (int(part.split("x")[0]) for part in name.split("_")[:3:2])
        prefix = int(name.endswith("_tok"))
        table = cases[f"{name}/in"][0, prefix:].astype("float64").reshape(old, old, -1)
        found = resize_grid(table, (new, new), "align_corners").reshape(new * new, -1)
        np.testing.assert_allclose(found, cases[f"{name}/out"][0, prefix:], atol=2e-6, rtol=0, err_msg=name)


def test_aligned_corners_keep_the_border():
    """`scipy.ndimage.zoom` as the original calls it gives zeros here, rounding putting the last sample beyond it."""
    ramp = np.linspace(1, 2, 24)[:, None, None] * np.ones((24, 24, 1))
    np.testing.assert_allclose(resize_grid(ramp, (22, 24), "align_corners")[:, 5, 0], np.linspace(1, 2, 22))


# Outputs of torch.nn.functional.interpolate of [[0, 2, 1], [4, -3, 5], [1, 7, -2]], by method, offset and size.
TORCH = {
    ("bicubic", 0.0, (2, 4)): "1.047327 0.514578 1.050917 2.269823 1.623766 4.102713 3.118200 -0.620268",
    ("bicubic", 0.1, (2, 4)): "0.846927 0.676871 1.134986 1.997611 2.191523 3.173810 2.574243 0.524178",
    ("bicubic", 0.0, (5, 2)): "0.330406 1.139 1.087266 2.128734 2.132812 2.941406 2.583516 1.412672 2.727906 -0.008375",
    ("antialiased_bicubic", 0.0, (2, 4)): "1.607352 0.274139 0.788717 2.82849 2.153338 3.082107 2.372516 0.469419",
    ("antialiased_bicubic", 0.0, (5, 2)): (
        "0.703019 1.393228 0.81178 1.625608 1.229535 1.919743 2.700031 1.597758 3.629062 1.350071"
    ),
}


@pytest.mark.parametrize(("method", "offset", "size"), TORCH)
def test_bicubic_resizes_of_torch(method, offset, size):
    grid = np.array([[0.0, 2, 1], [4, -3, 5], [1, 7, -2]])[..., None]
    found = resize_grid(grid, size, method, offset)
    expected = np.array(TORCH[method, offset, size].split(), "float64")
    np.testing.assert_allclose(found.ravel(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [(8, 6), (9, 6), (12, 13), (32, 24)])
def test_flexivit_identity(size):
    """A patch made larger by the resize that the kernel's resize inverts gives the patch's own token."""
    rng = np.random.default_rng(0)
    patches, kernel = rng.normal(size=(5, 8, 6, 3)), rng.normal(size=(8, 6, 3, 7))
    larger = resize_patch(kernel, size)
    assert larger.shape == (*size, 3, 7)
    expected = np.einsum("bhwc,hwcd->bd", patches, kernel)
    found = np.einsum("bhwc,hwcd->bd", resize_images(patches, size), larger)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_resize_of_patches_is_tensorflows():
    tf = pytest.importorskip("tensorflow")
    for size in ((3, 9), (14, 5), (6, 4)):
        expected = tf.image.resize(images(2, 7, 5, 3), size).numpy()
        np.testing.assert_allclose(resize_images(images(2, 7, 5, 3), size), expected, atol=1e-5)


def linear(name, part):
    return {f"{name}.weight": part["kernel"].T} | ({f"{name}.bias": part["bias"]} if "bias" in part else {})


def norm(name, part):
    return {f"{name}.weight": part["scale"], f"{name}.bias": part["bias"]}


def conv(name, part):
    return {f"{name}.weight": part["kernel"].transpose(3, 2, 0, 1), f"{name}.bias": part["bias"]}


def as_timm(p):
    arrays = {"cls_token": p["class_token"][None], "pos_embed": p["positions"][None]}
    arrays |= conv("patch_embed.proj", p["embedding"]) | norm("norm", p["norm"]) | linear("head", p["head"])
    for i, b in enumerate(p["blocks"]):
        parts = [b[name] for name in ("query", "key", "value")]
        qkv = {leaf: np.concatenate([part[leaf] for part in parts], axis=-1) for leaf in parts[0]}
        arrays |= norm(f"blocks.{i}.norm1", b["norm1"]) | norm(f"blocks.{i}.norm2", b["norm2"])
        arrays |= linear(f"blocks.{i}.attn.qkv", qkv) | linear(f"blocks.{i}.attn.proj", b["out"])
        arrays |= linear(f"blocks.{i}.mlp.fc1", b["dense1"]) | linear(f"blocks.{i}.mlp.fc2", b["dense2"])
    return arrays


VIT_NAMES = {
    "norm1": "layernorm_before",
    "query": "attention.attention.query",
    "key": "attention.attention.key",
    "value": "attention.attention.value",
    "out": "attention.output.dense",
    "norm2": "layernorm_after",
    "dense1": "intermediate.dense",
    "dense2": "output.dense",
}
MLP_NAMES = {"dense1": "mlp.fc1", "dense2": "mlp.fc2"}
NEW_NAMES = {name: f"attention.{name[0]}_proj" for name in ("query", "key", "value", "out")} | MLP_NAMES
HUGGINGFACE = {
    "vit": ("vit.encoder.layer", VIT_NAMES),
    "vit of transformers 5": ("vit.layers", VIT_NAMES | NEW_NAMES),
    "dinov2": ("dinov2.encoder.layer", VIT_NAMES | MLP_NAMES | {"norm1": "norm1", "norm2": "norm2"}),
    "no prefix": ("encoder.layer", VIT_NAMES),
}


def as_huggingface(p, layer, names):
    start = "" if layer.startswith("encoder") else layer.split(".")[0] + "."
    arrays = {f"{start}embeddings.cls_token": p["class_token"][None], f"{start}embeddings.mask_token": np.zeros(1)}
    arrays |= {f"{start}embeddings.position_embeddings": p["positions"][None]}
    arrays |= conv(f"{start}embeddings.patch_embeddings.projection", p["embedding"])
    arrays |= norm(f"{start}layernorm", p["norm"]) | linear("classifier", p["head"])
    for i, block in enumerate(p["blocks"]):
        for name, part in block.items():
            write = norm if name.startswith("norm") else linear
            arrays |= write(f"{layer}.{i}.{names[name]}", part)
    return arrays


PIXELS = images(2, 64, 64, 3)


def vit_token():
    return read(golden("vit_token"), "original")


def vit_token_outputs(**changes):
    return forward(vit_token(), dataclasses.replace(FOUR_HEADS, **changes), PIXELS)


def test_timm_names():
    assert_same_outputs(forward(read(as_timm(vit_token()), "timm"), FOUR_HEADS, PIXELS), vit_token_outputs())
    arrays = {**as_timm(vit_token()), "mask_token": np.zeros(1), "decoder_blocks.0.norm1.weight": np.zeros(1)}
    arrays["fc_norm.weight"], arrays["fc_norm.bias"] = arrays.pop("norm.weight"), arrays.pop("norm.bias")
    pooled = forward(read(arrays, "timm"), Settings(4, pooling="gap", norm_after_pooling=True), PIXELS)
    assert pooled["encoded"] is pooled["block_2"]
    mean = pooled["encoded"][:, 1:].mean(axis=1)
    mean = (mean - mean.mean(-1, keepdims=True)) / np.sqrt(mean.var(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(pooled["features"], mean * arrays["fc_norm.weight"] + arrays["fc_norm.bias"])
    with pytest.raises(ValueError, match="norm_after_pooling"):
        forward(read(arrays, "timm"), FOUR_HEADS, PIXELS)


@pytest.mark.parametrize("era", HUGGINGFACE)
def test_huggingface_names(era):
    arrays = as_huggingface(vit_token(), *HUGGINGFACE[era])
    assert_same_outputs(forward(read(arrays, "huggingface"), FOUR_HEADS, PIXELS), vit_token_outputs())


def test_pooler_of_transformers():
    arrays = as_huggingface(vit_token(), *HUGGINGFACE["vit"])
    arrays |= {"vit.pooler.dense.weight": 0.1 * np.eye(64), "vit.pooler.dense.bias": np.ones(64)}
    assert "pre_logits" not in read(arrays, "huggingface")
    headless = {key: value for key, value in arrays.items() if not key.startswith("classifier")}
    found = forward(read(headless, "huggingface"), FOUR_HEADS, PIXELS)
    np.testing.assert_allclose(found["features"], np.tanh(0.1 * found["encoded"][:, 0] + 1))


def test_hybrid_names_of_timm():
    p, pixels = read(golden("hybrid_r50"), "original"), golden("hybrid_r50_io")["images"]
    root = "patch_embed.backbone."
    arrays = as_timm(p) | norm(f"{root}stem.norm", p["stem"]["norm"])
    kernels = {f"{root}stem.conv": p["stem"]["conv"]}
    for s, stage in enumerate(p["stem"]["stages"]):
        for b, unit in enumerate(stage):
            for name, part in unit.items():
                kind = "downsample." + name.removesuffix("_proj") if name.endswith("_proj") else name
                key = f"{root}stages.{s}.blocks.{b}.{kind}"
                arrays |= norm(key, part) if "norm" in name else {}
                kernels |= {key: part} if "conv" in name else {}
    arrays |= {f"{key}.weight": value.transpose(3, 2, 0, 1) for key, value in kernels.items()}
    found = forward(read(arrays, "timm"), FOUR_HEADS, pixels)
    assert_same_outputs(found, forward(p, FOUR_HEADS, pixels))


@pytest.mark.parametrize("in_variance", [False, True])
def test_epsilon_of_weight_standardisation(in_variance):
    p, settings = read(golden("hybrid_rti"), "original"), settings_of("hybrid_rti")
    settings = dataclasses.replace(settings, std_epsilon=0.1, std_epsilon_in_variance=in_variance)
    pixels, kernel = golden("hybrid_rti_io")["images"].astype("float64"), p["stem"]["conv"]
    deviation = np.sqrt(kernel.var((0, 1, 2)) + 0.1) if in_variance else kernel.std((0, 1, 2)) + 0.1
    # 96 pixels at stride 2 are padded by 2 before and 3 behind.
    expected = np.tensordot(pixels[:, 8:15, 18:25], (kernel - kernel.mean((0, 1, 2))) / deviation, axes=3)
    found = forward(p, settings, pixels)["resnet/conv_root"][:, 5, 10]
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_files_with_optimiser_state_and_scanned_blocks():
    arrays = golden("vit_token")
    for folder in ("opt/target/", "params/"):
        found = read({folder + key: value for key, value in arrays.items()} | {"opt/step": np.array(3)}, "original")
        assert_same_outputs(forward(found, FOUR_HEADS, PIXELS), vit_token_outputs())
    blocks = [key for key in arrays if "encoderblock_0" in key]
    stacked = {key: value for key, value in arrays.items() if "encoderblock" not in key}
    for key in blocks:
        stacked[key.replace("_0/", "/", 1)] = np.stack([arrays[key.replace("block_0", f"block_{i}")] for i in range(3)])
    assert_same_outputs(forward(read(stacked, "original"), FOUR_HEADS, PIXELS), vit_token_outputs())


def test_projections_without_bias():
    p, zeros = vit_token(), vit_token()
    for block, zero in zip(p["blocks"], zeros["blocks"]):
        for name in ("query", "key", "value"):
            del block[name]["bias"]
            zero[name]["bias"] *= 0
    found = forward(read(as_timm(p), "timm"), FOUR_HEADS, PIXELS)
    assert_same_outputs(found, forward(zeros, FOUR_HEADS, PIXELS))


def test_layer_scale_is_a_factor_of_the_last_kernels():
    arrays, folded = as_timm(vit_token()), vit_token()
    for i, block in enumerate(folded["blocks"]):
        for scale, name in enumerate(("out", "dense2"), 1):
            gamma = arrays[f"blocks.{i}.ls{scale}.gamma"] = np.random.default_rng(i + scale).normal(size=64)
            block[name] = {leaf: value * gamma for leaf, value in block[name].items()}
    found = forward(read(arrays, "timm"), FOUR_HEADS, PIXELS)
    assert_same_outputs(found, forward(folded, FOUR_HEADS, PIXELS))


def test_positions_without_a_row_for_the_class_token():
    p = vit_token()
    p["class_token"], p["positions"] = p["class_token"] + p["positions"][:1], p["positions"][1:]
    assert_same_outputs(forward(p, FOUR_HEADS, PIXELS), vit_token_outputs())


@pytest.mark.parametrize("key", ["reg_token", "register_tokens"])
def test_registers_stand_behind_the_class_token_and_have_no_positions(key):
    registers = np.random.default_rng(0).normal(size=(1, 4, 64))
    p = read(as_timm(vit_token()) | {key: registers}, "timm")
    found, without = forward(p, FOUR_HEADS, PIXELS), vit_token_outputs()
    np.testing.assert_array_equal(found["tokens"][0, 1:5], registers[0])
    np.testing.assert_array_equal(np.delete(found["tokens"], range(1, 5), axis=1), without["tokens"])
    pooled = forward(p, dataclasses.replace(FOUR_HEADS, pooling="gap"), PIXELS)
    np.testing.assert_allclose(pooled["features"], found["encoded"][:, 5:].mean(axis=1))


def test_two_heads_of_a_distilled_model():
    p = vit_token()
    arrays = as_timm(p) | linear("head_dist", {"kernel": 2 * p["head"]["kernel"], "bias": p["head"]["bias"]})
    # The distillation token is what the class token was, so that a resize must leave two rows alone.
    arrays |= {"dist_token": arrays["cls_token"], "pos_embed": np.insert(arrays["pos_embed"], 0, 0, axis=1)}
    found = forward(read(arrays, "timm"), FOUR_HEADS, images(1, 96, 80, 3))
    np.testing.assert_array_equal(found["tokens"][0, :2], (p["class_token"] + [[0], [1]] * p["positions"][:1]))
    np.testing.assert_allclose(found["logits_class"], found["encoded"][:, 0] @ p["head"]["kernel"] + p["head"]["bias"])
    second = found["encoded"][:, 1] @ p["head"]["kernel"] * 2 + p["head"]["bias"]
    np.testing.assert_allclose(found["logits_distillation"], second)
    np.testing.assert_allclose(found["logits"], (found["logits_class"] + second) / 2)
    with pytest.raises(ValueError, match="pooling='token' for a distilled model"):
        forward(read(arrays, "timm"), dataclasses.replace(FOUR_HEADS, pooling="gap"), PIXELS)


def test_class_token_and_mean_side_by_side():
    p = vit_token()
    del p["head"]
    found = forward(p, dataclasses.replace(FOUR_HEADS, pooling="token_gap"), PIXELS)
    assert "logits" not in found
    expected = np.concatenate([found["encoded"][:, 0], found["encoded"][:, 1:].mean(axis=1)], axis=1)
    np.testing.assert_allclose(found["features"], expected)


def test_map_head():
    arrays, rng = golden("vit_gap"), np.random.default_rng(0)
    shared = {
        key.split("/", 2)[2]: 0.2 * rng.normal(size=value.shape) for key, value in arrays.items() if "block_0" in key
    }
    arrays |= {f"MAPHead_0/{key}": value for key, value in shared.items() if "LayerNorm_1" not in key}
    arrays["MAPHead_0/probe"] = rng.normal(size=(1, 1, 64))
    found = forward(read(arrays, "original"), dataclasses.replace(FOUR_HEADS, pooling="map"), images(1, 64, 64, 3))
    tokens, attention = found["encoded"][0], {key.split("/", 1)[1]: shared[key] for key in shared if "Attention" in key}
    mixed = attention["out/bias"].copy()
    for head in range(4):
        query, key, value = (
            x @ attention[f"{name}/kernel"][:, head] + attention[f"{name}/bias"][head]
            for name, x in (("query", arrays["MAPHead_0/probe"][0, 0]), ("key", tokens), ("value", tokens))
        )
        mixed += scipy.special.softmax(key @ query / 4) @ value @ attention["out/kernel"][head]
    x = (mixed - mixed.mean()) / np.sqrt(mixed.var() + 1e-6) * shared["LayerNorm_0/scale"] + shared["LayerNorm_0/bias"]
    x = x @ shared["MlpBlock_0/Dense_0/kernel"] + shared["MlpBlock_0/Dense_0/bias"]
    x = x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    x = mixed + x @ shared["MlpBlock_0/Dense_1/kernel"] + shared["MlpBlock_0/Dense_1/bias"]
    np.testing.assert_allclose(found["features"][0], x, atol=1e-10 * np.abs(x).max())


def test_exact_gelu_moves_the_logits_as_much_as_measured():
    moved = np.abs(vit_token_outputs(gelu="exact")["logits"] - vit_token_outputs()["logits"]).max()
    assert 1e-4 < moved < 1e-2


@pytest.mark.parametrize("bad", [{"gelu": "fast"}, {"pooling": "mean"}, {"resize_offset": 0.1}])
def test_settings_check_themselves(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Settings(4, **bad)


def without(key):
    return {name: value for name, value in golden("vit_token").items() if not name.startswith(key)}


@pytest.mark.parametrize(
    ("arrays", "layout", "message"),
    [
        ({}, "flax", "Expected a layout among"),
        ({**golden("vit_token"), "extra": np.ones(1)}, "original", "unknown=\\['extra'\\]"),
        ({**golden("vit_token"), "params/cls": np.ones((1, 1, 64))}, "original", "Expected a patch embedding"),
        (without("Transformer/encoder_norm"), "original", "one norm behind the blocks"),
        (without("Transformer/encoderblock_1/"), "original", "without a gap"),
        (without("Transformer/encoderblock_1/MlpBlock_0/Dense_1/bias"), "original", "'1': \\['dense2.bias'\\]"),
        ({**golden("vit_token"), "pos_embedding": np.ones((1, 17, 64))}, "original", "twice=\\['pos_embedding'\\]"),
    ],
)
def test_files_that_are_not_understood(arrays, layout, message):
    with pytest.raises(ValueError, match=message):
        read(arrays, layout)


def test_positions_that_fit_no_grid():
    p = read(golden("vit_rect"), "original")
    pixels, settings = golden("vit_rect_io")["images"], dataclasses.replace(settings_of("vit_rect"), source_grid=None)
    # 24 patches and a class token are also 5 x 5 patches.
    with pytest.raises(ValueError, match="Expected source_grid"):
        forward(p, settings, pixels)
    for grid in ((5, 5), (4, 6)):
        forward(p, dataclasses.replace(settings, source_grid=grid), pixels)
    for grid in ((3, 6), (6, 3)):
        with pytest.raises(ValueError, match="Expected positions of a grid"):
            forward(p, dataclasses.replace(settings, source_grid=grid), pixels)
    p["positions"] = p["positions"][:20]
    with pytest.raises(ValueError, match=r"Expected positions of a grid, .* Received: 20 rows"):
        forward(p, settings, pixels)


def test_images_and_poolings_that_do_not_fit():
    with pytest.raises(ValueError, match="remainder='crop'"):
        forward(vit_token(), FOUR_HEADS, images(1, 64, 70, 3))
    for pooling in ("token", "map", "token_gap"):
        with pytest.raises(ValueError, match=f"pooling={pooling!r}"):
            forward(read(golden("vit_gap"), "original"), dataclasses.replace(FOUR_HEADS, pooling=pooling), PIXELS)


def test_the_reference_shares_no_code_with_what_it_judges():
    for path in Path(reference.__file__).parent.glob("reference*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"vit_keras", "keras", "tensorflow"}, path.name
