"""The layers alone: configs, use in a user's own model, and their arithmetic against plain NumPy."""

import inspect
import json

import keras
import numpy as np
import pytest
from keras import ops

from tests.conftest import randomise, tiny, tiny_hybrid
from vit_keras import layers
from vit_keras.layers import AddPositionEmbs, Patches, RelativePositions, TransformerBlock

TOKENS = np.random.default_rng(0).normal(size=(2, 17, 32)).astype("float32")
MAP = np.random.default_rng(0).normal(size=(2, 24, 32, 3)).astype("float32")

# Every layer with every argument of its own away from its default, and an input.
EVERY_ARGUMENT = [
    (layers.Patches, {"patch_size": (4, 8), "width": 16, "remainder": "pad", "record": {"a": [1]}}, MAP),
    (layers.ClassToken, {}, TOKENS),
    (layers.RegisterTokens, {"num_tokens": 3, "index": 0}, TOKENS),
    (layers.TokenPooling, {"pooling": "gap", "prefix_tokens": 1}, TOKENS),
    (layers.AttentionPooling, {"num_heads": 4, "mlp_dim": 48, "gelu": "exact", "epsilon": 1e-5}, TOKENS),
    (layers.MLP, {"mlp_dim": 48, "dropout": 0.1, "gelu": "exact"}, TOKENS),
    (layers.DropPath, {"rate": 0.1, "seed": 3}, TOKENS),
    (layers.LayerScale, {"initial_value": 0.5}, TOKENS),
    (
        layers.MultiHeadSelfAttention,
        {
            "num_heads": 4,
            "dropout": 0.1,
            "use_bias": False,
            "position": "relative",
            "grid": (2, 8),
            "prefix_tokens": 1,
        },
        TOKENS,
    ),
    (
        layers.AddPositionEmbs,
        {"kind": "learned_2d", "grid": (2, 8), "prefix_tokens": 1, "resize": {"method": "bicubic", "offset": 0.1}},
        TOKENS,
    ),
    (
        layers.RelativePositions,
        {"kind": "relative", "grid": (2, 8), "prefix_tokens": 1, "resize": {"method": "bicubic", "offset": 0.0}},
        np.zeros((2, 4, 17, 8), "float32"),
    ),
    (
        layers.TransformerBlock,
        {
            "num_heads": 4,
            "mlp_dim": 48,
            "dropout": 0.1,
            "attention_dropout": 0.2,
            "drop_path": 0.3,
            "layer_scale": 0.1,
            "qkv_bias": False,
            "gelu": "exact",
            "epsilon": 1e-5,
            "position": "relative_bias",
            "grid": (2, 8),
            "prefix_tokens": 1,
        },
        TOKENS,
    ),
    (
        layers.Bottleneck,
        {"filters": 32, "strides": 2, "norm_epsilon": 1e-5, "std_epsilon": 1e-8, "std_epsilon_in_variance": True},
        MAP,
    ),
    (
        layers.StdConv2D,
        {
            "filters": 8,
            "kernel_size": 3,
            "strides": 2,
            "use_bias": True,
            "epsilon": 1e-8,
            "epsilon_in_variance": True,
        },
        MAP,
    ),
]
IDS = [case[0].__name__ for case in EVERY_ARGUMENT]


def as_lists(value):
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(("layer_class", "arguments", "inputs"), EVERY_ARGUMENT, ids=IDS)
def test_config_round_trip(layer_class, arguments, inputs):
    own = set(inspect.signature(layer_class).parameters) - {"args", "kwargs"}
    assert own <= set(arguments), "an argument is not tested"
    layer = layer_class(**arguments, name="mine")
    config = json.loads(json.dumps(layer.get_config()))
    for name, value in arguments.items():
        assert as_lists(config[name]) in (as_lists(value), [value] * 2, [value]), name
    again = layer_class.from_config(config)
    layer(inputs), again(inputs)
    assert json.loads(json.dumps(again.get_config())) == json.loads(json.dumps(layer.get_config())) == config
    for first, second in zip(layer.weights, again.weights, strict=True):
        second.assign(first)
    np.testing.assert_array_equal(layer(inputs), again(inputs))


@pytest.mark.parametrize(("layer_class", "arguments", "inputs"), EVERY_ARGUMENT, ids=IDS)
def test_alone_in_a_users_functional_model(layer_class, arguments, inputs, tmp_path):
    x = keras.Input(inputs.shape[1:])
    layer = layer_class(**arguments)
    model = randomise(keras.Model(x, layer(x)))
    path = tmp_path / "model.keras"
    model.save(path)
    outputs = model(inputs)
    np.testing.assert_array_equal(keras.saving.load_model(path)(inputs), outputs)
    assert model.output_shape[1:] == tuple(outputs.shape[1:]), "the symbolic shape is not the real one"


@pytest.mark.parametrize(("layer_class", "arguments", "inputs"), EVERY_ARGUMENT, ids=IDS)
def test_weights_exist_after_build(layer_class, arguments, inputs):
    built, called = layer_class(**arguments), layer_class(**arguments)
    built.build((None, *inputs.shape[1:]))
    called(inputs)
    assert [v.shape for v in built.weights] == [v.shape for v in called.weights]


def test_block_has_sixteen_weights_after_build():
    block = TransformerBlock(num_heads=4, mlp_dim=64)
    block.build((None, 17, 32))
    assert len(block.weights) == 16


def test_old_pair_on_request():
    block = TransformerBlock(num_heads=4, mlp_dim=64)
    outputs = block(TOKENS)
    again, scores = block(TOKENS, return_attention_scores=True)
    np.testing.assert_array_equal(outputs, again)
    assert scores.shape == (2, 4, 17, 17)
    np.testing.assert_allclose(ops.sum(scores, axis=-1), 1.0, atol=1e-5)
    symbolic = block(keras.Input((17, 32)), return_attention_scores=True)
    assert [tuple(x.shape) for x in symbolic] == [(None, 17, 32), (None, 4, 17, 17)]


@pytest.mark.parametrize("remainder", ["error", "pad", "crop"])
@pytest.mark.parametrize("size", [(24, 32), (22, 30)])
def test_raw_patches_are_what_the_convolution_sees(size, remainder):
    x = MAP[:, : size[0], : size[1]]
    embed = Patches((4, 8), width=16, remainder=remainder)
    raw = Patches((4, 8), remainder=remainder)
    if remainder == "error" and size != (24, 32):
        with pytest.raises(ValueError, match=r"nearest image sizes that work are \(20, 24\) and \(24, 32\)"):
            embed(x)
        return
    outputs = embed(x)
    kernel = np.asarray(embed.kernel).reshape(-1, 16)
    np.testing.assert_allclose(np.asarray(raw(x)) @ kernel, outputs, atol=1e-5)
    h, w = {"pad": (6, 4), "crop": (size[0] // 4, size[1] // 8), "error": (6, 4)}[remainder]
    assert outputs.shape == (2, h, w, 16)
    first = x[:, :4, :8].reshape(2, -1)
    np.testing.assert_array_equal(np.asarray(raw(x))[:, 0, 0], first)


def test_remainder_is_found_at_run_time_too():
    import tensorflow as tf

    model = keras.Sequential([keras.Input((None, None, 3)), Patches(8, width=4)])
    call = tf.function(model, input_signature=[tf.TensorSpec((None, None, None, 3))])
    assert call(MAP).shape == (2, 3, 4, 4)
    with pytest.raises(tf.errors.InvalidArgumentError):
        call(MAP[:, :22])


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (2, 4)])
def test_paper_relative_positions(rows, columns, prefix):
    """Score of query i and key j: query i dotted with the embedding of offset j - i."""
    n, heads, dim = rows * columns, 2, 4
    query = np.random.default_rng(0).normal(size=(2, heads, prefix + n, dim)).astype("float32")
    layer = RelativePositions("relative", (rows, columns), prefix)
    layer.build(query.shape)
    table = np.random.default_rng(1).normal(size=(2 * n - 1, heads, dim))
    layer.offsets.assign(table.reshape(2 * n - 1, -1))
    expected = np.zeros((2, heads, prefix + n, prefix + n))
    for i in range(n):
        for j in range(n):
            expected[:, :, prefix + i, prefix + j] = np.einsum(
                "bad,ad->ba", query[:, :, prefix + i], table[j - i + n - 1]
            )
    np.testing.assert_allclose(layer(query), expected, atol=1e-5)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (2, 4)])
def test_relative_bias(rows, columns, prefix):
    n, heads = rows * columns, 2
    layer = RelativePositions("relative_bias", (rows, columns), prefix)
    layer.build((2, heads, prefix + n, 4))
    table = np.random.default_rng(1).normal(size=(2 * rows - 1, 2 * columns - 1, heads))
    layer.offsets.assign(table.reshape(-1, heads))
    found = np.asarray(layer(np.zeros((2, heads, prefix + n, 4), "float32")))[0]
    assert not found[:, :prefix].any()
    assert not found[:, :, :prefix].any()
    for i in range(n):
        for j in range(n):
            row, column = i // columns - j // columns + rows - 1, i % columns - j % columns + columns - 1
            np.testing.assert_allclose(found[:, prefix + i, prefix + j], table[row, column], atol=1e-6)


def test_learned_2d_concatenates_row_and_column():
    layer = AddPositionEmbs("learned_2d", grid=(2, 3), prefix_tokens=1)
    layer.build((None, 7, 8))
    rows, columns = np.random.default_rng(0).normal(size=(2, 4)), np.random.default_rng(1).normal(size=(3, 4))
    layer.row_embedding.assign(rows)
    layer.column_embedding.assign(columns)
    found = np.asarray(layer(np.zeros((1, 7, 8), "float32")))[0]
    assert not found[0].any()
    for i in range(6):
        np.testing.assert_allclose(found[1 + i], np.concatenate([rows[i // 3], columns[i % 3]]), atol=1e-6)


def test_sincos_2d_is_big_visions():
    """models/vit.py, posemb_sincos_2d, written out."""
    h, w, width = 3, 5, 16
    y, x = np.mgrid[:h, :w]
    omega = 1.0 / 10_000.0 ** (np.arange(width // 4) / (width // 4 - 1))
    y, x = np.einsum("m,d->md", y.flatten(), omega), np.einsum("m,d->md", x.flatten(), omega)
    expected = np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)
    layer = AddPositionEmbs("sincos_2d", grid=(h, w), prefix_tokens=0)
    np.testing.assert_allclose(layer(np.zeros((1, h * w, width), "float32"))[0], expected, atol=1e-5)
    assert not layer.weights


@pytest.mark.parametrize(("tokens", "grid", "prefix"), [(16, (4, 4), 0), (17, (4, 4), 1)])
def test_positions_find_a_square_grid(tokens, grid, prefix):
    layer = AddPositionEmbs()
    layer.build((None, tokens, 8))
    assert (layer.grid, layer.prefix_tokens) == (grid, prefix)


@pytest.mark.parametrize("arguments", [{}, {"grid": (4, 4)}, {"grid": (2, 4), "prefix_tokens": 1}])
def test_positions_refuse_what_does_not_fit(arguments):
    with pytest.raises(ValueError, match=r"12 tokens, which do not fit .* Pass grid=\(height, width\)"):
        AddPositionEmbs(**arguments)(np.zeros((1, 12, 8), "float32"))


def test_gelu_forms_differ_as_they_should():
    x = np.linspace(-6, 6, 1001)
    exact = np.array([0.5 * v * (1 + np.vectorize(__import__("math").erf)(v / np.sqrt(2))) for v in x])
    tanh = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(layers.mlp.gelu(ops.convert_to_tensor(x, "float32"), "exact"), exact, atol=1e-6)
    np.testing.assert_allclose(layers.mlp.gelu(ops.convert_to_tensor(x, "float32"), "tanh"), tanh, atol=1e-6)
    assert 4e-4 < np.abs(exact - tanh).max() < 5e-4


def test_drop_path_drops_whole_images_in_training_only():
    layer = layers.DropPath(0.5, seed=0)
    x = np.ones((200, 3, 4), "float32")
    np.testing.assert_array_equal(layer(x), x)
    dropped = np.asarray(layer(x, training=True))
    per_image = dropped.reshape(200, -1)
    assert set(np.unique(per_image)) == {0.0, 2.0}
    assert (per_image == per_image[:, :1]).all()
    assert 60 < (per_image[:, 0] == 0).sum() < 140


@pytest.fixture(name="dropouts")
def _dropouts(monkeypatch):
    """Every dropout that acts, in order: (name of the layer, rate, shape of its input)."""
    seen = []

    def dropout(self, inputs, training=False):
        if training and self.rate:
            seen.append((self.name, self.rate, tuple(inputs.shape)))
        return inputs

    monkeypatch.setattr(keras.layers.Dropout, "call", dropout)
    monkeypatch.setattr(layers.DropPath, "call", dropout)
    return seen


@pytest.mark.parametrize(
    ("rates", "places"),
    [
        ({"dropout": 0.5}, [(2, 17, 32), (2, 17, 64), (2, 17, 32)]),  # attention's output, GELU, second Dense
        ({"attention_dropout": 0.25}, [(2, 4, 17, 17)]),  # probabilities
        ({"drop_path": 0.125}, [(2, 17, 32), (2, 17, 32)]),  # both branches
    ],
)
def test_dropout_stands_where_the_original_has_it(dropouts, rates, places):
    """models_vit.py, Encoder1DBlock and MlpBlock: what each rate acts on, and that nothing acts in inference."""
    (name, rate), *_ = rates.items()
    block = TransformerBlock(4, 64, **rates)
    block(TOKENS)
    assert not dropouts
    block(TOKENS, training=True)
    assert [shape for _, _, shape in dropouts] == places
    assert {found for _, found, _ in dropouts} == {rate}
    assert getattr(block, name) == block.get_config()[name] == rate


def test_dropout_changes_values_in_training_only():
    for name in ("dropout", "attention_dropout", "drop_path"):
        block = TransformerBlock(4, 64, **{name: 0.5})
        still = np.asarray(block(TOKENS))
        assert np.abs(still - np.asarray(block(TOKENS, training=True))).max() > 1e-3, f"{name} does nothing"
        np.testing.assert_array_equal(block(TOKENS), still)


def test_a_model_drops_after_its_positions_too(dropouts):
    model = tiny(dropout=0.5)
    model(np.zeros((2, 32, 32, 3), "float32"), training=True)
    assert dropouts[0] == ("Transformer_dropout", 0.5, (2, 17, 32))
    assert len(dropouts) == 1 + 2 * 3


def test_layer_scale_stands_on_both_branches():
    """x + g0 * attention(norm(x)), then y + g1 * mlp(norm(y)), from the block's own parts."""
    block = TransformerBlock(4, 64, layer_scale=0.5)
    block.build(TOKENS.shape)
    rng = np.random.default_rng(0)
    gammas = [rng.normal(size=32).astype("float32") for _ in range(2)]
    for scale, gamma in zip(block.scales, gammas):
        scale.gamma.assign(gamma)
    expected = TOKENS + gammas[0] * np.asarray(block.attention(block.norm_0(TOKENS)))
    expected = expected + gammas[1] * np.asarray(block.mlp(block.norm_1(expected)))
    np.testing.assert_allclose(block(TOKENS), expected, atol=1e-5)


def test_registers_stand_behind_the_class_token():
    model = tiny(registers=2)
    model.get_layer("class_token").cls.assign(np.full((1, 1, 32), 7.0))
    model.get_layer("registers").registers.assign(np.stack([np.full((1, 32), 8.0), np.full((1, 32), 9.0)], axis=1))
    model.get_layer("Transformer_posembed_input").pos_embedding.assign(np.zeros((1, 17, 32)))
    tokens = keras.Model(model.input, model.get_layer("registers").output)(np.zeros((1, 32, 32, 3), "float32"))
    np.testing.assert_array_equal(np.asarray(tokens)[0, :4, 0], [7.0, 8.0, 9.0, 0.0])
    for index, expected in ((0, [5, 5, 1, 2]), (1, [1, 5, 5, 2])):
        layer = layers.RegisterTokens(2, index=index)
        layer.build((None, 2, 4))
        layer.registers.assign(np.full((1, 2, 4), 5.0))
        x = np.array([1.0, 2.0], "float32")[None, :, None] * np.ones((1, 1, 4), "float32")
        np.testing.assert_array_equal(np.asarray(layer(x))[0, :, 0], expected)


UNIFORM, NORMAL, TRUNCATED = "uniform", "normal", "truncated normal"


def assert_drawn_from(values, kind, deviation):
    """By standard deviation and by the largest value, which tells the three distributions apart."""
    values = np.asarray(values)
    assert abs(values.std() / deviation - 1) < 0.03
    assert abs(values.mean()) < 0.05 * deviation
    # A normal cut at two of its deviations has 0.8796 of its deviation left.
    reach = {UNIFORM: np.sqrt(3), TRUNCATED: 2 / 0.87962566}.get(kind, 6) * deviation
    assert np.abs(values).max() <= reach * 1.001
    assert np.abs(values).max() > {UNIFORM: 1.6, TRUNCATED: 2.1, NORMAL: 2.8}[kind] * deviation


def test_initial_values():
    """original_vit: lecun_normal for embedding, pre_logits and convolutions; xavier_uniform in the blocks."""
    model = tiny_hybrid(hidden_size=128, num_heads=4, mlp_dim=512, representation_size=96, layer_scale=1e-5)
    w = {variable.path: np.asarray(variable) for variable in model.weights}
    block, attention = "Transformer_encoderblock_0", "MultiHeadDotProductAttention_0"
    for name in ("query", "key", "value", "out"):
        assert_drawn_from(w[f"{block}/{attention}/{name}/kernel"], UNIFORM, np.sqrt(2 / 256))
        assert not w[f"{block}/{attention}/{name}/bias"].any()
    for name in ("Dense_0", "Dense_1"):
        assert_drawn_from(w[f"{block}/MlpBlock_0/{name}/kernel"], UNIFORM, np.sqrt(2 / 640))
        biases = [w[f"Transformer_encoderblock_{i}/MlpBlock_0/{name}/bias"] for i in (0, 1)]
        assert 0.9e-6 < np.concatenate(biases).std() < 1.1e-6
    assert_drawn_from(w["embedding/kernel"], TRUNCATED, np.sqrt(1 / 256))
    assert_drawn_from(w["pre_logits/kernel"], TRUNCATED, np.sqrt(1 / 128))
    assert_drawn_from(w["conv_root/kernel"], TRUNCATED, np.sqrt(1 / 147))
    assert_drawn_from(w["block2_unit1/conv2/kernel"], TRUNCATED, np.sqrt(1 / (9 * 64)))
    assert_drawn_from(w["block2_unit1/conv_proj/kernel"], TRUNCATED, np.sqrt(1 / 128))
    assert_drawn_from(w["Transformer_posembed_input/pos_embedding"], NORMAL, 0.02)
    zeros = ["class_token/cls", "embedding/bias", "pre_logits/bias", "head/kernel", "head/bias"]
    zeros += ["block1_unit1/gn3/gamma", "block1_unit1/gn3/beta", "gn_root/beta", f"{block}/LayerNorm_0/beta"]
    assert not any(w[name].any() for name in zeros)
    ones = ["gn_root/gamma", "block1_unit1/gn1/gamma", f"{block}/LayerNorm_0/gamma", "Transformer_encoder_norm/gamma"]
    assert all((w[name] == 1).all() for name in ones)
    assert np.allclose(w[f"{block}/LayerScale_0/gamma"], 1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Patches(0), "`patch_size` must be an integer of at least 1"),
        (lambda: Patches((8, 8, 8)), "`patch_size` must be one integer or a pair"),
        (lambda: Patches(8, remainder="drop"), "`remainder` must be one of 'error', 'pad', 'crop'"),
        (lambda: TransformerBlock(5, 64)(TOKENS), "must be divisible by the number of heads"),
        (lambda: TransformerBlock(4, 64, dropout=1.0), r"`dropout` must be a rate in \[0, 1\)"),
        (lambda: TransformerBlock(4, 64, gelu="fast"), "`gelu` must be one of 'tanh', 'exact'"),
        (lambda: AddPositionEmbs("3d"), "`kind` must be one of"),
        (lambda: AddPositionEmbs("sincos_2d")(TOKENS[:, :, :30]), "need a width divisible by 4"),
        (lambda: layers.TokenPooling("max"), "`pooling` must be one of"),
        (lambda: AddPositionEmbs()(keras.Input((None, 32))), "when the number of tokens is unknown"),
    ],
)
def test_errors_say_what_was_expected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TransformerBlock(4, 64, epsilon=-1), "`epsilon` must be a number above 0"),
        (lambda: TransformerBlock(4, 64, layer_scale="x"), "`layer_scale` must be a number above 0"),
        (lambda: TransformerBlock(4, 64, position="rope"), "`position` must be one of"),
        (lambda: layers.AttentionPooling(4, 64, gelu="nonsense"), "`gelu` must be one of"),
        (lambda: layers.MultiHeadSelfAttention(4, position="relative", grid=(4,)), "`grid` must be one integer or"),
    ],
)
def test_arguments_are_checked_before_the_first_call(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_numpy_arguments_give_plain_configs():
    block = TransformerBlock(
        np.int64(4),
        np.int32(64),
        dropout=np.float32(0.5),
        layer_scale=np.float32(1e-5),
        epsilon=np.float32(1e-6),
        position="relative",
        grid=np.array([4, 4]),
        prefix_tokens=np.int64(1),
    )
    config = block.get_config()
    assert json.loads(json.dumps(config)) == config
    assert config["grid"] == [4, 4]
    assert block(TOKENS).shape == TOKENS.shape
    assert layers.MultiHeadSelfAttention(4, position="relative", grid=4, prefix_tokens=1)(TOKENS).shape == TOKENS.shape
    record = Patches(8, record={"a": [1, {"b": None}]}).get_config()["record"]
    assert (type(record), type(record["a"])) == (dict, list)


def test_standardised_convolution_in_float64():
    conv = layers.StdConv2D(8, 3, strides=2, dtype="float64")
    x = MAP.astype("float64")
    conv.build(x.shape)
    kernel = np.random.default_rng(0).normal(size=conv.kernel.shape)
    conv.kernel.assign(kernel)
    kernel = (kernel - kernel.mean((0, 1, 2))) / (kernel.std((0, 1, 2)) + 1e-5)
    padded = np.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)))  # SAME at stride 2: one below and on the right
    expected = np.zeros((2, 12, 16, 8))
    for i in range(12):
        for j in range(16):
            window = padded[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3]
            expected[:, i, j] = np.einsum("bhwc,hwcf->bf", window, kernel)
    np.testing.assert_allclose(conv(x), expected, atol=1e-12)


def test_channels_first_users_keep_our_layout():
    keras.config.set_image_data_format("channels_first")
    try:
        assert Patches(8, width=4)(MAP).shape == (2, 3, 4, 4)
        assert layers.StdConv2D(4, 3)(MAP).shape == (2, 24, 32, 4)
    finally:
        keras.config.set_image_data_format("channels_last")
