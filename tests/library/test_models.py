"""The families: published sizes, the constructors' arguments, image sizes."""

import json
import math
import warnings

import keras
import numpy as np
import pytest

import vit_keras
from tests.conftest import GOLDEN, golden, images, randomise, run_python, tiny, tiny_hybrid
from vit_keras import analysis, catalog, hybrid, registry, vit
from vit_keras.checkpoints import CheckpointError, export_arrays, open_checkpoint, save_npz
from vit_keras.checkpoints.facts import describe
from vit_keras.checkpoints.model import facts_of_model
from vit_keras.spec import POSITIONS

CONFIGS = {  # our name → name of the original config
    "vit_ti16": "ViT-Ti_16",
    "vit_s16": "ViT-S_16",
    "vit_s32": "ViT-S_32",
    "vit_b8": "ViT-B_8",
    "vit_b16": "ViT-B_16",
    "vit_b32": "ViT-B_32",
    "vit_l16": "ViT-L_16",
    "vit_l32": "ViT-L_32",
    "vit_h14": "ViT-H_14",
    "r_ti16": "R+ViT-Ti_16",
    "r26_s32": "R26+ViT-S_32",
    "r26_b32": "R26+ViT-B_32",
    "r50_b16": "R50+ViT-B_16",
    "r50_l32": "R50+ViT-L_32",
}
BY_FORMULA = {"vit_mini": 702_280, "vit_so400m14": 413_597_656, "vit_g14": 1_012_611_432, "vit_bigg14": 1_844_440_680}


def shapes_only(name, **options):
    """The model with variables that hold no values: full sizes cost no memory."""
    with keras.StatelessScope(initialize_variables=False):
        return vit_keras.create(name, pretrained=False, **options)


def count(model):
    return sum(math.prod(variable.shape) for variable in model.weights)


def check_description(name, model):
    """The facts of a full-size model name the variant as it was published: Ti/16, R50+B/16 …"""
    published = {
        "r_ti16": "R+Ti",
        "r26_s32": "R26+S/32",
        "r26_b32": "R26+B/32",
        "r50_b16": "R50+B/16",
        "r50_l32": "R50+L/32",
    }
    facts = facts_of_model(model)
    said = describe(facts.width, facts.depth, facts.patch_size, facts.stem).rpartition(": ")[2]
    variant = registry.VARIANTS[name]
    assert said == published.get(name, f"{variant.size}/{variant.patch_size}")


@pytest.mark.parametrize("name", registry.list_models())
def test_parameter_counts(name):
    assert name in registry.PARAMETERS, "a variant without a row in its family's PARAMETERS"
    truth = json.loads((GOLDEN / "shapes" / "summary.json").read_text())
    expected = truth[CONFIGS[name]]["params"] if name in CONFIGS else BY_FORMULA[name]
    assert registry.PARAMETERS[name] == expected
    at_224 = shapes_only(name, image_size=224, classes=1000)
    assert count(at_224) == expected
    check_description(name, at_224)
    same = (registry.VARIANTS[name].image_size, registry.VARIANTS[name].classes) == (224, 1000)
    model = at_224 if same else shapes_only(name)
    assert model.name == name.replace("_", "-")
    special = {"vit_so400m14": 392, "vit_h14": 392, "vit_g14": 392, "vit_bigg14": 392, "vit_mini": 28}
    size = special.get(name, 384 if "_l" in name else 224)
    assert model.input_shape == (None, size, size, 3)
    assert model.output_shape == (None, 10 if name == "vit_mini" else 1000)


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("suffix", ["__i21k", "__i1k384"])
def test_parameter_counts_of_published_files(name, suffix):
    truth = json.loads((GOLDEN / "shapes" / "summary.json").read_text())[CONFIGS[name] + suffix]
    options = {"image_size": truth["image"], "classes": truth["num_classes"]}
    if suffix == "__i21k" and f"{name}.orig_in21k" in catalog.ROWS:
        options["weights"] = "imagenet21k"  # all of these files have pre_logits
    elif suffix == "__i21k":
        options["representation_size"] = registry.spec_of(name).width
    assert count(shapes_only(name, **options)) == truth["params"]


@pytest.mark.parametrize(
    ("name", "file", "options"),
    [
        ("vit_b16", "ViT-B_16__i21k", {"weights": "imagenet21k", "classes": 21843}),
        ("vit_b16", "ViT-B_16-gap-norep", {"pooling": "gap"}),
        ("r50_l32", "R50+ViT-L_32", {}),
        ("r_ti16", "R+ViT-Ti_16", {}),
    ],
)
def test_names_and_shapes_of_full_size_files(name, file, options, monkeypatch):
    """Every key and shape of the file, released and current, from a model without values."""
    expected = json.loads((GOLDEN / "shapes" / f"shapes_{file}.json").read_text())
    model = shapes_only(name, image_size=224, **options)
    empty = lambda variable: np.broadcast_to(np.float32(0), variable.shape)  # noqa: E731
    monkeypatch.setattr("vit_keras.checkpoints.rules.to_numpy", empty)
    current = {key: list(array.shape) for key, array in export_arrays(model, "current").items()}
    assert current == expected["params"]
    assert set(export_arrays(model, "released")) == {expected["released_npz_names"].get(key, key) for key in current}


def test_flops():
    assert round(analysis.flops(registry.spec_of("vit_b16")) / 1e9, 1) == 35.2
    assert round(analysis.flops(registry.spec_of("vit_l16", image_size=224)) / 1e9, 0) == 123


@pytest.mark.parametrize(
    "build", [tiny, tiny_hybrid, lambda: tiny(pooling="map", registers=2), lambda: tiny(pooling=None)]
)
def test_flops_against_tensorflows_profiler(build):
    """What TensorFlow counts in the graph: our figure leaves out the small change (softmax, GELU, additions)."""
    import tensorflow as tf

    model = build()
    graph = tf.function(model).get_concrete_function(tf.TensorSpec((1, 32, 32, 3))).graph
    profiler = tf.compat.v1.profiler
    options = {**profiler.ProfileOptionBuilder.float_operation(), "output": "none"}
    counted = profiler.profile(graph, options=options).total_float_ops
    assert 0.9 < analysis.flops(model_spec(model)) / counted <= 1.01


def model_spec(model):
    from vit_keras.spec import Stem, ViTSpec

    names = [layer.name for layer in model.layers]
    return ViTSpec(
        width=32,
        depth=2,
        num_heads=4,
        mlp_dim=64,
        patch_size=model.get_layer("embedding").patch_size,
        image_size=32,
        classes=5,
        stem=Stem((1, 1), 0.5) if "conv_root" in names else None,
        pooling="map" if "MAPHead_0" in names else "token" if "ExtractToken" in names else None,
        registers=2 if "registers" in names else 0,
    )


def test_old_layer_names():
    model = tiny(representation_size=16)
    names = [layer.name for layer in model.layers]
    blocks = ["Transformer_encoderblock_0", "Transformer_encoderblock_1"]
    old = ["embedding", "class_token", "Transformer_posembed_input", *blocks, "Transformer_encoder_norm"]
    old += ["ExtractToken", "pre_logits", "head"]
    assert [name for name in names if name in old] == old


@pytest.mark.parametrize(
    "size", [32, np.int64(32), (32, 32), [32, 32], np.array([32, 32]), (np.int32(32), 32), np.array(32)]
)
def test_image_size_forms(size):
    assert tiny(image_size=size).input_shape == (None, 32, 32, 3)


@pytest.mark.parametrize("size", [32.0, "32", True, (32,), (32, 32, 3), 0, (32, -8), (None, 32)])
def test_image_sizes_that_are_none(size):
    with pytest.raises(ValueError, match=r"`image_size` must be .* Received: image_size="):
        tiny(image_size=size)


def test_height_comes_first():
    model = tiny(image_size=(32, 48))
    assert model.input_shape == (None, 32, 48, 3)
    assert model.get_layer("Transformer_posembed_input").grid == (4, 6)


@pytest.mark.parametrize("remainder", ["error", "pad", "crop"])
def test_sizes_that_the_patch_does_not_divide(remainder):
    if remainder == "error":
        with pytest.raises(ValueError, match=r"\(30, 32\) .* sizes that work are \(24, 32\) and \(32, 32\)"):
            tiny(image_size=(30, 32))
        return
    model = tiny(image_size=(30, 32), remainder=remainder)
    assert model.get_layer("embedding").output.shape == (None, 4 if remainder == "pad" else 3, 4, 32)
    assert model(images(2, 30, 32, 3)).shape == (2, 5)


def test_hybrid_refuses_by_the_stems_map():
    """30 pixels are fine for a patch of 1 on the stem's map; 48 are not for a patch of 8 on the root's 12x12."""
    assert tiny_hybrid(image_size=30).get_layer("embedding").output.shape[1:3] == (4, 4)
    with pytest.raises(ValueError, match=r"feature map \(1/4 of the image\) .* \(32, 32\) and \(64, 64\)"):
        tiny_hybrid(image_size=48, stem_layers=(), patch_size=8)


@pytest.mark.parametrize("build", [tiny, tiny_hybrid])
@pytest.mark.parametrize("position", POSITIONS)
def test_any_size_equals_the_static_model(build, position):
    static, free = (randomise(build(image_size=size, position=position)) for size in (32, None))
    free = randomise(build(image_size=None, native_size=32, position=position))
    assert free.input_shape == (None, None, None, 3)
    np.testing.assert_array_equal(static(images()), free(images()))
    assert free(images(1, 48, 64, 3)).shape == (1, 5)


@pytest.mark.parametrize("position", POSITIONS)
def test_any_size_equals_a_static_model_with_resized_tables(position, tmp_path):
    free = randomise(tiny(image_size=None, native_size=32, position=position))
    static = tiny(image_size=(48, 64), position=position)
    free.save_weights(tmp_path / "w.weights.h5")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        static.load_weights(tmp_path / "w.weights.h5")
    x = images(2, 48, 64, 3)
    np.testing.assert_allclose(free(x), static(x), atol=1e-5)


def test_any_size_compiles_and_holds_no_resize_op():
    import tensorflow as tf

    model = randomise(tiny(image_size=None, native_size=32))
    x = images(2, 48, 64, 3)
    expected = model(x)
    np.testing.assert_allclose(tf.function(model, jit_compile=True)(x), expected, atol=1e-5)
    graph = tf.function(model).get_concrete_function(tf.TensorSpec((None, None, None, 3))).graph
    kinds = {node.op for node in graph.as_graph_def().node}
    assert not {kind for kind in kinds if "Resize" in kind or "ExtractImagePatches" in kind}
    np.testing.assert_allclose(
        tf.function(model, input_signature=[tf.TensorSpec((None, None, None, 3))])(x), expected, atol=1e-5
    )


def test_poolings():
    assert tiny().get_layer("class_token").weights[0].shape == (1, 1, 32)
    for pooling in ("gap", "map", None):
        assert not any(layer.name == "class_token" for layer in tiny(pooling=pooling).layers)
    assert tiny(pooling=None).output_shape == (None, 16, 5)
    assert tiny(pooling=None, class_token=True).output_shape == (None, 17, 5)
    assert tiny(include_top=False).output_shape == (None, 32)
    assert tiny(include_top=False, representation_size=24).output_shape == (None, 24)


def test_mean_is_over_patch_tokens_only():
    model = randomise(tiny(pooling="gap", class_token=True, registers=2, include_top=False))
    tokens = keras.Model(model.input, model.get_layer("Transformer_encoder_norm").output)(images())
    assert tokens.shape == (2, 19, 32)
    np.testing.assert_allclose(model(images()), np.asarray(tokens)[:, 3:].mean(axis=1), atol=1e-5)


def test_map_head_is_big_visions():
    """x = attention(probe, tokens); x + mlp(norm(x)): in NumPy, float64."""
    model = randomise(tiny(pooling="map", include_top=False))
    tokens = np.asarray(keras.Model(model.input, model.get_layer("Transformer_encoder_norm").output)(images()))
    w = {
        key.removeprefix("MAPHead_0/"): value.astype("float64")
        for key, value in export_arrays(model, "current").items()
    }
    a = "MultiHeadDotProductAttention_0"

    def project(x, name):
        return np.einsum("bnd,dah->bnah", x, w[f"{a}/{name}/kernel"]) + w[f"{a}/{name}/bias"]

    query, key, value = project(np.repeat(w["probe"], 2, 0), "query"), project(tokens, "key"), project(tokens, "value")
    scores = np.exp(np.einsum("bqah,bkah->baqk", query, key) / np.sqrt(8))
    scores /= scores.sum(-1, keepdims=True)
    x = (
        np.einsum("bqah,ahd->bqd", np.einsum("baqk,bkah->bqah", scores, value), w[f"{a}/out/kernel"])
        + w[f"{a}/out/bias"]
    )
    normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    hidden = normed * w["LayerNorm_0/scale"] + w["LayerNorm_0/bias"]
    hidden = hidden @ w["MlpBlock_0/Dense_0/kernel"] + w["MlpBlock_0/Dense_0/bias"]
    hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    expected = (x + hidden @ w["MlpBlock_0/Dense_1/kernel"] + w["MlpBlock_0/Dense_1/bias"])[:, 0]
    np.testing.assert_allclose(model(images()), expected, atol=2e-5)


def test_new_head_is_zero():
    model = tiny(head_bias=-10.0)
    assert not np.asarray(model.get_layer("head").kernel).any()
    np.testing.assert_array_equal(model(images()), np.full((2, 5), -10.0, "float32"))


def test_drop_path_grows_with_depth():
    model = tiny(drop_path=0.2, num_layers=3)
    rates = [model.get_layer(f"Transformer_encoderblock_{i}").drop_path for i in range(3)]
    np.testing.assert_allclose(rates, [0.0, 0.1, 0.2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stem_layers": (-1,)}, "`stem_layers` must be an integer of at least 1"),
        ({"stem_layers": (1, 0, 1)}, "`stem_layers` must be an integer of at least 1"),
        ({"width_factor": 0.3}, "`width_factor` must make 64 channels a multiple of the 32 groups"),
    ],
)
def test_stems_are_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_hybrid(**changes)


def test_unknown_arguments_are_named():
    with pytest.raises(TypeError, match=r"There is no argument 'drop_rate'\. Did you mean 'drop_path'"):
        tiny(drop_rate=0.1)
    with pytest.raises(TypeError, match=r"There is no argument 'zzz'\. See vit_keras\.vit\.build_model"):
        vit.vit_ti16(pretrained=False, zzz=1)
    with pytest.raises(ValueError, match="`stage` belongs to hybrids; vit_ti16 has no ResNet stem"):
        vit.vit_ti16(pretrained=False, stage=3)


def test_stages_of_the_stem():
    """The paper's: stage 4 at 1/32, or stage 3 at 1/16 with the fourth stage's units."""
    third = shapes_only("r50_l32", image_size=224, stage=3)
    assert third.get_layer("embedding").output.shape[1:3] == (14, 14)
    assert sum(layer.name.startswith("block3_unit") for layer in third.layers) == 9
    fourth = shapes_only("r50_b16", image_size=224, stage=4)
    assert fourth.get_layer("embedding").output.shape[1:3] == (7, 7)
    assert fourth.get_layer("embedding").kernel.shape == (1, 1, 2048, 768)
    with pytest.raises(ValueError, match="`stage` must be 3 or 4"):
        shapes_only("r_ti16", stage=3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "must be divisible by the number of heads"),
        ({"pooling": "mean"}, "`pooling` must be one of 'token', 'gap', 'map', 'token_gap', 'both', None"),
        ({"class_token": False}, "pooling='token' reads the class token"),
        ({"position": "rope"}, "`position` must be one of"),
        ({"position": "learned_2d", "class_position": True}, "it needs position='learned_1d'"),
        ({"dropout": 1.5}, r"`dropout` must be a rate in \[0, 1\)"),
        ({"classes": 0}, "`classes` must be an integer of at least 1"),
        ({"native_size": 32}, "`native_size` belongs to `image_size=None`"),
        ({"gelu": "quick"}, "`gelu` must be one of"),
        ({"epsilon": -1}, "`epsilon` must be a number above 0"),
        ({"head_bias": "x"}, "`head_bias` must be a number"),
        ({"image_size": None, "native_size": 30}, "nearest image sizes that work"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


# --- the constructors' arguments -------------------------------------------------------------------------------------


@pytest.fixture(name="ti16", scope="module")
def _ti16(tmp_path_factory):
    """A Ti/16 checkpoint for 64-pixel images with 7 classes and `pre_logits`; and the model it came from."""
    model = vit.vit_ti16(image_size=64, classes=7, pretrained=False, representation_size=24)
    for variable in model.weights:
        variable.assign(np.random.default_rng(len(variable.path)).normal(size=variable.shape) * 0.05)
    path = tmp_path_factory.mktemp("weights") / "Ti_16.npz"
    save_npz(model, path)
    return path, model


def test_constructor_loads_a_path(ti16):
    path, source = ti16
    with pytest.warns(UserWarning, match="Can only use pretrained_top with Ti_16.npz if classes = 7. Setting manually"):
        model = vit.vit_ti16(image_size=64, weights=path)
    np.testing.assert_array_equal(model(images(2, 64, 64, 3)), source(images(2, 64, 64, 3)))
    assert model.get_layer("embedding").record["source"] == "Ti_16.npz"


def test_constructor_resizes_positions(ti16):
    with pytest.warns(UserWarning, match=r"16 places; taken as the square \(4, 4\) and resized to \(4, 6\)"):
        model = vit.vit_ti16(image_size=(64, 96), weights=str(ti16[0]), pretrained_top=False, classes=3)
    assert model.output_shape == (None, 3)
    assert model.get_layer("pre_logits").units == 24
    assert not np.asarray(model.get_layer("head").kernel).any()
    assert model.get_layer("embedding").record["source_grid"] == [4, 4]
    assert model.get_layer("embedding").record["grid"] == [4, 6]


def test_constructor_without_top(ti16):
    model = vit.vit_ti16(image_size=64, weights=ti16[0], include_top=False)
    assert model.output_shape == (None, 24)
    model = vit.vit_ti16(image_size=64, weights=ti16[0], include_top=False, representation_size=0)
    assert model.output_shape == (None, 192)
    assert vit.vit_ti16(image_size=64, pretrained=False, include_top=False, pretrained_top=True).output_shape == (
        None,
        192,
    )


def test_native_size_is_the_weights_own(ti16):
    model = vit.vit_ti16(image_size=None, weights=ti16[0], pretrained_top=False)
    assert model.get_layer("Transformer_posembed_input").grid == (4, 4)


def test_path_with_pretrained_false_is_refused(ti16):
    with pytest.raises(ValueError, match="together with pretrained=False"):
        vit.vit_ti16(weights=ti16[0], pretrained=False)


def test_head_is_missing(tmp_path):
    save_npz(tiny(include_top=False, image_size=32), tmp_path / "x.npz")
    with pytest.raises(CheckpointError, match="holds no head: pass pretrained_top=False"):
        vit.vit_ti16(weights=tmp_path / "x.npz")


def test_wrong_variant_is_named(ti16):
    with pytest.raises(
        CheckpointError, match=r"12 blocks of width 192 with patch 16: this is Ti/16\. The model has .*S/32"
    ):
        vit.vit_s32(image_size=64, weights=ti16[0], pretrained_top=False)


def test_registry():
    assert vit_keras.list_models("vit_b*") == ["vit_b8", "vit_b16", "vit_b32", "vit_bigg14"]
    with pytest.raises(ValueError, match="There is no model 'vit_x16'"):
        vit_keras.create("vit_x16")
    for name in registry.list_models():
        family = vit if name in vit.VARIANTS else hybrid
        assert getattr(family, name).__name__ == name
        assert "patch" in getattr(family, name).__doc__


@pytest.mark.parametrize(
    "name",
    [
        "vit_token_prelogits_prelinen",
        "vit_gap",
        "hybrid_r50_prelinen",
        "hybrid_rti",
        "hybrid_r3_odd",
        "hybrid_gap_norep",
    ],
)
def test_from_checkpoint_builds_what_was_saved(name):
    io = golden(f"{name.removesuffix('_prelinen')}_io")
    options = {"image_size": 54} if name == "hybrid_r3_odd" else {}
    model = vit_keras.from_checkpoint(GOLDEN / f"{name}.npz", **options)
    np.testing.assert_allclose(model(io["images"]), io["logits"], atol=2e-5)


def test_from_checkpoint_asks_for_a_size_it_cannot_know():
    with pytest.raises(CheckpointError, match=r"table of 24 places, which is no square: pass image_size"):
        vit_keras.from_checkpoint(GOLDEN / "vit_rect.npz")
    model = vit_keras.from_checkpoint(GOLDEN / "vit_rect.npz", image_size=(32, 48))
    np.testing.assert_allclose(model(golden("vit_rect_io")["images"]), golden("vit_rect_io")["logits"], atol=2e-5)


def test_from_checkpoint_with_changes():
    path, io = GOLDEN / "vit_token.npz", golden("vit_token_io")
    free = vit_keras.from_checkpoint(path, image_size=None)
    np.testing.assert_allclose(free(io["images"]), io["logits"], atol=2e-5)
    new_head = vit_keras.from_checkpoint(path, classes=3)
    assert not np.asarray(new_head(io["images"])).any()
    assert vit_keras.from_checkpoint(path, include_top=False).output_shape == (None, 64)
    rect = vit_keras.from_checkpoint(GOLDEN / "vit_rect.npz", source_grid=(4, 6))
    np.testing.assert_allclose(rect(golden("vit_rect_io")["images"]), golden("vit_rect_io")["logits"], atol=2e-5)
    larger = vit_keras.from_checkpoint(GOLDEN / "vit_rect.npz", source_grid=(4, 6), image_size=64, resize="bicubic")
    assert larger.get_layer("embedding").record["source_grid"] == [4, 6]
    assert larger.get_layer("embedding").record["resize"]["method"] == "bicubic"


def test_constructor_with_another_pooling_than_the_files(ti16):
    with pytest.raises(CheckpointError, match=r" \+ cls \(1, 1, 192\): never claimed"):
        vit.vit_ti16(image_size=64, weights=ti16[0], pooling="gap", pretrained_top=False)


def test_weights_of_other_types():
    with pytest.raises(ValueError, match=r"must be a name or the path .* Received: dict"):
        vit.vit_ti16(weights={})
    with pytest.raises(ValueError, match="Received: NoneType"):
        vit.vit_ti16(weights=None)
    assert vit.vit_ti16(weights=None, pretrained=False, image_size=32).output_shape == (None, 1000)


def test_mistyped_name_of_weights():
    with pytest.raises(
        ValueError, match=r"no weights 'imagenet' for vit_ti16\. There is augreg_in21k, .* or pass the path"
    ):
        vit.vit_ti16(weights="imagenet")


def test_square_is_assumed_with_one_warning(recwarn):
    vit_keras.from_checkpoint(GOLDEN / "vit_token.npz", image_size=(32, 128))
    assert [str(warning.message)[:19] for warning in recwarn] == ["Position embeddings"]


def test_model_of_any_name():
    assert vit_keras.create("vit_ti16", name="mine", image_size=32, pretrained=False).name == "mine"


def test_facts():
    facts = open_checkpoint(GOLDEN / "hybrid_r50_prelinen.npz").facts
    assert (facts.depth, facts.width, facts.num_heads, facts.mlp_dim, facts.classes) == (3, 64, 4, 128, 10)
    assert facts.stem.layers == (2, 1)
    assert facts.native_size == (48, 48)
    assert facts.pooling == "token"


def test_inside_a_strategy_scope():
    """Two mirrored replicas, pretrained: both replicas hold the weights."""
    run_python(
        """
import numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from vit_keras import vit
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
options = dict(image_size=32, pretrained_top=False, classes=3)
with strategy.scope():
    model = vit.vit_mini(**options)
    model.compile("sgd", "mse")
plain = vit.vit_mini(**options)
assert len(model.weights[0].value.values) == 2
for mirrored, variable in zip(model.weights, plain.weights):
    for value in mirrored.value.values:
        np.testing.assert_array_equal(value, variable)
model.fit(np.zeros((4, 32, 32, 3), "float32"), np.ones((4, 3), "float32"), batch_size=4, verbose=0)
"""
    )
