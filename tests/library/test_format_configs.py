"""What configurations beside weights say is heeded, and what cannot be computed here is refused."""

import json
import shutil

import h5py
import keras
import numpy as np
import pytest

import vit_keras
from tests.conftest import golden, images, randomise, tiny, tiny_hybrid
from tests.library.test_formats import PEERS, TIMM_CONFIG, WRAPPED, peer_arrays
from tests.peers import images_of
from vit_keras import load_weights_from, save_checkpoint
from vit_keras.checkpoints import CheckpointError, export, kinds, open_checkpoint
from vit_keras.checkpoints.model import load_keras
from vit_keras.converter import convert
from vit_keras.predictor import known_labels
from vit_keras.records import IMAGENET_MEAN, Preprocessing


def folder_of(tmp_path, arrays, **files):
    """A folder of `model.safetensors` and JSON files."""
    kinds.write_safetensors(tmp_path / "model.safetensors", arrays, {"format": "pt"})
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def timm_folder(tmp_path, **changes):
    return folder_of(tmp_path, peer_arrays("timm_plain"), config={**TIMM_CONFIG, **changes})


def transformers_folder(tmp_path, processor=None, **changes):
    config = json.loads(str(golden("peers/transformers_vit")["config"])) | changes
    files = {"preprocessor_config": processor} if processor else {}
    return folder_of(tmp_path, peer_arrays("transformers_vit"), config=config, **files)


def keras_hub_folder(tmp_path, file, **changes):
    shutil.copytree(PEERS / "keras_hub_token", tmp_path / "f")
    path = tmp_path / "f" / file
    content = json.loads(path.read_text())
    content["config"] |= changes
    path.write_text(json.dumps(content))
    return tmp_path / "f"


# --- timm ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "vit_small_patch16_rope_224",
        "vit_base_patch16_dinov3",
        "vit_small_resnet26d_224",
        "vit_base_patch16_rpn_224",
        "vit_base_patch16_clip_224",
        "vit_base_patch16_xp_224",
        "vit_medium_patch16_rope_reg1_gap_256",
        "beit_base_patch16_224",
        "resnet50",
        None,
        7,
    ],
)
def test_architectures_of_timm_that_compute_otherwise(name, tmp_path):
    with pytest.raises(CheckpointError, match="is no plain Vision Transformer of timm"):
        open_checkpoint(timm_folder(tmp_path, architecture=name))


@pytest.mark.parametrize(
    ("name", "gelu"),
    [
        ("vit_base_patch16_siglip_224", "exact"),
        ("vit_so400m_patch16_siglip_256", "tanh"),
        ("vit_base_patch32_siglip_gap_256", "tanh"),
        ("deit3_small_patch16_224", "exact"),
        ("vit_small_patch14_reg4_dinov2", "exact"),
    ],
)
def test_the_gelu_of_a_name(name, gelu, tmp_path):
    assert open_checkpoint(timm_folder(tmp_path, architecture=name)).numerics.gelu == gelu


@pytest.mark.parametrize("where", ["config", "model_args"])
def test_a_pooling_that_is_none_of_ours(where, tmp_path):
    changes = {"global_pool": "max"}
    changes = changes if where == "config" else {"model_args": {**TIMM_CONFIG["model_args"], **changes}}
    with pytest.raises(CheckpointError, match="expected 'global_pool' to be one of token, avg, map"):
        open_checkpoint(timm_folder(tmp_path, **changes))


@pytest.mark.parametrize("config", [{}, TIMM_CONFIG])
def test_positions_that_lie_in_no_array(config, tmp_path):
    arrays = {key: value for key, value in peer_arrays("timm_plain").items() if key != "pos_embed"}
    with pytest.raises(CheckpointError, match="There is no pos_embed"):
        open_checkpoint(folder_of(tmp_path, arrays, config=config))


def test_distillation_beside_layer_scale_returns_from_timms_layout(tmp_path):
    model = randomise(tiny(distillation=True, layer_scale=1e-4))
    save_checkpoint(model, tmp_path / "out", "timm", accept_numerics=True)
    args = json.loads((tmp_path / "out" / "config.json").read_text())["model_args"]
    assert args["init_values"]
    np.testing.assert_array_equal(vit_keras.from_checkpoint(tmp_path / "out")(images()), model(images()))


ORIGINS = {
    "DINO": ("bicubic", 0.1),
    "MAE": ("bicubic", 0.0),
    "MoCo v3": ("bicubic", 0.0),
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_files_of_facebookresearch_are_resized_and_seen_as_their_code_does(origin):
    arrays = {WRAPPED[origin](key): value for key, value in peer_arrays("timm_plain").items() if "head" not in key}
    beside = {"MAE": "model.decoder_pos_embed"}.get(origin)
    opened = open_checkpoint(arrays | ({beside: np.zeros(3)} if beside else {}))
    assert (opened.resize.method, opened.resize.offset) == ORIGINS[origin]
    assert opened.preprocessing == IMAGENET_MEAN


# --- transformers ----------------------------------------------------------------------------------------------------

HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"size": 32, **HALF}, {"resize": "squash", "size": (32, 32), "crop": 1.0, "interpolation": "bilinear"}),
        ({"size": {"height": 32, "width": 24}, "resample": 3, **HALF}, {"size": (32, 24), "interpolation": "bicubic"}),
        (
            {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}, **HALF},
            {"resize": "short_side", "size": (32, 32), "crop": 0.8},
        ),
        ({"size": 40, "crop_size": 32, "do_center_crop": True, **HALF}, {"resize": "squash_crop", "crop": 0.8}),
        ({"size": 40, "crop_size": 32, "do_center_crop": False, **HALF}, {"resize": "squash", "size": (40, 40)}),
        ({"size": 32, "do_normalize": False}, {"mean": (0.0,) * 3, "std": (1.0,) * 3}),
        ({"size": 32, "rescale_factor": 1 / 127.5, **HALF}, {"value_range": (0.0, 2.0)}),
    ],
)
def test_processors_are_read_whole(processor, expected, tmp_path):
    found = open_checkpoint(transformers_folder(tmp_path, processor)).preprocessing
    for name, value in expected.items():
        assert getattr(found, name) == (value if name in ("resize", "interpolation") else pytest.approx(value)), name


@pytest.mark.parametrize("processor", [{"size": "large", **HALF}, {"size": 32, "resample": 1, **HALF}])
def test_processors_that_cannot_be_followed(processor, tmp_path):
    with pytest.warns(UserWarning, match=r"preprocessor_config\.json cannot be followed"):
        open_checkpoint(transformers_folder(tmp_path, processor))


def test_names_of_classes_travel(tmp_path):
    (tmp_path / "in").mkdir()
    names = [f"kind of thing {index}" for index in range(5)]
    folder = transformers_folder(tmp_path / "in", id2label={str(index): name for index, name in enumerate(names)})
    model = vit_keras.from_checkpoint(folder)
    assert known_labels(model) == names
    for to, suffix in (("huggingface", ""), ("timm", ""), ("keras", ".keras")):
        convert(folder, to, tmp_path / f"{to}{suffix}", accept_numerics=True)
    assert known_labels(load_keras(tmp_path / "keras.keras")) == names
    assert known_labels(vit_keras.from_checkpoint(tmp_path / "huggingface")) == names
    assert known_labels(vit_keras.from_checkpoint(tmp_path / "timm")) == names
    other = vit_keras.from_checkpoint(folder, classes=3)
    save_checkpoint(other, tmp_path / "three", "huggingface")
    assert json.loads((tmp_path / "three" / "config.json").read_text())["id2label"] == {
        str(index): f"LABEL_{index}" for index in range(3)
    }


# --- keras-hub -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pooling": "gap"}, "beside a class token"),
        ({"pooling": "x"}, "pooling"),
        ({"activation": "relu"}, "activation"),
    ],
)
def test_tasks_of_keras_hub_that_compute_otherwise(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(keras_hub_folder(tmp_path, "task.json", **changes))


def test_activation_and_pixels_of_keras_hub(tmp_path):
    folder = keras_hub_folder(tmp_path, "task.json", activation="softmax")
    scaling = {"scale": [1 / 50, 1 / 51, 1 / 52], "offset": [-2.0, -2.1, -2.2], "image_size": [32, 32]}
    (folder / "image_converter.json").write_text(json.dumps({"config": scaling}))
    model = vit_keras.from_checkpoint(folder)
    np.testing.assert_allclose(np.sum(model(images_of((32, 32))), axis=-1), 1, atol=1e-6)
    pixels = open_checkpoint(folder).preprocessing
    assert pixels.mean == pytest.approx((100, 107.1, 114.4))
    assert pixels.std == pytest.approx((50, 51, 52))


# --- configurations that contradict the arrays, or change what they compute ------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "config.json says depth=3, the arrays have 2"),
        ({"hidden_size": 96}, "says width=96"),
        ({"intermediate_size": 7}, "says mlp_dim=7"),
        ({"patch_size": 4}, "says patch_size="),
        ({"qkv_bias": False}, "says qkv_bias=False"),
        ({"num_attention_heads": 5}, "says 5 attention heads, which do not divide"),
        ({"num_attention_heads": 2.5}, "says 2.5 attention heads"),
        ({"layer_norm_eps": float("inf")}, "expected 'layer_norm_eps' to be a positive number"),
    ],
)
def test_contradictions_of_transformers(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(transformers_folder(tmp_path, **changes))


def test_a_missing_block_shows(tmp_path):
    arrays = {key: value for key, value in peer_arrays("timm_plain").items() if not key.startswith("blocks.1.")}
    args = {"num_heads": 4, "depth": 2, "embed_dim": 24}
    with pytest.raises(CheckpointError, match="says depth=2, the arrays have 1: some are missing"):
        open_checkpoint(folder_of(tmp_path, arrays, config={**TIMM_CONFIG, "model_args": args}))
    folder = keras_hub_folder(tmp_path, "config.json", num_layers=3)
    with pytest.raises(CheckpointError, match="says depth=3"):
        open_checkpoint(folder)


def test_a_pooler_of_another_activation(tmp_path):
    config = json.loads(str(golden("peers/transformers_vit_model")["config"])) | {"pooler_act": "relu"}
    with pytest.raises(CheckpointError, match="expected 'pooler_act' to be one of tanh"):
        open_checkpoint(folder_of(tmp_path, peer_arrays("transformers_vit_model"), config=config))


def test_registers_with_rows_of_positions():
    """timm without `no_embed_class` adds a row of its table to each register: here they are part of the registers."""
    arrays = peer_arrays("timm_registers")
    registers = arrays["reg_token"].shape[1]
    rows = np.random.default_rng(0).normal(size=(1, 1 + registers, 24)).astype("float32")
    with_rows = {**arrays, "pos_embed": np.concatenate([rows, arrays["pos_embed"]], axis=1)}
    folded = {**arrays, "cls_token": arrays["cls_token"] + rows[:, :1], "reg_token": arrays["reg_token"] + rows[:, 1:]}
    found, expected = (
        vit_keras.from_checkpoint(each, num_heads=4)(images_of((32, 32))) for each in (with_rows, folded)
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "vit_base_patch16_224_in21k",
        "vit_base_patch16_224_miil_in21k",
        "vit_small_patch16_224_dino",
        "vit_base_patch32_224_sam",
        "deit3_base_patch16_224_in21ft1k",
        "test_vit",
    ],
)
def test_old_names_of_timm(name, tmp_path):
    assert open_checkpoint(timm_folder(tmp_path, architecture=name)).facts.num_heads == 4


def test_gated_mlps_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"gated MLPs \(SwiGLU\)"):
        open_checkpoint(timm_folder(tmp_path, architecture="vit_giant_patch14_reg4_dinov2"))


def test_pixels_of_a_model_at_another_size(tmp_path):
    """Fine-tuned at 48: what is written says 48 everywhere."""
    (tmp_path / "in").mkdir()
    model = vit_keras.from_checkpoint(transformers_folder(tmp_path / "in", {"size": 32, **HALF}), image_size=48)
    save_checkpoint(model, tmp_path / "hf", "huggingface")
    save_checkpoint(model, tmp_path / "timm", "timm", accept_numerics=True)
    assert json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text())["size"] == {"height": 48, "width": 48}
    assert json.loads((tmp_path / "timm" / "config.json").read_text())["pretrained_cfg"]["input_size"] == [3, 48, 48]


def test_class_names_with_gaps_are_none(tmp_path):
    folder = transformers_folder(tmp_path, id2label={str(index): "x" for index in range(1, 6)})
    assert open_checkpoint(folder).labels is None


def test_a_stem_that_sees_grey_as_rgb_is_a_source(tmp_path):
    model = vit_keras.from_checkpoint(randomise(tiny_hybrid()), in_channels=1)
    model.save(tmp_path / "grey.keras")
    again = vit_keras.from_checkpoint(tmp_path / "grey.keras")
    assert again.input_shape == (None, 32, 32, 1)
    np.testing.assert_array_equal(again(images(2, 32, 32, 1)), model(images(2, 32, 32, 1)))


def test_what_a_conversion_would_lose_is_refused():
    model = tiny()
    x = keras.Input((32, 32, 3))
    doubled = keras.Model(x, tiny(include_top=False)(x) * 2.0)
    block = model.get_layer("Transformer_encoderblock_0").output

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = tiny(include_top=False)

        def call(self, inputs):
            return 2 * self.inner(inputs)

    for wrapped in (
        doubled,
        keras.Model(model.input, keras.layers.Softmax()(model.output)),
        keras.Model(model.input, model.output * 3.0),
        keras.Model(model.input, [model.output, block]),
        keras.Model(model.input, keras.layers.Dense(3, name="mine")(model.get_layer("head").input)),
        Own(),
    ):
        with pytest.raises(CheckpointError, match="which would be lost"):
            vit_keras.from_checkpoint(wrapped)
    features = keras.Model(model.input, model.get_layer("head").input)
    assert vit_keras.from_checkpoint(features).output_shape == (None, 32)


def test_an_activation_without_a_place_is_said(tmp_path):
    with pytest.warns(UserWarning, match="no place for the head's activation 'softmax'"):
        save_checkpoint(randomise(tiny(activation="softmax")), tmp_path / "x.npz", "original")


# --- what no array's shape shows -------------------------------------------------------------------------------------


def test_heads_of_a_configuration_are_compared(tmp_path):
    model = tiny(hidden_size=24, mlp_dim=36, num_layers=2, num_heads=6, gelu="exact")
    with pytest.raises(CheckpointError, match="trained with 4 attention heads, the model has 6: build it with"):
        load_weights_from(model, timm_folder(tmp_path), top=False)


def test_poolings_of_a_configuration_are_compared(tmp_path):
    folder = timm_folder(tmp_path, model_args={"num_heads": 4, "global_pool": "token"})
    size = {"hidden_size": 24, "mlp_dim": 36, "num_layers": 2, "num_heads": 4, "gelu": "exact"}
    model = tiny(**size, pooling="gap", class_token=True, classes=vit_keras.from_checkpoint(folder).output_shape[-1])
    with pytest.raises(CheckpointError, match="reads pooling='token', the model's 'gap'"):
        load_weights_from(model, folder)
    load_weights_from(model, folder, top=False)


def test_layers_around_a_nested_model_are_not_lost_without_a_word(tmp_path):
    inner = tiny(include_top=False)
    model = keras.Sequential([keras.Input((32, 32, 3)), inner, keras.layers.Dense(3, name="mine")])
    model.save(tmp_path / "m.keras")
    for attempt in (
        lambda: save_checkpoint(model, tmp_path / "out", "huggingface"),
        lambda: convert(tmp_path / "m.keras", "npz", tmp_path / "out.npz"),
        lambda: vit_keras.from_checkpoint(model),
    ):
        with pytest.raises(CheckpointError, match=r"which would be lost: .*mine"):
            attempt()
    assert not list(tmp_path.glob("out*"))


OWN = [
    {"position": "sincos_2d", "activation": "softmax"},
    {"position": "learned_2d"},
    {"position": "relative"},
    {"position": "relative_bias"},
    {"image_size": None, "native_size": 32},
    {"image_size": 30, "remainder": "pad", "dropout": 0.1, "attention_dropout": 0.2, "drop_path": 0.3},
    {"dtype": "mixed_bfloat16", "layer_scale": 1e-3, "registers": 2, "pooling": "map", "class_token": False},
]


@pytest.mark.parametrize("changes", OWN, ids=str)
def test_own_models_are_sources_with_all_they_are(changes, tmp_path):
    model = randomise(tiny(**changes))
    model.save(tmp_path / "m.keras")
    for source in (tmp_path / "m.keras", model):
        again = vit_keras.from_checkpoint(source)
        assert [w.shape for w in again.weights] == [w.shape for w in model.weights]
        x = images_of((30, 30) if changes.get("image_size") == 30 else (32, 32))
        np.testing.assert_array_equal(again(x), model(x))
        assert again.output.dtype == model.output.dtype
        ours, theirs = (m.get_layer("Transformer_encoderblock_1").get_config() for m in (again, model))
        for name in ("dropout", "attention_dropout", "drop_path", "position", "dtype"):
            assert ours[name] == theirs[name], name
    if changes.get("position") in ("learned_2d", "relative", "relative_bias"):
        larger = vit_keras.from_checkpoint(model, image_size=48)
        model.save_weights(tmp_path / "w.weights.h5")
        expected = tiny(**changes, image_size=48)
        with pytest.warns(UserWarning, match="resizing position embeddings"):
            expected.load_weights(tmp_path / "w.weights.h5")
        np.testing.assert_allclose(larger(images_of((48, 48))), expected(images_of((48, 48))), atol=1e-6)
    fresh = tiny(**changes)
    report = load_weights_from(fresh, tmp_path / "m.keras")
    assert len(report.loaded) == len(fresh.trainable_weights)


def test_classes_ask_for_a_head():
    features = tiny(include_top=False)
    assert vit_keras.from_checkpoint(features).output_shape == features.output_shape
    assert vit_keras.from_checkpoint(features, classes=7).output_shape == (None, 7)
    model = randomise(tiny())
    same = vit_keras.from_checkpoint(model, classes=5)
    np.testing.assert_array_equal(same.get_layer("head").kernel, model.get_layer("head").kernel)


@pytest.mark.parametrize(
    "changes", [{"pooling": "gap", "class_token": True}, {"pooling": None}, {"position": "sincos_2d"}]
)
def test_an_npz_that_would_be_read_otherwise_is_not_written(changes, tmp_path):
    randomise(tiny(**changes)).save(tmp_path / "m.keras")
    with pytest.raises(CheckpointError, match="nothing was written"):
        convert(tmp_path / "m.keras", "npz", tmp_path / "m.npz")


def test_formats_name_what_they_are_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"Expected a \.keras file for format='keras'\. Received: .*x\.npz"):
        open_checkpoint(tmp_path / "x.npz", "keras")
    with pytest.raises(CheckpointError, match=r"there is no such file\. Expected the path of a \.keras model"):
        vit_keras.from_checkpoint(tmp_path / "none.keras")


def test_squash_and_crop():
    """A picture of two colours, squashed to 40 and cropped to 32: the border between them stays in the middle."""
    picture = np.zeros((10, 80, 3), "float32")
    picture[:, 40:] = 255
    rule = Preprocessing(resize="squash_crop", crop=0.8, size=(32, 32), antialias=False)
    found = np.asarray(vit_keras.preprocessing.preprocess(picture, rule=rule))
    assert found.shape == (32, 32, 3)
    np.testing.assert_allclose(found[:, :15], -1, atol=1e-6)
    np.testing.assert_allclose(found[:, 17:], 1, atol=1e-6)


# --- files and folders -----------------------------------------------------------------------------------------------


def test_bfloat16_goes_into_safetensors_and_back(tmp_path):
    model = randomise(tiny(dtype="bfloat16", gelu="exact"))
    save_checkpoint(model, tmp_path / "out", "huggingface")
    again = vit_keras.from_checkpoint(tmp_path / "out", dtype="bfloat16")
    for ours, theirs in zip(again.weights, model.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(ours, "float32"), np.asarray(theirs, "float32"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_an_interrupted_swap_gives_the_folder_back(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("kept")
    real, calls = export.os.rename, []

    def rename(old, new):
        calls.append(new)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(old, new)

    monkeypatch.setattr(export.os, "rename", rename)
    with pytest.raises(KeyboardInterrupt), export.replacing_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "precious").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("to", "name"), [("npz", "none/x.npz"), ("timm", "none/x"), ("keras", "dir.keras")])
def test_places_that_cannot_be_written(to, name, tmp_path):
    (tmp_path / "dir.keras").mkdir()
    with pytest.raises(CheckpointError, match=r"there is no folder .* Make it first|is a folder, and a file"):
        convert(PEERS / "keras_hub_token", to, tmp_path / name, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["dir.keras"]


def test_chunked_data_sets_that_grow_are_refused(tmp_path):
    """2 GB of zeros that take a few kilobytes."""
    with h5py.File(tmp_path / "f.weights.h5", "w") as file:
        file.create_dataset("layers/conv2d/vars/0", (2**29,), "float32", chunks=(2**20,), compression="gzip")
    assert (tmp_path / "f.weights.h5").stat().st_size < 2e6
    with pytest.raises(CheckpointError, match="would grow from"):
        open_checkpoint(tmp_path / "f.weights.h5")
