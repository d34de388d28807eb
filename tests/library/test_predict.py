"""`vit-keras predict` and `Predictor` with published models: what is fetched, folders, tables, threads."""

import csv
import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from sklearn.datasets import load_sample_image

import vit_keras
import vit_keras_cli
from tests.conftest import ROOT, golden, randomise, tiny
from tests.server import serve
from vit_keras import labels, registry
from vit_keras.checkpoints import rules
from vit_keras.predictor import ahead, known_labels

ENVIRONMENT = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}


def invoke(*arguments):
    return CliRunner().invoke(vit_keras_cli.main, ["predict", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(name="photos")
def _photos(tmp_path, monkeypatch):
    """A folder of pictures, a subfolder, and what is no picture; the cache is empty and there is no network."""
    monkeypatch.setenv("VIT_KERAS_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("VIT_KERAS_MIRROR", "http://no-such-host.invalid")
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for name in ("a.png", "b.jpg", "more/c.PNG"):
        Image.fromarray(load_sample_image("flower.jpg")).resize((60, 40)).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


def test_without_network_the_default_is_not_replaced(photos):
    result = invoke(photos / "a.png")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Fetching vit_s16.augreg_in21k_ft_in1k_224, about 84 MiB, from https://storage.googleapis" in result.stderr
    assert "could not be fetched" in result.stderr
    assert "needs no network: --model vit_mini." in result.stderr


def test_default_model_is_fetched_once(photos, monkeypatch):
    spec = registry.spec_of("vit_s16")
    data = checkpoint(spec, favourite=985)
    name = "S_16-i21k-300ep-lr_0.001-aug_light1-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_224.npz"
    with serve({f"/vit_models/augreg/{name}": data}) as server:
        monkeypatch.setenv("VIT_KERAS_MIRROR", server.url)
        first, second = invoke(photos / "a.png", "--top", "1"), invoke(photos / "a.png", "--top", "1")
        assert "Fetching" in first.stderr
        assert "Fetching" not in second.stderr
        assert len(server.requests) == 1
    assert "daisy" in first.stdout
    assert first.stdout == second.stdout


def checkpoint(spec, favourite):
    """A full-size checkpoint whose weights are zero but for the norms and one class's bias."""
    with keras.StatelessScope(initialize_variables=False):
        model = vit_keras.vit.build(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "to_numpy", lambda variable: np.zeros(variable.shape, "float32"))
        arrays = vit_keras.export_arrays(model, "current")
    arrays["head/bias"][favourite] = 5.0
    arrays["head/kernel"][:] = 1e-3  # not the zero head of the imagenet21k files
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("variant", "favourites"),
    [("vit_ti16", [0, 999]), pytest.param("vit_b16", [0, 282, 388, 817, 999], marks=pytest.mark.slow)],
)
def test_the_favoured_class_gets_its_name(photos, tmp_path, variant, favourites):
    for favourite in favourites:
        (tmp_path / "x.npz").write_bytes(checkpoint(registry.spec_of(variant), favourite))
        result = invoke(photos / "b.jpg", "--weights", tmp_path / "x.npz", "--top", "1")
        assert result.exit_code == 0
        assert result.stdout.splitlines()[1].split(maxsplit=1)[1] == labels.load("imagenet1k")[favourite]


@pytest.mark.parametrize(
    ("arguments", "images", "code"),
    [
        (["."], ["a.png", "b.jpg", "more/c.PNG"], 0),
        (["*.png"], ["a.png"], 0),
        (["**/*.[pP]*"], ["a.png", "more/c.PNG"], 0),
        (["more", "a.png"], ["more/c.PNG", "a.png"], 0),
        (["*.gif", "a.png"], ["a.png"], 1),
        (["notes.txt", "a.png"], ["a.png"], 1),
    ],
)
def test_folders_and_patterns(photos, monkeypatch, arguments, images, code):
    monkeypatch.chdir(photos)
    result = invoke(*arguments, "--model", "vit_mini", "--json")
    assert [json.loads(line)["image"] for line in result.stdout.splitlines()] == images
    assert result.exit_code == code
    assert bool(result.stderr) == bool(code)


def test_empty_folder(photos, tmp_path):
    (tmp_path / "empty").mkdir()
    result = invoke(tmp_path / "empty", "--model", "vit_mini")
    assert result.exit_code == 1
    assert "there are no images in this folder" in result.stderr


def test_csv(photos):
    result = invoke(photos, "--model", "vit_mini", "--csv", "--top", "2")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert list(rows[0]) == ["image", "rank", "index", "label", "probability"]
    assert [row["rank"] for row in rows] == ["1", "2"] * 3
    assert all(row["label"] == labels.load("fashion_mnist")[int(row["index"])] for row in rows)


def test_unreadable_images_keep_their_place_in_line(photos):
    for index in range(9):
        (photos / f"z{index}.png").write_bytes(b"broken" if index % 3 else (photos / "a.png").read_bytes())
    result = invoke(photos, "--model", "vit_mini", "--json", "--batch-size", "2")
    names = [Path(json.loads(line)["image"]).name for line in result.stdout.splitlines()]
    assert names == ["a.png", "b.jpg", "c.PNG", "z0.png", "z3.png", "z6.png"]
    assert [line.split(":")[1].split("/")[-1] for line in result.stderr.splitlines()] == [
        f"z{index}.png" for index in (1, 2, 4, 5, 7, 8)
    ]
    assert result.exit_code == 1


@pytest.mark.parametrize("option", ["--model", "--weights", "--labels"])
def test_empty_values_are_refused(photos, option):
    result = invoke(photos / "a.png", option, "")
    assert result.exit_code == 2
    assert "need a value" in result.stderr


def test_names_win_over_folders_and_files_called_so(photos, monkeypatch):
    monkeypatch.chdir(photos)
    for name in ("fashion_mnist", "vit_mini", "vit_mini.fashion_mnist", "imagenet21k"):
        (photos / name).mkdir()
    assert vit_keras.vit.vit_mini().output_shape == (None, 10)
    assert vit_keras.vit.vit_mini(pretrained=False).output_shape == (None, 10)
    assert invoke("a.png", "--model", "vit_mini").exit_code == 0
    assert invoke("a.png", "--model", "vit_mini.fashion_mnist").exit_code == 0


def test_augreg_files_and_addresses(photos, monkeypatch):
    data = checkpoint(registry.spec_of("vit_ti16"), favourite=7)
    name = "Ti_16-i1k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.01-res_224.npz"
    with serve({f"/vit_models/augreg/{name}": data}) as server:
        monkeypatch.setenv("VIT_KERAS_MIRROR", server.url)
        for options in (
            ["--model", f"vit_ti16.augreg/{name}"],
            ["--weights", f"augreg/{name}"],
            ["--weights", f"gs://vit_models/augreg/{name}"],
        ):
            assert "cock" in invoke(photos / "a.png", *options, "--top", "1").stdout


def test_folders_hold_more_than_images(photos):
    for name in ("model.weights.h5", "report.pdf", "movie.mpg", "._a.png", "drawing.eps"):
        (photos / name).write_bytes(b"no image")
    (photos / "folder.jpg").mkdir()
    result = invoke(photos, "--model", "vit_mini", "--json")
    assert len(result.stdout.splitlines()) == 3
    assert (result.exit_code, result.stderr) == (0, "")


def test_names_that_are_no_text(tmp_path):
    for name in (b"caf\xe9.png", "tab\tand é.png".encode()):
        with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:
            Image.fromarray(load_sample_image("flower.jpg")).save(file, "png")
    command = [sys.executable, "-m", "vit_keras_cli", "predict", str(tmp_path), "--model", "vit_mini"]
    for encoding, option in (("utf-8:strict", "--csv"), ("ascii:strict", "--top=5")):
        environment = {**ENVIRONMENT, "PYTHONIOENCODING": encoding}
        result = subprocess.run([*command, option], capture_output=True, env=environment, cwd=ROOT)
        assert result.returncode == 0, result.stderr
        assert b"tab\tand" in result.stdout


def test_photos_of_scikit_image():
    """Every picture that it ships is named or said to be unreadable, and nothing stops the others."""
    folder = Path(pytest.importorskip("skimage").__file__).parent / "data"
    result = invoke(folder, "--model", "vit_mini", "--json", "--top", "1")
    named = {Path(json.loads(line)["image"]).name for line in result.stdout.splitlines()}
    assert {"astronaut.png", "camera.png", "coffee.png", "rocket.jpg", "moon.png", "no_time_for_that_tiny.gif"} <= named
    pictures = {path.name for path in folder.iterdir() if path.suffix in (".png", ".jpg", ".gif", ".tif")}
    unreadable = {line.split(":")[1].rsplit("/", 1)[-1] for line in result.stderr.splitlines()}
    assert named | unreadable == pictures
    assert result.exit_code == int(bool(unreadable))


def test_labels_by_name(photos):
    result = invoke(photos / "a.png", "--model", "vit_mini", "--labels", "cifar10", "--json")
    assert {item["label"] for item in json.loads(result.stdout)["predictions"]} <= set(labels.load("cifar10"))


def test_clothes_as_png_files(tmp_path):
    """The first 200 test images of Fashion-MNIST, grey PNG files in a folder."""
    sample = golden("fashion_mnist_sample")
    for index, (image, label) in enumerate(zip(sample["images"], sample["labels"])):
        Image.fromarray(image).save(tmp_path / f"{index:03d}_{label}.png")
    result = invoke(tmp_path, "--model", "vit_mini", "--top", "1", "--csv")
    assert result.exit_code == 0
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert np.mean([row["image"][-5] == row["index"] for row in rows]) >= 0.88


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("vit_x16", "There is no model 'vit_x16'"),
        ("vit_b61", "Did you mean 'vit_b16'"),
        ("vit_b16.augreg", "There are no weights 'augreg' for vit_b16"),
        ("vit_g14", "No weights of it are published"),
        ("vit_b16.orig_in21k", "could not be fetched"),
    ],
)
def test_models_that_are_not_there(photos, model, message):
    result = invoke(photos / "a.png", "--model", model)
    assert result.exit_code in (1, 2)
    assert message in result.stderr.replace("\n", " ")


def test_help_of_the_cache_imports_no_keras(tmp_path):
    code = """
import sys
from click.testing import CliRunner
import vit_keras_cli
result = CliRunner().invoke(vit_keras_cli.main, sys.argv[1:])
assert result.exit_code == 0, result.output
loaded = {name.split(".")[0] for name in sys.modules} & {"keras", "tensorflow", "jax", "torch", "numpy", "vit_keras"}
assert not loaded, loaded
"""
    environment = {**ENVIRONMENT, "VIT_KERAS_HOME": str(tmp_path)}
    for command in ("list", "verify", "clean"):
        subprocess.run([sys.executable, "-c", code, "cache", command], check=True, cwd=ROOT, env=environment)


# --- Predictor -------------------------------------------------------------------------------------------------------


def test_predictor_by_name(photos):
    predictor = vit_keras.Predictor("vit_mini")
    assert predictor.image_size == (28, 28)
    assert [item.label in labels.load("fashion_mnist") for item in predictor(photos / "a.png", top=2)] == [True] * 2
    assert vit_keras.Predictor("vit_mini.fashion_mnist", image_size=32).image_size == (32, 32)
    with pytest.raises(ValueError, match="There is no model 'vit_nimi'"):
        vit_keras.Predictor("vit_nimi")


def test_one_trace_a_batch_shape():
    predictor = vit_keras.Predictor(randomise(tiny()))
    traces = []
    call = predictor.model.call
    predictor.model.call = lambda *args, **kwargs: traces.append(args[0].shape) or call(*args, **kwargs)
    photo = load_sample_image("flower.jpg")
    for count in (3, 4, 5, 9):
        assert len(list(predictor.stream([photo] * count, batch_size=4))) == count
    assert len(traces) == 1
    for _ in range(3):
        predictor(photo)
    assert len(traces) == 2


def test_labels_as_text_are_a_set_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("labels.txt").write_text("".join(f"class {i}\n" for i in range(10)))
    assert vit_keras.Predictor("vit_mini", labels="labels.txt").labels[3] == "class 3"
    assert vit_keras.Predictor("vit_mini", labels="cifar10").labels[3] == "cat"
    assert vit_keras.decode_predictions(np.eye(10), labels="cifar10")[3][0].label == "cat"
    with pytest.raises(ValueError, match=r"the labels cannot be read .* Expected a text file, or one of cifar10"):
        vit_keras.Predictor("vit_mini", labels="abcdefghij")


def test_images_are_read_while_the_model_computes():
    """Two images in different threads at once."""
    together = threading.Barrier(2, timeout=20)
    assert list(ahead(lambda index: together.wait() is not None, range(2), 4)) == [True, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, x: p(x, top=0), "`top` must be"),
        (lambda p, x: p(x, top=-1), "`top` must be"),
        (lambda p, x: p.stream([x], batch_size=0), "`batch_size` must be"),
        (lambda p, x: p(np.full((4, 4, 3), np.nan)), "Received: NaN"),
    ],
)
def test_predictor_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call(vit_keras.Predictor(tiny()), load_sample_image("flower.jpg"))


def test_a_model_without_inputs_and_outputs_is_refused():
    class Own(keras.Model):
        pass

    with pytest.raises(ValueError, match="Expected a functional model"):
        vit_keras.Predictor(Own())


def test_stream_equals_single_calls():
    predictor = vit_keras.Predictor(randomise(tiny()))
    photos = [np.roll(load_sample_image("flower.jpg"), 50 * i, axis=1) for i in range(7)]
    streamed = list(predictor.stream(iter(photos), batch_size=3))
    for photo, predictions in zip(photos, streamed):
        single = predictor(photo)
        assert [item.index for item in single] == [item.index for item in predictions]
        np.testing.assert_allclose(single[0].probability, predictions[0].probability, rtol=1e-5)


def test_labels_go_with_the_head_alone():
    model = vit_keras.vit.vit_mini()
    features = model.get_layer("ExtractToken").output
    own = keras.Model(model.input, keras.layers.Dense(10, name="mine")(features))
    assert known_labels(own) is None
    assert known_labels(vit_keras.vit.vit_mini(pretrained_top=False)) is None
    assert known_labels(keras.models.clone_model(model)) == labels.load("fashion_mnist")


def test_ahead_keeps_order_and_takes_no_more_than_it_was_told():
    taken = []

    def items():
        for index in range(100):
            taken.append(index)
            yield index

    results = ahead(lambda index: (time.sleep(0.001 * (index % 3)), index)[1], items(), 4)
    assert [next(results) for _ in range(10)] == list(range(10))
    assert len(taken) <= 15
    results.close()
    threads = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        list(ahead(lambda index: 1 // (index - 5), range(10), 3))
    assert threading.active_count() <= threads
