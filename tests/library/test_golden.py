"""Exactness: the original JAX code's outputs, from its checkpoints. See tests/golden/README.md."""

import keras
import numpy as np
import pytest

from tests.conftest import golden, golden_model
from vit_keras import analysis
from vit_keras.checkpoints import export_arrays, load_weights_from

VIT_CASES = [
    "vit_token",
    "vit_token_prelogits",
    "vit_gap",
    "vit_token_unpooled",
    "vit_unpooled",
    "vit_patch32",
    "vit_rect",
    "vit_cropped",
    "vit_token_lowvar",
]
CASES = [*VIT_CASES, "hybrid_r50", "hybrid_r3_odd", "hybrid_rti", "hybrid_gap_norep"]
PRE_LINEN = ("vit_token", "vit_token_prelogits", "hybrid_r50")


def loaded(name, weights=None, **changes):
    model = golden_model(name, **changes)
    load_weights_from(model, golden(weights or name), top=True)
    return model


def assert_close_to_scale(found, expected, what, tolerance=2e-5):
    scale = np.abs(expected).max()
    difference = np.abs(np.asarray(found) - expected).max()
    assert difference <= tolerance * scale, f"{what}: {difference:.2e} off, scale {scale:.2e}"


@pytest.mark.parametrize("name", CASES)
def test_every_output_is_the_original_codes(name):
    model, expected = loaded(name), golden(f"{name}_io")
    blocks = [f"Transformer_encoderblock_{i}" for i in range(10) if f"block_{i}" in expected]
    places = {f"block_{i}": block for i, block in enumerate(blocks)}
    places |= {"embedding": "embedding", "encoded": "Transformer_encoder_norm", "tokens": "Transformer_dropout"}
    places |= {key: key.removeprefix("resnet/").replace("/", "_") for key in expected if key.startswith("resnet/")}
    places = {key: layer for key, layer in places.items() if key in expected}
    outputs = [model.get_layer(layer).output for layer in places.values()]
    np.testing.assert_allclose(model(expected["images"]), expected["logits"], atol=2e-5, rtol=0)
    found = keras.Model(model.input, outputs)(expected["images"]) if outputs else []
    for key, value in zip(places, found):
        assert_close_to_scale(value, expected[key], key)


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("lowvar")])
def test_attention_probabilities(name):
    expected = golden(f"{name}_io")
    count = sum(key.startswith("attn_") for key in expected)
    scores = analysis.attention_scores(loaded(name), expected["images"], range(count))
    for i in range(count):
        np.testing.assert_allclose(scores[i], expected[f"attn_{i}"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in CASES if "lowvar" not in name])
def test_head_input(name):
    expected = golden(f"{name}_io")
    model = golden_model(name, include_top=False)
    load_weights_from(model, golden(name), top=False)
    assert_close_to_scale(model(expected["images"]), expected["pre_logits"], "pre_logits")


def test_parts_of_a_block():
    model, expected = loaded("vit_token"), golden("vit_token_io")
    block = model.get_layer("Transformer_encoderblock_0")
    normed = block.norm_0(expected["tokens"])
    parts = {"LayerNorm_0": normed, "MultiHeadDotProductAttention_0": block.attention(normed)}
    parts["LayerNorm_1"] = block.norm_1(expected["tokens"] + parts["MultiHeadDotProductAttention_0"])
    parts["MlpBlock_0"] = block.mlp(parts["LayerNorm_1"])
    for name, value in parts.items():
        assert_close_to_scale(value, expected[f"block_0_parts/{name}"], name)


def test_low_variance_sees_the_epsilon_of_group_norm():
    model, expected = loaded("hybrid_r50"), golden("hybrid_r50_lowvar_io")
    outputs = [model.get_layer(layer).output for layer in ("gn_root", "embedding")]
    logits, root, embedding = keras.Model(model.input, [model.output, *outputs])(expected["images"])
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-5, rtol=0)
    assert_close_to_scale(root[:, ::3, ::3], expected["resnet/gn_root"], "gn_root")
    assert_close_to_scale(embedding, expected["embedding"], "embedding")


@pytest.mark.parametrize("name", CASES)
def test_export_is_bit_equal_to_the_current_file(name):
    assert_same_arrays(export_arrays(loaded(name), naming="current"), golden(name))


@pytest.mark.parametrize("name", PRE_LINEN)
def test_released_names_both_ways(name):
    released = golden(f"{name}_prelinen")
    model = loaded(name, f"{name}_prelinen")
    assert_same_arrays(export_arrays(model, naming="released"), released)
    assert_same_arrays(export_arrays(model, naming="current"), golden(name))


def assert_same_arrays(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].shape == value.shape, key
        assert found[key].dtype == value.dtype, key
        assert np.array_equal(found[key], value), key


def as_file(model, values):
    """Values of a model's trainable variables under the keys and shapes of the original file."""
    for variable, value in zip(model.trainable_variables, values):
        variable.assign(value)
    return export_arrays(model, naming="current")


def test_gradients():
    import tensorflow as tf

    model, expected = loaded("vit_token"), golden("vit_token_grad")
    with tf.GradientTape() as tape:
        logits = model(golden("vit_token_io")["images"], training=True)
        losses = keras.losses.sparse_categorical_crossentropy(expected["labels"], logits, from_logits=True)
        loss = tf.reduce_mean(losses)
    gradients = tape.gradient(loss, model.trainable_variables)
    assert abs(float(loss) - float(expected["loss"])) < 1e-5
    keys = [key for key in expected if key.startswith("grad/")]
    norm = np.sqrt(sum(np.sum(np.square(expected[key], dtype=np.float64)) for key in keys))
    found = as_file(model, gradients)
    assert found.keys() == {key.removeprefix("grad/") for key in keys}
    for key in keys:
        scale = max(np.abs(expected[key]).max(), 1e-3 * norm)
        difference = np.abs(found[key.removeprefix("grad/")] - expected[key]).max()
        assert difference <= 1e-5 * scale, f"{key}: {difference:.2e} off, scale {scale:.2e}"


def test_five_steps_of_sgd():
    """optax's order: momentum sums clipped gradients, and the rate of the step multiplies the sum."""
    import tensorflow as tf

    model, expected = loaded("vit_token"), golden("vit_token_sgd5")
    pixels = golden("vit_token_io")["images"]

    @tf.function
    def loss_and_gradients():
        with tf.GradientTape() as tape:
            logits = model(pixels, training=True)
            loss = keras.losses.sparse_categorical_crossentropy(expected["labels"], logits, from_logits=True)
            loss = tf.reduce_mean(loss)
        return loss, tape.gradient(loss, [variable.value for variable in model.trainable_variables])

    momentum = [0.0] * len(model.trainable_variables)
    losses = []
    for rate in expected["lr"][:6]:
        loss, gradients = loss_and_gradients()
        losses.append(float(loss))
        if len(losses) > 5:
            break
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        momentum = [0.9 * before + gradient for before, gradient in zip(momentum, gradients)]
        for variable, step in zip(model.trainable_variables, momentum):
            variable.assign_sub(rate * step)
    np.testing.assert_allclose(losses, expected["f32/losses"], atol=1e-4, rtol=0)
    found = export_arrays(model, naming="current")
    for key in [key for key in expected if key.startswith("f32/after5/")]:
        assert_close_to_scale(found[key.removeprefix("f32/after5/")], expected[key], key, tolerance=1e-4)
