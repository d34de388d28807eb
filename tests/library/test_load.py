"""Loading checkpoints: strict, atomic, every era, every grid; and the way back."""

import io
import os
import pickle
import zipfile

import numpy as np
import pytest

from tests.conftest import GOLDEN, golden, golden_model, images, randomise, tiny, tiny_hybrid
from vit_keras.checkpoints import CheckpointError, export_arrays, load_weights_from, open_checkpoint, save_npz
from vit_keras.checkpoints.arrays import write_npz
from vit_keras.checkpoints.files import open_file

POSITIONS = "Transformer/posembed_input/pos_embedding"
QUERY = "Transformer/encoderblock_0/MultiHeadDotProductAttention_0/query/kernel"


@pytest.fixture(name="arrays")
def _arrays():
    return golden("vit_token")


def values(model):
    return [np.array(np.asarray(variable)) for variable in model.weights]


def assert_refused(model, source, *messages, **options):
    """The load fails with all messages in one error, and changes nothing."""
    before = values(randomise(model))
    with pytest.raises(CheckpointError) as caught:
        load_weights_from(model, source, **options)
    for message in messages:
        assert message in str(caught.value)
    for old, new in zip(before, values(model)):
        np.testing.assert_array_equal(old, new)
    return str(caught.value)


# --- the original's own loader ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "source"),
    [
        ("token", "vit_token"),
        ("prelogits_drop", "vit_token_prelogits"),
        ("prelogits_keep", "vit_token_prelogits"),
        ("gap", "vit_gap"),
    ],
)
def test_load_pretrained(case, source):
    import json

    import keras

    record = json.loads((GOLDEN / f"load_pretrained_{case}.json").read_text())
    expected = golden(f"load_pretrained_{case}")
    model = golden_model(
        record["source"].removesuffix(".npz"),
        image_size=record["image_hw"],
        classes=record["num_classes"],
        representation_size=record["target_config"]["representation_size"],
    )
    assert record["source"] == f"{source}.npz"
    report = load_weights_from(model, GOLDEN / record["source"], top=False)
    table = np.asarray(model.get_layer("Transformer_posembed_input").pos_embedding)
    np.testing.assert_allclose(table, expected["pos_embedding"], atol=1e-6)
    np.testing.assert_allclose(model(expected["images"]), expected["logits"], atol=2e-5)
    features = keras.Model(model.input, model.get_layer("head").input)(expected["images"])
    np.testing.assert_allclose(features, expected["pre_logits"], atol=2e-5)
    assert report.source_grid == (4, 4)
    assert report.kept == ("head/bias", "head/kernel")
    dropped = {"head/bias", "head/kernel"} | ({"pre_logits/bias", "pre_logits/kernel"} if "drop" in case else set())
    assert set(report.dropped) == dropped


# --- strict, and all or nothing --------------------------------------------------------------------------------------


def test_one_error_lists_everything(arrays):
    del arrays["cls"], arrays["Transformer/encoderblock_2/MlpBlock_0/Dense_0/bias"]
    arrays["extra/kernel"] = np.zeros((3, 4), "float32")
    arrays["embedding/kernel"] = arrays["embedding/kernel"].transpose(3, 0, 1, 2)[..., :64]
    arrays["embedding/kernel"] = np.zeros((16, 16, 3, 63), "float32")
    arrays["head/kernel"] = arrays["head/kernel"].T
    assert_refused(
        golden_model("vit_token"),
        arrays,
        "the checkpoint does not fit model 'vit_token'; nothing was loaded.",
        " - class_token/cls: never filled, needs cls (1, 1, 64)",
        " - Transformer_encoderblock_2/MlpBlock_0/Dense_0/bias: never filled, needs Transformer/encoderblock_2",
        " + extra/kernel (3, 4): never claimed",
        " ~ embedding/kernel: wrong shape, expected (16, 16, 3, 64), received (16, 16, 3, 63)",
        " ~ head/kernel: wrong shape, expected (64, 10), received (10, 64)",
        top=True,
    )


# Without these a file is no Vision Transformer at all.
ESSENTIAL = ["embedding/kernel", QUERY, "Transformer/encoderblock_0/MlpBlock_0/Dense_0/kernel"]


def test_each_missing_key_is_named(arrays):
    model = golden_model("vit_token")
    for key in sorted(arrays.keys() - set(ESSENTIAL)):
        without = {name: value for name, value in arrays.items() if name != key}
        assert_refused(model, without, f"needs {key} ", top=True)


@pytest.mark.parametrize("key", ESSENTIAL)
def test_what_makes_a_vision_transformer(arrays, key):
    del arrays[key]
    with pytest.raises(CheckpointError, match="Not a Vision Transformer in the original JAX layout"):
        open_checkpoint(arrays)


def test_other_heads_of_the_same_width_do_not_pass(arrays):
    model = golden_model("vit_token", num_heads=8)
    assert_refused(model, arrays, f"~ {QUERY}: wrong shape, expected (64, 8, 8), received (64, 4, 16)")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(arrays, value):
    arrays["Transformer/encoder_norm/bias"][3] = value
    assert_refused(
        golden_model("vit_token"), arrays, "'Transformer/encoder_norm/bias' holds values that are not finite"
    )


def test_wrong_numerics(arrays):
    for changes in ({"gelu": "exact"}, {"epsilon": 1e-5}):
        model = golden_model("vit_token", **changes)
        assert_refused(model, arrays, "gelu='tanh' and epsilon=1e-06, the model's", "numerics='keep'")
        load_weights_from(model, arrays, numerics="keep")


def test_wrong_pooling_is_named():
    assert_refused(
        golden_model("vit_token"), golden("vit_gap"), "The file's head belongs to pooling='gap'.", "needs cls"
    )
    assert_refused(golden_model("vit_gap"), golden("vit_token"), " + cls (1, 1, 64): never claimed")


@pytest.mark.parametrize("top", [None, "yes", 2, 1, 0])
def test_options_are_checked(top):
    with pytest.raises(ValueError, match="`top` must be one of True, False, 'if_fits'"):
        load_weights_from(golden_model("vit_token"), golden("vit_token"), top=top)


def test_model_without_or_with_two_backbones(arrays):
    import keras

    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    with pytest.raises(CheckpointError, match=r"one Vision Transformer .* with 0"):
        load_weights_from(plain, arrays)
    x = keras.Input((32, 32, 3))
    two = keras.Model(x, keras.layers.add([tiny(name="a")(x), tiny(name="b")(x)]))
    with pytest.raises(CheckpointError, match="with 2"):
        load_weights_from(two, arrays)


def test_nested_model_is_found():
    import keras

    inner = golden_model("vit_token", include_top=False)
    outer = keras.Sequential([keras.Input((64, 64, 3)), keras.layers.Rescaling(1.0), inner, keras.layers.Dense(3)])
    load_weights_from(outer, golden("vit_token"), top=False)
    io = golden("vit_token_io")
    np.testing.assert_allclose(inner(io["images"]), io["pre_logits"], atol=2e-5)


# --- the head --------------------------------------------------------------------------------------------------------


def test_top_if_fits(arrays):
    model = golden_model("vit_token", classes=4)
    with pytest.warns(UserWarning, match="The head was not loaded and keeps its initial values"):
        report = load_weights_from(model, arrays)
    assert report.kept == ("head/bias", "head/kernel")
    assert "left as they were: head/bias, head/kernel" in str(report)
    assert not load_weights_from(golden_model("vit_token"), arrays).kept


def test_top_insists(arrays):
    assert_refused(golden_model("vit_token", classes=4), arrays, "~ head/kernel: wrong shape", top=True)
    assert_refused(golden_model("vit_token", include_top=False), arrays, "+ head/kernel (64, 10)", top=True)
    headless = {key: array for key, array in arrays.items() if not key.startswith("head/")}
    assert_refused(golden_model("vit_token"), headless, "- head/kernel: never filled", top=True)
    load_weights_from(golden_model("vit_token"), headless, top=False)


def test_pre_logits(arrays):
    with_it = golden("vit_token_prelogits")
    model = golden_model("vit_token_prelogits")
    assert_refused(model, arrays, "- pre_logits/kernel: never filled", top=False)
    other_width = golden_model("vit_token_prelogits", representation_size=20)
    assert_refused(other_width, with_it, "~ pre_logits/kernel: wrong shape", top=False)
    assert load_weights_from(model, with_it, top=False).loaded["pre_logits/kernel"] == "pre_logits/kernel"
    no_pre_logits = golden_model("vit_token")
    assert "pre_logits/kernel" in load_weights_from(no_pre_logits, with_it, top=False).dropped
    with_it["head/kernel"] = arrays["head/kernel"]
    assert_refused(no_pre_logits, with_it, "+ pre_logits/kernel (64, 48): never claimed", top=True)


def test_zero_head_warns(arrays):
    arrays["head/kernel"][:] = 0
    arrays["head/bias"][:] = -10
    with pytest.warns(UserWarning, match="the head is all zeros, as in the released imagenet21k files"):
        load_weights_from(golden_model("vit_token"), arrays)


# --- grids -----------------------------------------------------------------------------------------------------------


def test_same_count_other_grid_is_resized():
    """16 places as 4x4 in the file, 2x8 in the model: equal shapes, and still resized, as SciPy's zoom does it."""
    import scipy.ndimage

    source = randomise(tiny())
    table = export_arrays(source)[POSITIONS]
    model = tiny(image_size=(16, 64))
    with pytest.warns(UserWarning, match=r"taken as the square \(4, 4\) and resized to \(2, 8\)"):
        report = load_weights_from(model, export_arrays(source))
    found = np.asarray(model.get_layer("Transformer_posembed_input").pos_embedding)
    expected = scipy.ndimage.zoom(table[0, 1:].reshape(4, 4, -1).astype("float64"), (0.5, 2, 1), order=1)
    np.testing.assert_allclose(found[0, 1:], expected.reshape(16, -1), atol=1e-6)
    np.testing.assert_array_equal(found[0, 0], table[0, 0])
    assert (report.source_grid, report.grid) == ((4, 4), (2, 8))
    assert "resized from (4, 4) to (2, 8)" in str(report)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", ["grid", "head", "zero head"])
def test_a_warning_that_is_an_error_changes_nothing(case, arrays):
    model = golden_model(
        "vit_token", image_size=(32, 128) if case == "grid" else 64, classes=4 if case == "head" else 10
    )
    if case == "zero head":
        arrays["head/kernel"][:] = 0
    before = values(randomise(model))
    with pytest.raises(UserWarning):
        load_weights_from(model, arrays)
    for old, new in zip(before, values(model)):
        np.testing.assert_array_equal(old, new)
    assert model.get_layer("embedding").record is None


def test_callers_word_on_the_grid_rules():
    source = randomise(tiny(image_size=(16, 64)))
    same = tiny(image_size=(16, 64))
    load_weights_from(same, export_arrays(source), source_grid=(2, 8))
    np.testing.assert_array_equal(same(images(2, 16, 64, 3)), source(images(2, 16, 64, 3)))
    assert_refused(
        tiny(), export_arrays(source), "source_grid=(3, 5) has 15 places, the file's table 16", source_grid=(3, 5)
    )
    odd = export_arrays(randomise(tiny(image_size=(16, 24))))
    load_weights_from(tiny(image_size=(16, 24)), odd)
    assert_refused(tiny(), odd, "6 places form no square", "pass source_grid=(height, width)")


@pytest.mark.parametrize("method", ["align_corners", "bicubic", "antialiased_bicubic"])
def test_rule_is_taken_and_recorded(method):
    model = tiny(image_size=48)
    load_weights_from(model, export_arrays(randomise(tiny())), resize=method)
    assert model.get_layer("embedding").record["resize"]["method"] == method
    assert model.get_layer("Transformer_posembed_input").get_config()["resize"]["method"] == method


# --- eras ------------------------------------------------------------------------------------------------------------


def test_training_state_is_left_out(arrays):
    for prefix in ("params/", "opt/target/"):
        state = {f"{prefix}{key}": array for key, array in arrays.items()}
        state |= {"opt/state/step": np.array(3), "opt/state/cls/grad_ema": arrays["cls"]}
        model = golden_model("vit_token")
        report = load_weights_from(model, state, top=True)
        assert set(report.dropped) == {"opt/state/step", "opt/state/cls/grad_ema"}
        io = golden("vit_token_io")
        np.testing.assert_allclose(model(io["images"]), io["logits"], atol=2e-5)


def test_stacked_blocks(arrays):
    stacked = {key: array for key, array in arrays.items() if "encoderblock" not in key}
    for key in [key for key in arrays if "encoderblock_0" in key]:
        blocks = [arrays[key.replace("encoderblock_0", f"encoderblock_{i}")] for i in range(3)]
        stacked[key.replace("encoderblock_0", "encoderblock")] = np.stack(blocks)
    model = golden_model("vit_token")
    load_weights_from(model, stacked, top=True)
    for key, array in export_arrays(model, "current").items():
        np.testing.assert_array_equal(array, arrays[key])


def test_mixed_names_are_refused(arrays):
    arrays["Transformer/encoderblock_0/LayerNorm_2/bias"] = arrays["Transformer/encoderblock_0/LayerNorm_1/bias"]
    with pytest.raises(CheckpointError, match="mixes released and current names"):
        load_weights_from(golden_model("vit_token"), arrays)


def big_vision(arrays):
    """The same function in big_vision's layout: row 0 of the positions goes to the class token."""
    arrays = {f"params/{key}": array for key, array in arrays.items()}
    table = arrays.pop(f"params/{POSITIONS}")
    arrays["params/cls"] = arrays["params/cls"] + table[:, :1]
    arrays["params/pos_embedding"] = table[:, 1:]
    return arrays


@pytest.mark.parametrize("class_position", [True, False])
def test_big_vision_positions(arrays, class_position):
    """Into a table with a row for the class token (which is then zero) and into one without."""
    model = golden_model("vit_token", class_position=class_position)
    load_weights_from(model, big_vision(arrays), top=True)
    io = golden("vit_token_io")
    np.testing.assert_allclose(model(io["images"]), io["logits"], atol=2e-5)


def test_class_row_into_a_table_without(arrays):
    model = golden_model("vit_token", class_position=False)
    assert_refused(model, arrays, "the file's table has a row for the class token, the model's has none")


@pytest.mark.parametrize(
    "options",
    [
        {"class_position": False},
        {"pooling": "map"},
        {"pooling": "map", "class_token": True},
        {"pooling": "gap"},
        {"pooling": None},
        {"position": "none"},
        {"pooling": "gap", "class_token": True, "representation_size": 8},
    ],
)
@pytest.mark.parametrize("naming", ["released", "current"])
@pytest.mark.parametrize("build", [tiny, tiny_hybrid])
def test_round_trip_of_what_the_layout_can_hold(build, naming, options, tmp_path):
    source, target = randomise(build(**options)), build(**options)
    save_npz(source, tmp_path / "model.npz", naming)
    load_weights_from(target, tmp_path / "model.npz", top=True)
    for old, new in zip(source.weights, target.weights):
        np.testing.assert_array_equal(old, new)
    top_level = "pos_embedding" in np.load(tmp_path / "model.npz").files
    assert top_level == (options in ({"class_position": False}, {"pooling": "map"}))


@pytest.mark.parametrize(
    "options", [{"position": "learned_2d"}, {"position": "relative"}, {"registers": 1}, {"layer_scale": 1e-5}]
)
def test_export_names_what_the_layout_cannot_hold(options):
    with pytest.raises(CheckpointError, match="This format has no name for\n - "):
        export_arrays(tiny(**options))


def test_no_qkv_bias_is_said_on_load():
    model = tiny(qkv_bias=False)
    with pytest.raises(CheckpointError, match=r" \+ .*query/bias \(4, 8\): never claimed"):
        load_weights_from(model, export_arrays(tiny()))


# --- files -----------------------------------------------------------------------------------------------------------


def npz_with(tmp_path, name, content):
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr(name, content)
    return tmp_path / "bad.npz"


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b"<!DOCTYPE html><html>not found</html>", "a web page"),
        (pickle.dumps({"a": 1}), "a pickle, which could run code"),
        ((GOLDEN / "vit_token.npz").read_bytes()[:200_000], "the archive is truncated or broken"),
        (b"not weights at all", "not an archive"),
        (None, "there is no such file"),
    ],
)
def test_files_that_are_no_checkpoints(tmp_path, content, message):
    path = tmp_path / "bad.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_pickled_arrays_are_never_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    np.savez(tmp_path / "bad.npz", **{"embedding/kernel": np.array([Bomb()], dtype=object)})
    with pytest.raises(CheckpointError, match="'embedding/kernel' is pickled"):
        open_checkpoint(tmp_path / "bad.npz")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x93NUMPY\x01", "cannot be read"),
        (b"garbage" * 9, "cannot be read"),
        (npy(np.zeros(9, "float32"))[:-4], "should have 164 bytes by its header. Received: 160"),
        (npy(np.array(["text"])), "holds <U4. Expected numbers"),
        (npy(np.zeros(3, complex)), "holds complex128. Expected numbers"),
    ],
)
def test_members_that_are_no_arrays(tmp_path, content, message):
    with pytest.raises(CheckpointError, match=message):
        open_file(npz_with(tmp_path, "cls.npy", content))


def test_damage_inside_an_array_is_found_before_anything_changes(tmp_path):
    """A flipped bit in the last array: its checksum fails, and the model is as before."""
    data = bytearray((GOLDEN / "vit_token.npz").read_bytes())
    with zipfile.ZipFile(GOLDEN / "vit_token.npz") as archive:
        info = archive.getinfo("head/kernel.npy")
    data[info.header_offset + 1000] ^= 1
    (tmp_path / "bad.npz").write_bytes(data)
    assert_refused(golden_model("vit_token"), tmp_path / "bad.npz", "'head/kernel' cannot be read (Bad CRC-32")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"MixerBlock_0/token_mixing/Dense_0/kernel": np.zeros((2, 2))}, "keys of an MLP-Mixer"),
        ({"blocks.0.attn.qkv.weight": np.zeros((2, 2))}, "keys of a PyTorch model"),
        ({"foo": np.zeros(2)}, "its first keys are foo"),
        ({}, "it holds no arrays"),
    ],
)
def test_other_models_are_recognised(keys, message):
    with pytest.raises(CheckpointError, match=f"Not a Vision Transformer .*{message}"):
        open_checkpoint(keys)


def test_sixteen_bit_files(arrays, tmp_path):
    import ml_dtypes

    for dtype in (np.float16, ml_dtypes.bfloat16):
        np.savez(tmp_path / "half.npz", **{key: array.astype(dtype) for key, array in arrays.items()})
        model = golden_model("vit_token")
        load_weights_from(model, tmp_path / "half.npz", top=True)
        expected = arrays[QUERY].astype(dtype).astype("float32")
        np.testing.assert_array_equal(export_arrays(model, "current")[QUERY], expected)


def test_other_byte_order_and_precision(arrays, tmp_path):
    np.savez(tmp_path / "big.npz", **{key: array.astype(">f8") for key, array in arrays.items()})
    model = golden_model("vit_token")
    load_weights_from(model, tmp_path / "big.npz", top=True)
    np.testing.assert_array_equal(export_arrays(model, "current")[QUERY], arrays[QUERY])


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_stands_twice(tmp_path):
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        for value in (0.0, 1.0):
            archive.writestr("cls.npy", npy(np.full((1, 1, 64), value)))
    with pytest.raises(CheckpointError, match="holds cls more than once"):
        open_file(tmp_path / "bad.npz")


def test_fortran_order(arrays, tmp_path):
    np.savez(tmp_path / "f.npz", **{key: np.asfortranarray(array) for key, array in arrays.items()})
    model = golden_model("vit_token")
    load_weights_from(model, tmp_path / "f.npz", top=True)
    np.testing.assert_array_equal(export_arrays(model, "current")[QUERY], arrays[QUERY])


def test_writing_leaves_the_old_file_or_the_new_one(tmp_path, arrays):
    path = tmp_path / "x.npz"
    write_npz(path, arrays)
    assert os.stat(path).st_mode & 0o777 == 0o666 & ~_umask()
    before = path.read_bytes()
    assert sorted(np.load(path).files) == sorted(arrays)
    with pytest.raises(ValueError, match="Object arrays"):
        write_npz(path, {**arrays, "zzz": np.array([object()])})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.npz"]


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


# --- hostile, or merely broken ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("Transformer/encoderblock/LayerNorm_0/scale", (10**9, 0), "stacked in arrays of 1000000000 blocks"),
        ("Transformer/encoderblock/LayerNorm_0/scale", (0, 64), "stacked in arrays of 0 blocks"),
        ("Transformer/encoderblock_999999999/LayerNorm_0/scale", (64,), "never claimed"),
        ("block999999999/unit1/conv1/kernel", (1, 1, 64, 64), "never claimed"),
        (f"Transformer/encoderblock_{'9' * 5000}/cls", (64,), "never claimed"),
    ],
)
def test_headers_that_claim_a_billion(arrays, key, shape, message):
    """Refused at once: no loop runs over what a header says."""
    import vit_keras

    arrays[key] = np.zeros(shape, "float32")
    with pytest.raises(CheckpointError, match=message):
        vit_keras.from_checkpoint(arrays)


def test_stacks_of_unequal_depth(arrays):
    stacked = {key: array for key, array in arrays.items() if "encoderblock" not in key}
    for key in [key for key in arrays if "encoderblock_0" in key]:
        depth = 2 if key.endswith("LayerNorm_0/bias") else 3
        stacked[key.replace("encoderblock_0", "encoderblock")] = np.stack([arrays[key]] * depth)
    with pytest.raises(CheckpointError, match="stacked in arrays of 2 and 3 blocks"):
        open_checkpoint(stacked)
    stacked["Transformer/encoderblock/LayerNorm_0/bias"] = np.zeros((3, 64), "float32")
    stacked["Transformer/encoderblock_0/LayerNorm_0/bias"] = np.zeros(64, "float32")
    with pytest.raises(CheckpointError, match="twice, alone and stacked"):
        open_checkpoint(stacked)


def test_member_shorter_than_it_declares(tmp_path):
    """A deflated member that ends early, its checksum right for what is there."""
    path = npz_with(tmp_path, "cls.npy", npy(np.ones((1, 1, 32), "float32")))
    data = npy(np.ones((1, 1, 32), "float32"))[:-100]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("cls.npy", data)
    raw = bytearray(path.read_bytes())
    declared = (len(data) + 100).to_bytes(4, "little")
    for place in (22, raw.rfind(b"PK\x01\x02") + 24):
        raw[place : place + 4] = declared
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="'cls' cannot be read"):
        open_file(path).entries["cls"].read()


def test_one_key_under_two_member_names(tmp_path):
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        for name in ("cls.npy", "cls"):
            archive.writestr(name, npy(np.ones((1, 1, 64), "float32")))
    with pytest.raises(CheckpointError, match="holds cls more than once"):
        open_file(tmp_path / "bad.npz")


def test_table_without_places(arrays):
    del arrays[POSITIONS]
    arrays["pos_embedding"] = np.zeros((1, 0, 64), "float32")
    assert_refused(golden_model("vit_token"), arrays, "0 places form no square")


@pytest.mark.parametrize("dtype", [bool, np.int64, np.uint8])
def test_arrays_that_are_no_weights(arrays, dtype):
    arrays["head/bias"] = arrays["head/bias"].astype(dtype)
    assert_refused(golden_model("vit_token"), arrays, f"'head/bias' holds {np.dtype(dtype)}, expected floating-point")


def test_values_beyond_float32(arrays):
    arrays["head/bias"] = np.full(10, 1e300)
    assert_refused(golden_model("vit_token"), arrays, "'head/bias' holds values that are not finite in float32")


def test_names_that_are_none(arrays):
    with pytest.raises(CheckpointError, match="Received: the key 3"):
        open_checkpoint({**arrays, 3: arrays["cls"]})


def test_folder_and_unreadable_file(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="this is a folder"):
        open_checkpoint(tmp_path)

    def refuse(*arguments):
        raise PermissionError("no")

    monkeypatch.setattr("zipfile.ZipFile", refuse)
    with pytest.raises(CheckpointError, match=r"the file cannot be read \(no\)"):
        open_checkpoint(GOLDEN / "vit_token.npz")


@pytest.mark.parametrize("error", [OSError("gone"), KeyboardInterrupt()])
def test_a_file_that_fails_at_the_second_reading_changes_nothing(arrays, error):
    """Checked once, then gone while the weights are filled in: every variable gets its old value back."""
    checkpoint = open_checkpoint(arrays)
    entry, reads = checkpoint.entries["head/kernel"], []

    def read():
        reads.append(1)
        if len(reads) > 1:
            raise error
        return entry.read()

    checkpoint.entries["head/kernel"] = type(entry)(entry.shape, entry.dtype, read)
    model = golden_model("vit_token")
    before = values(randomise(model))
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError):
        load_weights_from(model, checkpoint)
    assert len(reads) == 2
    for old, new in zip(before, values(model)):
        np.testing.assert_array_equal(old, new)
    assert model.get_layer("embedding").record is None


def test_a_users_own_top_is_left_alone(arrays):
    """Surgery: what stands in place of the head keeps its values, and the report says so."""
    import keras

    whole = golden_model("vit_token")
    mine = keras.layers.Dense(3, name="mine")(whole.get_layer("ExtractToken").output)
    model = randomise(keras.Model(whole.input, mine))
    kernel = np.array(np.asarray(model.get_layer("mine").kernel))
    report = load_weights_from(model, arrays, top=False)
    np.testing.assert_array_equal(model.get_layer("mine").kernel, kernel)
    assert set(report.kept) == {"mine/bias", "mine/kernel"}
    io = golden("vit_token_io")
    features = keras.Model(model.input, model.get_layer("ExtractToken").output)(io["images"])
    np.testing.assert_allclose(features, io["pre_logits"], atol=2e-5)


def test_numerics_compare_numbers_not_digits(arrays):
    load_weights_from(golden_model("vit_token", epsilon=np.float32(1e-6)), arrays)


def test_numerics_of_the_last_norm_and_the_map_head():
    source = export_arrays(randomise(tiny(pooling="map")))
    for layer, name, value in (("Transformer_encoder_norm", "epsilon", 1e-3), ("MAPHead_0", "gelu", "exact")):
        model = tiny(pooling="map")
        setattr(model.get_layer(layer), name, value)
        assert_refused(model, source, f"the model's {layer} has")


def test_float64_round_trip_is_exact(tmp_path):
    source, target = randomise(tiny(dtype="float64")), tiny(dtype="float64")
    save_npz(source, tmp_path / "x.npz")
    load_weights_from(target, tmp_path / "x.npz")
    for old, new in zip(source.weights, target.weights):
        np.testing.assert_array_equal(old, new)
