"""Preprocessing: the three conventions against other implementations, in Python and in graphs; weights' own."""

import dataclasses
import io
import warnings

import keras
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

import vit_keras
from tests.conftest import GOLDEN, golden_model, images, randomise, run_python, tiny, tiny_hybrid
from tests.server import serve
from vit_keras import analysis, load_weights_from, preprocessing, save_npz, utils, vit
from vit_keras.checkpoints import CheckpointError
from vit_keras.preprocessing import BIG_VISION, HUGGING_FACE, ORIGINAL, TIMM, preprocess
from vit_keras.records import Preprocessing

PHOTO = load_sample_image("china.jpg")  # (427, 640, 3)
CONVENTIONS = {"original": ORIGINAL, "big_vision": BIG_VISION, "timm": TIMM, "hugging face": HUGGING_FACE}


def levels(x, rule):
    """What a model sees, as 8-bit levels again."""
    offset, scale = (np.asarray(values) for values in rule.offset_and_scale(x.shape[-1]))
    return x.astype("float64") * scale + offset


def pillow_pipeline(photo, size, rule):
    """torchvision's Resize and CenterCrop on Pillow images, as timm's eval transform composes them; or one resize."""
    image = Image.fromarray(photo)
    method = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}[rule.interpolation]
    if rule.resize == "squash":
        return np.asarray(image.resize(size[::-1], method))
    short = int(size[0] / rule.crop)
    width, height = image.size
    new = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    image = image.resize(new, method)
    left, top = (round((outer - inner) / 2.0) for outer, inner in zip(image.size, size[::-1]))
    return np.asarray(image.crop((left, top, left + size[1], top + size[0])))


@pytest.mark.parametrize("size", [224, 64, 384])
@pytest.mark.parametrize("turn", [False, True])
@pytest.mark.parametrize(
    "rule", [TIMM, HUGGING_FACE, dataclasses.replace(TIMM, crop=1.0), dataclasses.replace(TIMM, crop=0.875)]
)
def test_against_pillow(rule, turn, size):
    photo = np.swapaxes(PHOTO, 0, 1) if turn else PHOTO
    expected = pillow_pipeline(photo, (size, size), rule)
    difference = np.abs(levels(preprocess(photo, (size, size), rule), rule) - expected)
    assert difference.max() < 1.01
    assert difference.mean() < 0.2  # where 427 pixels become 224, many sums lie between two levels


def area_reference(x, size):
    """Mean over each new pixel's cell of the old ones, in float64, by cumulative sums."""
    for new in size:
        sums = np.concatenate([np.zeros_like(x[:1]), np.cumsum(x, axis=0)])
        edges = np.arange(new + 1) * (len(x) / new)
        low = np.minimum(np.floor(edges).astype(int), len(x) - 1)
        at = sums[low] + (edges - low)[:, None, None] * x[low]
        x = np.diff(at, axis=0) / (len(x) / new)
        x = np.swapaxes(x, 0, 1)
    return x


@pytest.mark.parametrize(("height", "width"), [(427, 640), (640, 427), (301, 255), (100, 90)])
def test_big_vision_is_resize_small_and_central_crop(height, width):
    """big_vision `pp/ops_image.py`: get_resize_small(256, method="area"), get_central_crop(224)."""
    photo = np.asarray(Image.fromarray(PHOTO).resize((width, height)))
    ratio = 256 / min(height, width)
    resized = area_reference(photo.astype("float64"), (round(height * ratio), round(width * ratio)))
    top, left = ((length - 224) // 2 for length in resized.shape[:2])
    found = levels(preprocess(photo, (224, 224), BIG_VISION), BIG_VISION)
    np.testing.assert_allclose(found, resized[top : top + 224, left : left + 224], atol=2e-2)


def test_big_vision_at_384_resizes_to_448():
    rule = dataclasses.replace(BIG_VISION, crop=384 / 448)
    assert preprocessing._covering((448, 600), (384, 384), rule) == (448, 600)


def test_area_is_tensorflows():
    tf = pytest.importorskip("tensorflow")
    rule = Preprocessing(interpolation="area")
    expected = tf.image.resize(PHOTO.astype("float32"), (50, 77), method="area").numpy()
    np.testing.assert_allclose(levels(preprocess(PHOTO, (50, 77), rule), rule), expected, atol=5e-3)


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.parametrize("size", [(24, 24), (16, 40)])
def test_the_graph_computes_what_python_does(name, size):
    tf = pytest.importorskip("tensorflow")
    rule = CONVENTIONS[name]
    signature = tf.TensorSpec((None, None, None, 3), "uint8")
    graph = tf.function(lambda x: preprocess(x, size, rule), input_signature=[signature])
    for photo in (PHOTO[:101, :64], PHOTO[:33, :90], PHOTO[:12, :20]):
        expected = preprocess(photo, size, rule)
        assert expected.shape == (*size, 3)
        assert expected.dtype == "float32"
        np.testing.assert_allclose(graph(photo[None])[0], expected, atol=2e-6)  # it divides by multiplying
        np.testing.assert_array_equal(preprocess(photo[None].astype("float32"), size, rule)[0], expected)


def test_each_convention_maps_the_ends_of_the_range():
    for rule in CONVENTIONS.values():
        for value, expected in ((0, -1.0), (255, 1.0)):
            x = preprocess(np.full((30, 30, 3), value, np.uint8), (8, 8), rule)
            np.testing.assert_allclose(x, expected, atol=1e-6)
    imagenet = Preprocessing(value_range=(0, 1), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    x = preprocess(np.full((9, 9, 3), 255, np.uint8), (8, 8), imagenet)
    np.testing.assert_allclose(x[0, 0], (1 - np.array(imagenet.mean)) / np.array(imagenet.std), rtol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"resize": "stretch"},
        {"interpolation": "lanczos"},
        {"resize": "short_side", "crop": 0.0},
        {"resize": "short_side", "crop": 1.5},
        {"crop": 0.9},
        {"value_range": (1, -1)},
        {"std": (1, 0, 1)},
        {"size": 0},
    ],
)
def test_records_check_themselves(change):
    with pytest.raises(ValueError, match="Received"):
        Preprocessing(**change)


def test_a_size_is_needed():
    with pytest.raises(ValueError, match="needs a size"):
        preprocess(PHOTO)
    assert preprocess(PHOTO, rule=dataclasses.replace(TIMM, size=(8, 16))).shape == (8, 16, 3)


# --- what belongs to the weights -------------------------------------------------------------------------------------


@pytest.fixture(name="model")
def _model():
    model = tiny()
    model.get_layer("embedding").record = vit_keras.records.Weights(
        "x.npz", "timm", "exact", 1e-6, preprocessing=TIMM, labels="cifar10"
    ).to_dict()
    return randomise(model)


def test_the_record_is_found_wherever_the_embedding_goes(model, tmp_path):
    expected = dataclasses.replace(TIMM, size=(32, 32))
    inputs = keras.Input((32, 32, 3))
    nested = keras.Model(inputs, keras.layers.Dense(2)(keras.Sequential([model])(inputs)))
    features = keras.Model(model.input, model.get_layer("Transformer_encoder_norm").output)
    reloaded = []
    for kind in (model, nested, features):
        kind.save(tmp_path / "m.keras")
        reloaded.append(keras.models.load_model(tmp_path / "m.keras"))
    for found in (model, nested, features, keras.models.clone_model(model), *reloaded):
        assert preprocessing.of(found) == expected
    other = keras.models.model_from_json(model.to_json())
    assert preprocessing.of(other) == expected
    assert preprocessing.of(tiny()) == dataclasses.replace(ORIGINAL, size=(32, 32))


def test_its_size_is_the_models(model):
    assert preprocessing.of(tiny(image_size=(16, 40))).size == (16, 40)
    assert preprocessing.of(tiny(image_size=None, native_size=(16, 24))).size == (16, 24)
    assert preprocessing.of(tiny(image_size=None, position="sincos_2d")).size == (224, 224)
    assert preprocessing.of(tiny(image_size=None, position="none")).size is None


def test_predictor_uses_it(model):
    predictor = vit_keras.Predictor(model, labels=list("abcde"))
    expected = np.asarray(model(preprocess(PHOTO, (32, 32), TIMM)[None]))[0]
    best = predictor(PHOTO, top=1)[0]
    assert best.index == np.argmax(expected)
    assert best.label == "abcde"[best.index]


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (images(2, 8, 8, 3), "preprocessed already: they lie in"),
        (np.float32([[[[-2.1, 2.6, 0.0]]]]), "preprocessed already"),
        (np.abs(images(8, 8, 3)), r"scaled to 0\.\.1"),
        (np.zeros((3, 224, 224), np.uint8), "channels first: their shape is"),
        (np.zeros((2, 3, 32, 32), np.float32), "channels first"),
    ],
)
def test_pixels_that_look_like_something_else(pixels, message):
    with pytest.warns(UserWarning, match=message) as caught:
        vit.preprocess_inputs(pixels)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=message):
        vit.preprocess_inputs(keras.ops.convert_to_tensor(pixels))


@pytest.mark.parametrize(
    "pixels",
    [
        PHOTO,
        PHOTO.astype("float32"),
        np.zeros((4, 4, 3), "float32"),
        np.zeros((0, 4, 4, 3), "float32"),
        np.ones((4, 4, 1), np.uint8),
        np.full((3, 3, 3), 40.0),
        np.zeros((3, 28, 3), np.uint8),
    ],
)
def test_pixels_that_are_pixels(pixels):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vit.preprocess_inputs(pixels)


def test_no_check_in_a_graph():
    tf = pytest.importorskip("tensorflow")
    graph = tf.function(vit.preprocess_inputs)
    np.testing.assert_array_equal(graph(np.float32([0.0, 255.0])), [-1.0, 1.0])


def test_predictor_and_analysis_say_what_inputs_look_like():
    model = randomise(tiny())
    with pytest.warns(UserWarning, match="preprocessed already"):
        vit_keras.Predictor(model)(images(40, 40, 3))
    with pytest.warns(UserWarning, match=r"look like pixels in 0\.\.255"):
        analysis.attention_scores(model, PHOTO[None, :32, :32].astype("float32"))


def test_old_read():
    for size, shape in ((16, (16, 16, 3)), ((8, 12), (8, 12, 3))):
        found = utils.read(Image.fromarray(PHOTO).convert("L"), size)
        assert (found.shape, found.dtype) == (shape, np.uint8)
    np.testing.assert_array_equal(utils.read(Image.fromarray(PHOTO), PHOTO.shape[:2]), PHOTO)


def test_old_read_of_an_address():
    buffer = io.BytesIO()
    Image.fromarray(PHOTO).save(buffer, "png")
    with serve({"/photo.png": buffer.getvalue()}) as server:
        np.testing.assert_array_equal(utils.read(f"{server.url}/photo.png", PHOTO.shape[:2]), PHOTO)
        with pytest.raises(preprocessing.ImageError, match="could not be fetched"):
            utils.read(f"{server.url}/other.png", 8)


# --- other channels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [tiny, tiny_hybrid])
def test_a_grey_image_gives_the_tokens_of_its_rgb_copy(build, tmp_path):
    """cases of one channel: also through from_checkpoint and after saving."""
    size = 32 if build is tiny else 64
    source = randomise(build(image_size=size))
    save_npz(source, tmp_path / "x.npz")
    grey = vit_keras.from_checkpoint(tmp_path / "x.npz", in_channels=1)
    assert grey.input_shape == (None, size, size, 1)
    x = images(2, size, size, 1)
    expected = np.asarray(source(np.repeat(x, 3, axis=-1)))
    np.testing.assert_allclose(grey(x), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    grey.save(tmp_path / "grey.keras")
    code = "import sys, keras, vit_keras; print(keras.models.load_model(sys.argv[1]).input_shape)"
    if build is tiny_hybrid:
        assert run_python(code, tmp_path / "grey.keras").strip() == f"(None, {size}, {size}, 1)"


@pytest.mark.parametrize("build", [tiny, tiny_hybrid])
@pytest.mark.parametrize("channels", [2, 4, 6, 7])
def test_more_channels_repeat_the_kernel(build, channels, tmp_path):
    source = randomise(build())
    save_npz(source, tmp_path / "x.npz")
    model = vit_keras.from_checkpoint(tmp_path / "x.npz", in_channels=channels)
    name = "embedding" if build is tiny else "conv_root"
    old, new = (np.asarray(m.get_layer(name).kernel) for m in (source, model))
    for channel in range(channels):
        np.testing.assert_allclose(new[:, :, channel], old[:, :, channel % 3] * 3 / channels, rtol=1e-6)
    np.testing.assert_array_equal(model.get_layer("head").kernel, source.get_layer("head").kernel)
    if channels == 6:  # twice RGB
        x = images()
        np.testing.assert_allclose(model(np.concatenate([x, x], axis=-1)), source(x), rtol=2e-4, atol=2e-4)


def test_channels_are_reported_and_others_than_rgb_refused(tmp_path):
    report = load_weights_from(golden_model("vit_token", in_channels=1), GOLDEN / "vit_token.npz")
    assert report.channels == (3, 1)
    assert "adapted from 3 to 1 input channels" in str(report)
    save_npz(tiny(in_channels=2), tmp_path / "two.npz")
    with pytest.raises(CheckpointError, match=r"embedding/kernel: wrong shape, expected \(8, 8, 5"):
        load_weights_from(tiny(in_channels=5), tmp_path / "two.npz")


def test_constructor_with_other_channels(tmp_path):
    save_npz(randomise(vit.vit_ti16(32, classes=3, pretrained=False)), tmp_path / "x.npz")
    model = vit.vit_ti16(32, classes=3, weights=tmp_path / "x.npz", in_channels=1)
    assert model.input_shape == (None, 32, 32, 1)


@pytest.mark.parametrize("channels", [1, 4, 6])
def test_preprocessing_for_other_channels(channels):
    photo = np.random.default_rng(0).integers(0, 256, (40, 50, channels), np.uint8)
    imagenet = Preprocessing(value_range=(0, 1), mean=(0.4, 0.5, 0.9), std=(0.1, 0.2, 0.3))
    for rule in (*CONVENTIONS.values(), imagenet):
        x = preprocess(photo, (16, 24), rule)
        assert x.shape == (16, 24, channels)
    mean, std = (0.6, 0.2) if channels == 1 else (imagenet.mean[0], imagenet.std[0])
    expected = (levels(x, imagenet)[..., 0] / 255 - mean) / std
    np.testing.assert_allclose(x[..., 0], expected, atol=1e-4)
    model = vit.vit_mini(in_channels=channels)
    assert model(preprocess(photo, rule=preprocessing.of(model))[None]).shape == (1, 10)


def test_predictor_of_a_grey_model_takes_any_photo():
    grey, rgb = vit_keras.Predictor(vit.vit_mini(in_channels=1)), vit_keras.Predictor("vit_mini")
    photo = np.repeat(PHOTO[..., :1], 3, axis=-1)
    for image in (photo, Image.fromarray(photo)):
        expected, found = rgb(image), grey(image)
        assert [item.index for item in found] == [item.index for item in expected]
        np.testing.assert_allclose(found[0].probability, expected[0].probability, rtol=1e-3)
    assert grey(photo[..., :1])[0].index == grey(photo)[0].index
    with pytest.raises(preprocessing.ImageError, match=r"Expected an image \(H, W, 6\)"):
        vit_keras.Predictor(vit.vit_mini(in_channels=6))(photo)


def test_records_of_models_saved_before_the_release():
    """Then mean and std were on the scale of the pixels, and there was no value range."""
    old = {"resize": "squash", "interpolation": "bilinear", "antialias": False, "mean": [127.5] * 3, "std": [127.5] * 3}
    model = tiny()
    record = vit_keras.records.Weights("x.npz", "original", "tanh", 1e-6).to_dict()
    del record["head"]
    model.get_layer("embedding").record = {**record, "preprocessing": old}
    rule = preprocessing.of(keras.models.clone_model(model))
    np.testing.assert_allclose(preprocess(PHOTO, rule=rule), preprocess(PHOTO, (32, 32)), atol=1e-6)


@pytest.mark.parametrize("value", ["photo.png", None, np.zeros((4, 4)), [[1, 2]], np.zeros((1, 2, 3, 4, 3))])
def test_what_are_no_images(value):
    with pytest.raises(ValueError, match=r"Expected images \(H, W, C\) or \(B, H, W, C\)"):
        preprocess(value, (8, 8))


def test_preprocessing_twice_is_noticed():
    once = preprocess(PHOTO, (8, 8))
    with pytest.warns(UserWarning, match="preprocessed already") as caught:
        preprocess(once, (8, 8))
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=r"scaled to 0\.\.1"):
        preprocess(PHOTO / 255.0, (8, 8))
    scaling = keras.Sequential([keras.Input((32, 32, 3)), keras.layers.Rescaling(1 / 127.5, -1.0), tiny()])
    with pytest.warns(UserWarning, match="scales pixels itself"):
        vit_keras.Predictor(scaling)
