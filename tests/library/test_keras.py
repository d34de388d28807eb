"""Good Keras citizens: saving, cloning, nesting, precision, compilation, backends, export."""

import functools
import json

import keras
import numpy as np
import pytest

import vit_keras
from tests.conftest import GOLDEN, golden, golden_model, images, randomise, run_python, tiny, tiny_hybrid
from vit_keras import analysis, preprocessing
from vit_keras.checkpoints import load_weights_from
from vit_keras.spec import POSITIONS

BUILDS = {
    "plain": tiny,
    "hybrid": tiny_hybrid,
    "everything": lambda: tiny(
        pooling="map",
        class_token=True,
        class_position=False,
        registers=2,
        layer_scale=1e-4,
        representation_size=8,
        dropout=0.1,
        attention_dropout=0.1,
        drop_path=0.1,
        gelu="exact",
        qkv_bias=False,
    ),
    "distilled": lambda: tiny(distillation=True, registers=1),
    "any size": lambda: tiny(image_size=None, native_size=32),
    **{position: lambda position=position: tiny(position=position, registers=1) for position in POSITIONS},
}


@pytest.fixture(name="model", params=BUILDS)
def _model(request):
    return randomise(BUILDS[request.param]())


def test_save_and_load(model, tmp_path):
    x, expected = images(), model(images())
    for name in ("model.keras", "model.weights.h5"):
        path = tmp_path / name
        if name == "model.keras":
            model.save(path)
            again = keras.saving.load_model(path)
        else:
            model.save_weights(path)
            again = keras.models.clone_model(model)
            again.load_weights(path)
        np.testing.assert_array_equal(again(x), expected)


def test_configs(model):
    assert "Lambda" not in model.to_json()
    for again in (
        keras.models.clone_model(model),
        type(model).from_config(model.get_config()),
        keras.models.model_from_json(model.to_json()),
    ):
        again.set_weights(model.get_weights())
        np.testing.assert_array_equal(again(images()), model(images()))
        assert again.to_json() == model.to_json()


@pytest.fixture(name="loaded", scope="module")
def _loaded():
    model = golden_model("vit_token")
    load_weights_from(model, GOLDEN / "vit_token.npz")
    return model


def test_fresh_process_needs_the_import_alone(loaded, tmp_path):
    """No custom_objects, safe mode on; the record of the weights is still there."""
    loaded.save(tmp_path / "m.keras")
    loaded.save_weights(tmp_path / "m.weights.h5")
    (tmp_path / "m.json").write_text(loaded.to_json())
    run_python(
        """
import sys, vit_keras, keras, numpy as np
folder, golden = sys.argv[1:]
io = np.load(golden)
first = keras.models.load_model(folder + "/m.keras")
second = keras.models.model_from_json(open(folder + "/m.json").read())
second.load_weights(folder + "/m.weights.h5")
for model in (first, second):
    np.testing.assert_allclose(model(io["images"]), io["logits"], atol=2e-5)
    assert model.get_layer("embedding").record["source"] == "vit_token.npz"
""",
        tmp_path,
        GOLDEN / "vit_token_io.npz",
    )


def test_record_survives(loaded, tmp_path):
    record = loaded.get_layer("embedding").record
    assert record["gelu"] == "tanh"
    assert record["epsilon"] == 1e-6
    assert record["resize"] == {"method": "align_corners", "offset": 0.0}
    assert json.loads(json.dumps(record)) == record
    x = keras.Input((64, 64, 3))
    inner = keras.models.clone_model(loaded)
    nested = keras.Sequential([keras.Input((64, 64, 3)), keras.Model(x, inner(x)), keras.layers.Softmax()])
    nested.save(tmp_path / "nested.keras")
    surgery = keras.Model(loaded.input, loaded.get_layer("Transformer_encoderblock_1").output)
    for model in (
        inner,
        keras.saving.load_model(tmp_path / "nested.keras"),
        surgery,
        keras.models.clone_model(surgery),
    ):
        embedding = next(layer for layer in vit_keras.layers.walk(model) if layer.name == "embedding")
        assert embedding.get_config()["record"] == record
        assert preprocessing.of(model).value_range == (-1.0, 1.0)


def test_weights_load_before_the_first_call(tmp_path):
    randomise(tiny()).save_weights(tmp_path / "w.weights.h5")
    model = tiny()
    model.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_array_equal(model(images()), randomise(tiny())(images()))


def test_loading_is_independent_of_freezing(tmp_path):
    model = randomise(tiny())
    expected = model(images())
    for layer in model.layers[:-1]:
        layer.trainable = False
    model.save_weights(tmp_path / "w.weights.h5")
    model.trainable = True
    model.load_weights(tmp_path / "w.weights.h5")
    np.testing.assert_array_equal(model(images()), expected)


@pytest.mark.parametrize("position", ["learned_1d", "learned_2d", "relative", "relative_bias"])
def test_load_weights_at_another_size_resizes_with_a_warning(position, tmp_path):
    randomise(tiny(position=position)).save_weights(tmp_path / "w.weights.h5")
    model = tiny(position=position, image_size=(48, 64))
    with pytest.warns(UserWarning, match=r"resizing position embeddings from \(4, 4\) to \(6, 8\)"):
        model.load_weights(tmp_path / "w.weights.h5")
    if position == "learned_1d":
        table = np.asarray(randomise(tiny()).get_layer("Transformer_posembed_input").pos_embedding)
        found = np.asarray(model.get_layer("Transformer_posembed_input").pos_embedding)
        np.testing.assert_array_equal(found[:, 0], table[:, 0])
        np.testing.assert_allclose(found[0, 1], table[0, 1], atol=1e-6)  # corners stay corners
        np.testing.assert_allclose(found[0, -1], table[0, -1], atol=1e-6)


def test_same_count_at_another_grid_is_resized_too(tmp_path):
    randomise(tiny(image_size=(16, 64))).save_weights(tmp_path / "w.weights.h5")
    with pytest.warns(UserWarning, match=r"from \(2, 8\) to \(4, 4\)"):
        tiny().load_weights(tmp_path / "w.weights.h5")


@pytest.mark.parametrize(
    ("saved", "loading"),
    [
        ({"pooling": "gap"}, {"image_size": 48}),  # no row for the class token
        ({}, {"position": "learned_2d", "image_size": 48}),
        ({"hidden_size": 64}, {"image_size": 48}),
    ],
)
def test_position_tables_that_do_not_fit_are_named(saved, loading, tmp_path):
    source, target = (tiny(**changes).get_layer("Transformer_posembed_input") for changes in (saved, loading))
    store = {}
    source.save_own_variables(store)
    before = [np.array(np.asarray(variable)) for variable in target.weights]
    with pytest.raises(ValueError, match=r"expected position tables of shape .* Received: .* with grid"):
        target.load_own_variables(store)
    for old, new in zip(before, target.weights):
        np.testing.assert_array_equal(old, new)


def test_a_table_without_its_grid_is_taken_as_square(tmp_path):
    """Files of other writers: 16 places and a class row into a 6x6 model."""
    source, target = (tiny(image_size=size).get_layer("Transformer_posembed_input") for size in (32, 48))
    with pytest.warns(UserWarning, match=r"from \(4, 4\) to \(6, 6\)"):
        target.load_own_variables({"0": np.asarray(source.pos_embedding)})
    with pytest.raises(ValueError, match="without its grid, and it is not square"):
        target.load_own_variables({"0": np.zeros((1, 13, 32))})


def test_static_model_refuses_another_size():
    with pytest.raises(ValueError, match=r"expected shape=\(None, 32, 32, 3\), found shape=\(2, 48, 48, 3\)"):
        tiny()(images(2, 48, 48, 3))


@pytest.mark.parametrize(
    ("build", "by_argument", "policy"),
    [
        (tiny, True, "mixed_bfloat16"),
        (tiny, False, "mixed_float16"),
        (tiny_hybrid, True, "mixed_float16"),
        (tiny_hybrid, False, "mixed_bfloat16"),
    ],
)
def test_mixed_precision(policy, by_argument, build, tmp_path):
    if not by_argument:
        keras.config.set_dtype_policy(policy)
    model = build(dtype=policy if by_argument else None, representation_size=8)
    for variable in model.weights:
        assert variable.dtype == "float32", variable.path
    assert model.output.dtype == "float32"
    assert model.get_layer("Transformer_encoderblock_0").compute_dtype == policy.removeprefix("mixed_")
    scores = analysis.attention_scores(model, images())[-1]
    assert scores.dtype == np.float32
    model.compile("adam", "mse", jit_compile=False)  # test_compiles does
    losses = model.fit(images(), np.ones((2, 5)), epochs=2, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    model.save(tmp_path / "m.keras")
    np.testing.assert_array_equal(keras.saving.load_model(tmp_path / "m.keras")(images()), model(images()))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_scores_beyond_float16(policy):
    """Scores of about 4e5, six times the largest float16."""
    block = vit_keras.layers.TransformerBlock(num_heads=1, mlp_dim=8, dtype=policy)
    block.build((None, 8, 64))
    for dense in (block.attention.query, block.attention.key):
        dense.kernel.assign(np.eye(64) * 220)
    outputs, scores = block(images(2, 8, 64), return_attention_scores=True)
    assert np.isfinite(np.asarray(keras.ops.cast(outputs, "float32"))).all()
    np.testing.assert_allclose(np.asarray(scores), np.broadcast_to(np.eye(8), scores.shape), atol=1e-6)


SLOW = [pytest.param(build, marks=pytest.mark.slow) for build in ("relative", "relative_bias", "sincos_2d")]


@pytest.mark.parametrize("build", ["plain", "hybrid", "everything", *SLOW])
def test_compiles(build):
    import tensorflow as tf

    model = randomise(BUILDS[build]())
    np.testing.assert_allclose(tf.function(model, jit_compile=True)(images()), model(images()), atol=1e-4)
    model.compile("sgd", "mse", jit_compile=True)
    assert np.isfinite(model.train_on_batch(images(), np.ones((2, 5))))


def test_jax_backend_gives_the_same_outputs(tmp_path):
    code = """
import os, sys
import vit_keras, keras, numpy as np
assert keras.backend.backend() == "jax" and "tensorflow" not in sys.modules
x = np.load(sys.argv[1] + "/x.npy")
for path in sorted(p for p in os.listdir(sys.argv[1]) if p.endswith(".keras")):
    model = keras.models.load_model(os.path.join(sys.argv[1], path))
    expected = np.load(os.path.join(sys.argv[1], path + ".npy"))
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-5, rtol=1e-5, err_msg=path)
model.compile("sgd", "mse")
assert np.isfinite(model.train_on_batch(x, np.ones((2, 5))))
"""
    np.save(tmp_path / "x.npy", images())
    for name in ("everything", "hybrid"):
        model = randomise(BUILDS[name]())
        model.save(tmp_path / f"{name}.keras")
        np.save(tmp_path / f"{name}.keras.npy", np.asarray(model(images())))
    run_python(code, tmp_path, KERAS_BACKEND="jax", JAX_PLATFORMS="cpu")


def test_export_with_dynamic_batch(tmp_path):
    import tensorflow as tf

    for name in ("any size", "hybrid"):
        model = randomise(BUILDS[name]())
        model.export(tmp_path / name)
        served = tf.saved_model.load(tmp_path / name)
        for batch in (1, 7):
            x = images(batch, 32, 32, 3)
            np.testing.assert_allclose(served.serve(x), model(x), atol=1e-5)


def test_gradient_reaches_every_variable():
    import tensorflow as tf

    for build in BUILDS.values():
        model = randomise(build())
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(images()) ** 2)
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        missing = [v.path for v, g in zip(model.trainable_variables, gradients) if g is None]
        assert not missing


# --- attention scores ------------------------------------------------------------------------------------------------


def test_attention_scores_of_nested_and_reloaded_models(loaded, tmp_path):
    io = golden("vit_token_io")
    before = np.asarray(loaded(io["images"]))
    x = keras.Input((64, 64, 3))
    nested = keras.Sequential([keras.Input((64, 64, 3)), keras.Model(x, keras.layers.Dense(3)(loaded(x)))])
    nested.save(tmp_path / "n.keras")
    for model in (loaded, nested, keras.saving.load_model(tmp_path / "n.keras")):
        scores = analysis.attention_scores(model, io["images"], blocks=(0, -1))
        assert scores.keys() == {0, -1}
        np.testing.assert_allclose(scores[0], io["attn_0"], atol=1e-5)
        np.testing.assert_allclose(scores[-1], io["attn_2"], atol=1e-5)
    np.testing.assert_array_equal(loaded(io["images"]), before)


def test_only_the_scores_that_were_asked_for(monkeypatch):
    asked = []
    original = vit_keras.layers.TransformerBlock.call

    @functools.wraps(original)
    def call(self, inputs, **kwargs):
        asked.append((self.name, kwargs.get("return_attention_scores", False)))
        return original(self, inputs, **kwargs)

    monkeypatch.setattr(vit_keras.layers.TransformerBlock, "call", call)
    model = tiny(num_layers=3)
    asked.clear()
    analysis.attention_scores(model, images(), blocks=(1,))
    assert [name[-1] for name, wanted in asked if wanted] == ["1"]
    asked.clear()
    model(images())
    assert not any(wanted for _, wanted in asked)


def test_one_block_by_two_indices_and_in_custom_models():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.backbone = tiny(include_top=False)

        def call(self, x):
            return self.backbone(x)

    model = Subclassed()
    scores = analysis.attention_scores(model, images(), blocks=(1, -1))
    np.testing.assert_array_equal(scores[1], scores[-1])
    frames = keras.layers.TimeDistributed(model.backbone)
    video = keras.Sequential([keras.Input((4, 32, 32, 3)), frames])
    assert analysis.attention_scores(video, images(2, 4, 32, 32, 3))[-1].shape == (2, 4, 17, 17)


@keras.saving.register_keras_serializable("tests")
class Holder(keras.layers.Layer):
    """A user's own layer with blocks in a list and a dict."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = [vit_keras.layers.TransformerBlock(4, 64)]
        self.second = {"block": vit_keras.layers.TransformerBlock(4, 64)}

    def call(self, x):
        return self.second["block"](self.first[0](x))


def test_blocks_inside_a_users_own_layer_and_several_inputs():
    tokens, other = keras.Input((16, 32), name="tokens"), keras.Input((1, 32), name="other")
    model = keras.Model({"tokens": tokens, "other": other}, Holder()(tokens) + other)
    x = {"tokens": images(2, 16, 32), "other": np.zeros((2, 1, 32), "float32")}
    scores = analysis.attention_scores(model, x, blocks=(0, 1))
    assert [scores[i].shape for i in (0, 1)] == [(2, 4, 16, 16)] * 2
    assert np.abs(scores[0] - scores[1]).max() > 1e-3


def test_a_compiled_call_is_named():
    import tensorflow as tf

    class Compiled(keras.Model):
        def __init__(self):
            super().__init__()
            self.backbone = tiny(include_top=False)
            self.run = tf.function(lambda x: self.backbone(x))

        def call(self, x):
            return self.run(x)

    model = Compiled()
    for _ in range(2):  # traced while watched, then traced before
        with pytest.raises(ValueError, match="did not call Transformer_encoderblock_1 as a layer"):
            analysis.attention_scores(model, images())
        model(images())


def test_threads_and_a_users_own_wrapper():
    from concurrent.futures import ThreadPoolExecutor

    model = randomise(tiny())
    block = model.get_layer("Transformer_encoderblock_1")
    object.__setattr__(block, "call", block.call)
    mine = vars(block)["call"]
    inputs = [images(2, 32, 32, 3, seed=seed) for seed in range(8)]
    expected = [analysis.attention_scores(model, x)[-1] for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: analysis.attention_scores(model, x)[-1], inputs))
    np.testing.assert_array_equal(found, expected)
    assert vars(block)["call"] is mine


def test_a_failing_call_leaves_the_model_as_it_was():
    model = randomise(tiny())
    expected = model(images())
    with pytest.raises(ValueError, match="incompatible"):
        analysis.attention_scores(model, images(2, 8, 8, 3))
    assert not any("call" in vars(layer) for layer in model.layers)
    np.testing.assert_array_equal(model(images()), expected)


def test_wrong_number_of_channels_is_named():
    with pytest.raises(ValueError, match=r"expected axis -1 of input shape to have value 3, but received"):
        tiny()(images(2, 32, 32, 1))


def test_quantization_runs_in_memory():
    model = randomise(tiny())
    expected = np.asarray(model(images()))
    with pytest.warns(UserWarning, match="does not have a `quantize` method"):
        model.quantize("int8")
    assert np.abs(np.asarray(model(images())) - expected).max() < 0.1 * np.abs(expected).max()


def test_attention_scores_refuse_what_is_not_there():
    with pytest.raises(ValueError, match=r"'tiny' has 2. Received: blocks=\(2,\)"):
        analysis.attention_scores(tiny(), images(), blocks=(2,))
    with pytest.raises(ValueError, match="has 0"):
        analysis.attention_scores(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]), np.zeros((1, 3)))
