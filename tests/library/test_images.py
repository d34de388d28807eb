"""Reading real image files, preprocessing, predictions and the console command."""

import contextlib
import io
import json
import os
import struct
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import vit_keras_cli
from tests.conftest import GOLDEN, ROOT, golden_model, randomise, run_python, tiny, tiny_hybrid
from vit_keras import Predictor, preprocessing
from vit_keras.checkpoints import CheckpointError, load_weights_from, save_npz
from vit_keras.predictor import load_model

PIXELS = np.random.default_rng(0).integers(0, 256, size=(20, 30, 3), dtype=np.uint8)
GREY = PIXELS[..., 0]


def saved(image, name, **options):
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    buffer.seek(0)
    return buffer


def alpha(values):
    return np.dstack([PIXELS, values])


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6  # stored on its side: to be turned 90 degrees clockwise
    return saved(Image.fromarray(PIXELS), "png", exif=exif)


SIXTEEN = (GREY.astype(np.uint16) << 8) | GREY
IMAGES = {
    "rgb": (lambda: saved(Image.fromarray(PIXELS), "png"), PIXELS, 0),
    "grey": (lambda: saved(Image.fromarray(GREY), "png"), np.dstack([GREY] * 3), 0),
    "rgba": (lambda: saved(Image.fromarray(alpha(GREY)), "png"), PIXELS, 0),
    "grey with alpha": (lambda: saved(Image.fromarray(np.dstack([GREY, GREY]), "LA"), "png"), np.dstack([GREY] * 3), 0),
    "16-bit grey": (lambda: saved(Image.fromarray(SIXTEEN), "png"), np.dstack([GREY] * 3), 0),
    "16-bit tiff": (lambda: saved(Image.fromarray(SIXTEEN), "tiff"), np.dstack([GREY] * 3), 0),
    "32-bit tiff": (lambda: saved(Image.fromarray(GREY.astype("int32")), "tiff"), np.dstack([GREY] * 3), 0),
    "unit tiff": (lambda: saved(Image.fromarray(GREY / np.float32(255)), "tiff"), np.dstack([GREY] * 3), 0),
    "float tiff": (lambda: saved(Image.fromarray(GREY.astype("float32")), "tiff"), np.dstack([GREY] * 3), 0),
    "one bit": (lambda: saved(Image.fromarray(GREY > 127), "png"), np.dstack([(GREY > 127) * 255] * 3), 0),
    "palette": (lambda: saved(Image.fromarray(np.dstack([GREY] * 3)).quantize(256), "png"), np.dstack([GREY] * 3), 1),
    "exif": (rotated, np.rot90(PIXELS, -1), 0),
    "cmyk": (lambda: saved(Image.fromarray(PIXELS).convert("CMYK"), "tiff"), PIXELS, 2),
    "gif": (lambda: saved(Image.fromarray(GREY), "gif"), np.dstack([GREY] * 3), 0),
    "pillow": (lambda: Image.fromarray(PIXELS), PIXELS, 0),
}


@pytest.mark.parametrize("kind", IMAGES)
def test_every_kind_of_image_becomes_rgb(kind):
    make, expected, tolerance = IMAGES[kind]
    found = preprocessing.read_image(make())
    assert found.dtype == np.uint8
    assert found.shape == expected.shape
    assert np.abs(found.astype(int) - expected).max() <= tolerance


@pytest.mark.parametrize("mode", ["RGB", "CMYK", "L"])
def test_jpeg(mode):
    smooth = Image.fromarray(PIXELS[:4, :4]).resize((64, 64), Image.Resampling.BICUBIC).convert(mode)
    found = preprocessing.read_image(saved(smooth, "jpeg", quality=95))
    assert np.abs(found.astype(int) - np.asarray(smooth.convert("RGB"))).mean() < 6


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n broken", None])
def test_what_is_no_image_is_named(tmp_path, content):
    path = tmp_path / "bad.png"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(preprocessing.ImageError, match=r"bad\.png: (not an image|there is no such file)"):
        preprocessing.read_image(path)


def test_truncated_image_is_named(tmp_path):
    (tmp_path / "half.png").write_bytes(saved(Image.fromarray(PIXELS), "png").read()[:-600])
    with pytest.raises(preprocessing.ImageError, match=r"half\.png: not an image"):
        preprocessing.read_image(tmp_path / "half.png")


def test_preprocess_inputs_is_the_old_function():
    found = preprocessing.preprocess_inputs(PIXELS)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, (PIXELS.astype("float32") - 127.5) / 127.5)
    ends = keras.ops.convert_to_tensor(np.array([0, 255], np.uint8))
    np.testing.assert_array_equal(preprocessing.preprocess_inputs(ends), [-1.0, 1.0])


def test_preprocess_is_the_originals_evaluation():
    """tf.image.resize, bilinear without antialias, squashed; then (x - 127.5) / 127.5: input_pipeline.py."""
    import tensorflow as tf

    expected = (tf.image.resize(PIXELS, (16, 12)) - 127.5) / 127.5
    np.testing.assert_allclose(preprocessing.preprocess(PIXELS, (16, 12)), expected, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_costs_the_rotation_alone():
    data = saved(
        Image.fromarray(PIXELS), "jpeg", quality=95, exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x09broken"
    ).read()
    assert preprocessing.read_image(io.BytesIO(data)).shape == PIXELS.shape


@pytest.mark.parametrize("error", [struct.error, TypeError, NotImplementedError, MemoryError])
def test_whatever_a_decoder_raises_is_an_image_error(error, monkeypatch, tmp_path):
    def fail(self):
        raise error("broken")

    Image.fromarray(PIXELS).save(tmp_path / "bad.png")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    with pytest.raises(preprocessing.ImageError, match=str(tmp_path / "bad.png")):
        preprocessing.read_image(tmp_path / "bad.png")


def test_mutated_files_raise_image_errors_alone():
    """300 files with a few bytes changed: read, or refused in our own words."""
    rng = np.random.default_rng(0)
    smooth = Image.fromarray(PIXELS).resize((48, 48))
    exif = Image.Exif()
    exif[0x0112] = 6
    sources = [saved(smooth, name, exif=exif.tobytes()).read() for name in ("jpeg", "png", "webp")]
    sources += [saved(smooth, name).read() for name in ("tiff", "gif", "bmp")]
    for index in range(300):
        data = bytearray(sources[index % len(sources)])
        for place in rng.integers(0, min(len(data), 400), size=4):
            data[place] = rng.integers(256)
        with warnings.catch_warnings(), contextlib.suppress(preprocessing.ImageError):
            warnings.simplefilter("ignore")
            assert preprocessing.read_image(io.BytesIO(data)).shape[-1] == 3


# --- Predictor and command -------------------------------------------------------------------------------------------


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch):
    """A folder with a model in both formats, labels and pictures; the working directory."""
    model = golden_model("vit_token")
    load_weights_from(model, GOLDEN / "vit_token.npz")
    model.save(tmp_path / "m.keras")
    save_npz(model, tmp_path / "m.npz")
    (tmp_path / "labels.txt").write_text("\n".join(f"class {i}" for i in range(10)))
    for name, kind in (("a.png", "rgb"), ("b.png", "16-bit grey"), ("c.png", "exif"), ("[d].png", "rgba")):
        (tmp_path / name).write_bytes(IMAGES[kind][0]().read())
    (tmp_path / "bad.png").write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def expected_predictions(folder, name):
    x = preprocessing.preprocess(preprocessing.read_image(folder / name), (64, 64))
    logits = np.asarray(load_model(folder / "m.keras")(x[None]))[0].astype("float64")
    return np.exp(logits) / np.exp(logits).sum()


def invoke(*arguments):
    return CliRunner().invoke(vit_keras_cli.main, ["predict", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("weights", ["m.keras", "m.npz"])
def test_predict_as_json(folder, weights):
    names = ["a.png", "b.png", "c.png", "[d].png"]
    options = ["--weights", weights, "--labels", "labels.txt", "--top", "3", "--json", "--batch-size", "3"]
    result = invoke(*names, *options)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["image"] for record in records] == names
    for record in records:
        expected = expected_predictions(folder, record["image"])
        best = [prediction["index"] for prediction in record["predictions"]]
        assert best == list(np.argsort(-expected)[:3])
        for prediction in record["predictions"]:
            assert prediction["label"] == f"class {prediction['index']}"
            assert abs(prediction["probability"] - expected[prediction["index"]]) < 1e-5


def test_predict_as_text(folder):
    result = invoke("a.png", "[d].png", "--weights", "m.npz", "--top", "2")
    lines = result.stdout.splitlines()
    assert (lines[0], lines[3]) == ("a.png", "[d].png")
    best = int(np.argmax(expected_predictions(folder, "a.png")))
    assert lines[1].split() == [f"{expected_predictions(folder, 'a.png')[best]:.2%}", str(best)]
    assert len(lines) == 6


def test_unreadable_image_is_named_and_the_others_go_through(folder):
    result = invoke("a.png", "bad.png", "missing.png", "c.png", "--weights", "m.keras", "--json")
    assert result.exit_code == 1
    assert [json.loads(line)["image"] for line in result.stdout.splitlines()] == ["a.png", "c.png"]
    assert "bad.png: not an image that can be read" in result.stderr
    assert "missing.png: there is no such file" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "none.npz"], "none.npz: there is no such file"),
        (["--weights", "none.keras"], "none.keras: there is no such file"),
        (["--weights", "a.png"], "a.png: not an archive"),
        (["--weights", "m.npz", "--labels", "none.txt"], "none.txt: the labels cannot be read"),
        (["--weights", "m.npz", "--labels", "short.txt"], "The model has 10 classes. Received: 2 labels"),
        (["--weights", "m.keras", "--image-size", "32", "32"], "takes images of height and width (64, 64)"),
        (["--weights", "m.npz", "--image-size", "60", "64"], "not divisible into patches of (16, 16)"),
        (["--weights", "m.npz", "--model", "vit_mini"], "pass one of them"),
        (["--weights", "m.npz", "--top", "0"], "0 is not in the range x>=1"),
    ],
)
def test_wrong_calls_get_one_sentence(folder, arguments, message):
    (folder / "short.txt").write_text("a\nb\n")
    result = invoke("a.png", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr


def test_image_size_for_npz(folder):
    result = invoke("a.png", "--weights", "m.npz", "--image-size", "64", "64", "--json")
    assert result.exit_code == 0


def test_predictor_in_python(folder):
    predictor = Predictor(folder / "m.keras", labels=[f"class {i}" for i in range(10)])
    best = predictor(folder / "a.png", top=1)[0]
    expected = expected_predictions(folder, "a.png")
    assert (best.index, best.label) == (int(expected.argmax()), f"class {expected.argmax()}")
    many = list(predictor.stream([folder / "a.png", PIXELS, Image.fromarray(PIXELS)], top=10, batch_size=2))
    for predictions in many[1:]:
        assert [p.label for p in predictions] == [p.label for p in many[0]]
        np.testing.assert_allclose([p.probability for p in predictions], [p.probability for p in many[0]], atol=1e-6)
    assert abs(sum(prediction.probability for prediction in many[0]) - 1) < 1e-5


def classifiers():
    """Logits and probabilities, by every way they leave a model."""
    logits, soft = randomise(tiny()), randomise(tiny(activation="softmax"))
    x = keras.Input((32, 32, 3))
    return {
        "linear": logits,
        "softmax head": soft,
        "nested": keras.Sequential([keras.Input((32, 32, 3)), soft]),
        "nested twice": keras.Model(x, keras.Sequential([keras.Input((32, 32, 3)), soft])(x)),
        "softmax layer": keras.Model(x, keras.layers.Softmax()(logits(x))),
        "activation layer": keras.Model(x, keras.layers.Activation("softmax")(logits(x))),
        "cast behind": keras.Model(x, keras.layers.Activation("linear", dtype="float32")(soft(x))),
        "nested linear": keras.Sequential([keras.Input((32, 32, 3)), logits]),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "linear",
        "softmax head",
        "nested",
        "nested twice",
        "softmax layer",
        "activation layer",
        "cast behind",
        "nested linear",
    ],
)
def test_probabilities_are_those_of_the_model(kind):
    models = classifiers()
    expected = np.asarray(models["softmax head"](preprocessing.preprocess(PIXELS, (32, 32))[None]))[0]
    found = Predictor(models[kind])(PIXELS)
    np.testing.assert_allclose([p.probability for p in found], expected[[p.index for p in found]], atol=1e-5)


def test_sigmoid_scores_are_kept():
    model = randomise(tiny(activation="sigmoid"))
    expected = np.asarray(model(preprocessing.preprocess(PIXELS, (32, 32))[None]))[0]
    found = Predictor(model)(PIXELS)
    np.testing.assert_allclose([p.probability for p in found], expected[[p.index for p in found]], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"include_top": False}, "has no head: its outputs are features"),
        ({"include_top": False, "representation_size": 8}, "has no head"),
        ({"include_top": False, "pooling": "map"}, "has no head"),
        ({"pooling": None}, r"one output \(B, classes\). Received: 'tiny' with outputs \(None, 16, 5\)"),
        ({"activation": "relu"}, "linear, softmax or sigmoid.* with 'relu'"),
    ],
)
def test_predictor_refuses_what_is_no_classifier(changes, message):
    with pytest.raises(ValueError, match=message):
        Predictor(tiny(**changes))


@pytest.mark.parametrize("shape", [(20, 30), (20, 30, 4), (1, 20, 30, 3)])
def test_predictor_refuses_arrays_of_other_shapes(shape):
    with pytest.raises(preprocessing.ImageError, match=r"Expected an image \(H, W, 3\)"):
        Predictor(tiny())(np.zeros(shape, np.uint8))


def test_options_that_change_nothing_are_refused(folder):
    for model in (tiny(), "m.keras"):
        with pytest.raises(ValueError, match="classes cannot change it"):
            Predictor(model, classes=3)


def test_damaged_keras_files_are_refused_in_one_sentence(folder):
    data = (folder / "m.keras").read_bytes()
    rng = np.random.default_rng(0)
    for index in range(12):
        broken = bytearray(data)
        for place in rng.integers(0, len(data), size=400):
            broken[place] = rng.integers(256)
        (folder / "d.keras").write_bytes(broken[: len(data) if index % 2 else len(data) // 2])
        with pytest.raises(CheckpointError, match=r"d\.keras: not a"):
            load_model(folder / "d.keras")


def test_labels_files(folder):
    (folder / "bom.txt").write_bytes(b"\xef\xbb\xbf" + b"\n".join(b"k%d" % i for i in range(10)) + b"\n\n")
    result = invoke("a.png", "--weights", "m.npz", "--labels", "bom.txt", "--top", "10", "--json")
    assert {p["label"] for p in json.loads(result.stdout)["predictions"]} == {f"k{i}" for i in range(10)}
    (folder / "gap.txt").write_text("a\n\nb\n")
    assert "gap.txt: expected a class name on each line. Received: line 2 is blank" in invoke(
        "a.png", "--weights", "m.npz", "--labels", "gap.txt"
    ).stderr.replace("\n", " ")


def test_names_are_printed_as_they_are(folder):
    (folder / ":car: [bold]é.png").write_bytes((folder / "a.png").read_bytes())
    (folder / "odd.txt").write_text("\n".join(f":dog: [red]{i}" for i in range(10)))
    lines = invoke(":car: [bold]é.png", "--weights", "m.npz", "--labels", "odd.txt", "--top", "1").stdout.splitlines()
    assert lines[0] == ":car: [bold]é.png"
    assert ":dog: [red]" in lines[1]


@pytest.mark.parametrize(("build", "native"), [(tiny, 32), (tiny_hybrid, 64)])
def test_predictor_with_a_model_of_any_size(build, native):
    """Images of all sizes go through at the model's native size, or the one that is asked for."""
    model = randomise(build(image_size=None, native_size=native))
    assert Predictor(model).image_size == (native, native)
    assert len(list(Predictor(model).stream([PIXELS, PIXELS[:10]]))) == 2
    assert Predictor(model, image_size=(64, 96)).prepare(PIXELS).shape == (64, 96, 3)
    with pytest.raises(ValueError, match="pass image_size"):
        Predictor(build(image_size=None, native_size=native, position="none"))


def test_predictor_refuses_a_size_the_model_does_not_take():
    with pytest.raises(
        ValueError, match=r"takes images of height and width \(32, 32\). Received: image_size=\(64, 64\)"
    ):
        Predictor(tiny(), image_size=64)


def test_unsafe_keras_files_are_refused(tmp_path):
    """A Lambda layer holds code: safe mode says no."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Lambda(lambda x: x + 1)])
    model.save(tmp_path / "code.keras")
    with pytest.raises(CheckpointError, match=r"code\.keras: not a Keras model that can be loaded"):
        load_model(tmp_path / "code.keras")


# --- the console command's door --------------------------------------------------------------------------------------


def test_models_table():
    runner = CliRunner(env={"COLUMNS": "140"})
    result = runner.invoke(vit_keras_cli.main, ["models", "*b16"])
    assert result.exit_code == 0
    assert "86,567,656" in result.output
    assert "35.2" in result.output
    assert "r50_b16" in result.output
    assert "vit_l16" not in result.output
    rows = json.loads(runner.invoke(vit_keras_cli.main, ["models", "--json"]).output)
    assert len(rows) == 18
    missing = runner.invoke(vit_keras_cli.main, ["models", "resnet*"])
    assert missing.exit_code == 2
    assert "No model matches 'resnet*'" in missing.output


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["models", "--help"], ["predict", "--help"], ["predict"]]
)
def test_help_imports_no_keras(arguments):
    code = """
import sys
from click.testing import CliRunner
import vit_keras_cli
result = CliRunner().invoke(vit_keras_cli.main, sys.argv[1:])
loaded = {name.split(".")[0] for name in sys.modules} & {"keras", "tensorflow", "jax", "torch", "numpy", "vit_keras"}
assert not loaded, loaded
print(result.output)
"""
    assert run_python(code, *arguments).strip()


def test_console_command_is_installed(tmp_path):
    Image.fromarray(PIXELS).save(tmp_path / "photo.png")
    command = [os.path.join(os.path.dirname(sys.executable), "vit-keras"), "predict", str(tmp_path / "photo.png")]
    command += ["--weights", str(GOLDEN / "vit_token_prelinen.npz"), "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "", "TensorFlow's start-up lines, or ours"
    assert len(json.loads(result.stdout)["predictions"]) == 5


def test_without_tensorflow_the_extra_is_named():
    code = """
import sys

class Missing:
    def find_spec(name, path=None, target=None):
        if name == "tensorflow":
            raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")

sys.meta_path.insert(0, Missing)
from click.testing import CliRunner
import vit_keras_cli
result = CliRunner().invoke(vit_keras_cli.main, ["models"])
print(result.exit_code, result.output)
"""
    message = run_python(code, KERAS_BACKEND="tensorflow")
    assert message.startswith("1 Error: vit_keras needs TensorFlow")
    assert "pip install 'vit-keras-zoo[tensorflow]'" in message


def test_import_is_silent_under_strict_warnings():
    """Our own modules warn of nothing when they are imported; what TensorFlow does is its own affair."""
    code = "import warnings, keras; warnings.simplefilter('error'); import vit_keras"
    run_python(code)


def test_only_the_library_is_shipped():
    import configparser

    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options.packages.find"]["include"].split() == ["vit_keras", "vit_keras.*"]
    assert config["options"]["py_modules"] == "vit_keras_cli"
