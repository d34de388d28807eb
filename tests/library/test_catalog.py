"""The catalog of published weights: rows, names, the AugReg grammar and index, labels."""

import dataclasses
import hashlib
import json
import math
import re
from urllib.parse import urlsplit

import numpy as np
import pytest
from click.testing import CliRunner

import vit_keras
import vit_keras_cli
from tests.conftest import ROOT, images, run_python, tiny
from tests.library.test_models import count, shapes_only
from tests.server import serve
from vit_keras import augreg, catalog, checkpoints, labels, registry, utils, variants, vit
from vit_keras.cli.models import weights_page
from vit_keras.preprocessing import ORIGINAL

ROWS = list(catalog.ROWS.values())
AUGREG_B16 = "B_16-i21k-300ep-lr_0.001-aug_medium1-wd_0.1-do_0.0-sd_0.0"


@pytest.mark.parametrize("variant", dict.fromkeys(row.variant for row in ROWS))
def test_every_row_builds_its_variant(variant):
    built = {}  # rows of equal architecture share a model
    for row in (row for row in ROWS if row.variant == variant):
        key = (row.image_size, row.classes, row.pre_logits)
        model = built[key] = built.get(key) or shapes_only(row.name)
        assert model.name == row.variant.replace("_", "-")
        assert model.input_shape == (None, row.image_size, row.image_size, 3), row.name
        assert model.output_shape == (None, row.classes or model.get_layer("embedding").width), row.name
        assert ("pre_logits" in [layer.name for layer in model.layers]) == row.pre_logits, row.name
        if row.size and row.name != "vit_s16.sam_in1k":  # published sizes are those of these parameters in float32
            exact = abs(row.size / catalog.MIB - round(row.size / catalog.MIB)) > 1e-6 and row.size < 2**30
            assert 4 * count(model) == pytest.approx(row.size, abs=0.2 * 2**20 if exact else 12 * 2**20), row.name


def test_the_file_with_training_state_has_three_times_its_parameters():
    row = catalog.ROWS["vit_s16.sam_in1k"]
    assert 12 * count(shapes_only(row.name)) == pytest.approx(row.size, abs=0.3 * 2**20)


HUB_ROWS = [row for row in ROWS if row.url.startswith(catalog.HUB)]


@pytest.mark.parametrize("row", HUB_ROWS, ids=lambda row: row.name)
def test_rows_of_the_hub(row):
    owner, model = re.fullmatch(rf"{catalog.HUB}/(\w+)/([\w.-]+)/resolve/main/model\.safetensors", row.url).groups()
    assert (owner, row.format) in (("timm", "timm"), ("google", "huggingface"))
    size = registry.VARIANTS[row.variant]
    letter = {"Ti": "tiny", "S": "small", "B": "base", "L": "large", "H": "huge"}[size.size]
    assert re.search(rf"(vit|deit)[_-]{letter}.*[_-]patch{size.patch_size}[_-]{row.image_size}", model)
    assert (row.gelu, row.epsilon) == ("exact", 1e-6 if owner == "timm" else 1e-12)
    assert ("distilled" in model) == ("distilled" in row.tag)
    assert row.license == ("CC-BY-NC-4.0" if "mae" in model else "Apache-2.0")
    assert (row.head is None) == (row.tag in ("dino", "mae"))


@pytest.mark.parametrize("row", [row for row in ROWS if row not in HUB_ROWS], ids=lambda row: row.name)
def test_addresses(row):
    assert row.license == "Apache-2.0"
    assert (row.accuracy is None) == (row.accuracy_source is None)
    if row.embedded:
        assert (variants.EMBEDDED / row.url).is_file()
        return
    parts = urlsplit(row.url)
    assert (parts.scheme, parts.netloc) == ("https", "storage.googleapis.com")
    folder = {"orig_in21k": "imagenet21k", "sam_in1k": "sam"}.get(row.tag)
    folder = folder or ("augreg" if row.tag.startswith("augreg") else "imagenet21k+imagenet2012")
    assert re.fullmatch(rf"/vit_models/{re.escape(folder)}/[\w+.-]+\.npz", parts.path)
    size = re.search(r"res_(\d+)", row.url)
    assert size is None or int(size[1]) == row.image_size
    assert row.tag[-3:] == str(row.image_size) or row.image_size == 224


def test_names_are_unique_and_addresses_too():
    assert len({row.url for row in ROWS}) == len(ROWS) == len(catalog.ROWS)
    assert {row.variant for row in ROWS} <= set(registry.VARIANTS)


def test_rows_of_every_published_file():
    """The listing in vit_jax.ipynb, of the families here."""
    for folder, files in {
        "imagenet21k": "R26+ViT-B_32 R50+ViT-B_16 R50+ViT-L_32 ViT-B_16 ViT-B_32 ViT-B_8 ViT-H_14 ViT-L_16 ViT-L_32",
        "imagenet21k+imagenet2012": "R50+ViT-B_16 ViT-B_16-224 ViT-B_16 ViT-B_32 ViT-B_8 ViT-L_16-224 ViT-L_16 "
        "ViT-L_32",
        "sam": "ViT-B_16 ViT-B_32 ViT-L_16 ViT-L_32 ViT-S_16",
    }.items():
        urls = {f"{catalog.BUCKET}/{folder}/{file}.npz" for file in files.split()}
        assert urls == {row.url for row in ROWS if f"/{folder}/" in row.url}
    assert len(catalog.list_weights("*.augreg_in21k")) == 10


@pytest.mark.parametrize(
    ("weights", "variant", "size", "classes"),
    [
        (f"augreg/{AUGREG_B16}--imagenet2012-steps_20k-lr_0.03-res_384.npz", "vit_b16", 384, 1000),
        (f"augreg/{AUGREG_B16}--cifar100-steps_2k-lr_0.003-res_224.npz", "vit_b16", 224, 100),
        (f"augreg/{AUGREG_B16}--oxford_iiit_pet-steps_0k-lr_0.001-res_384.npz", "vit_b16", 384, 37),
        (f"augreg/{AUGREG_B16}--resisc45-steps_0k-lr_0.01-res_224.npz", "vit_b16", 224, 45),
        (f"augreg/{AUGREG_B16}--kitti-steps_0k-lr_0.01-res_224.npz", "vit_b16", 224, None),
        (f"augreg/{AUGREG_B16}.npz", "vit_b16", 224, 21843),
        ("augreg/Ti_16-i1k-300ep-lr_0.001-aug_light0-wd_0.03-do_0.1-sd_0.1.npz", "vit_ti16", 224, 1000),
        ("augreg/S_32-i21k_30-30ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0.npz", "vit_s32", 224, 21843),
        ("augreg/R_Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz", "r_ti16", 224, 21843),
        ("augreg/R50_L_32-i21k-30ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0.npz", "r50_l32", 224, 21843),
        ("augreg/R26_S_32-i1k-300ep-lr_1e-3-aug_none-wd_0.03-do_0.0-sd_0.0.npz", "r26_s32", 224, 1000),
    ],
)
def test_augreg_names_are_read(weights, variant, size, classes):
    row = catalog.find(variant, weights)
    assert (row.variant, row.image_size, row.classes) == (variant, size, classes)
    assert row.url == f"{catalog.BUCKET}/{weights}"


@pytest.mark.parametrize(
    ("variant", "weights", "message"),
    [
        ("vit_b16", "augreg/nonsense.npz", "Expected the name of an AugReg file"),
        ("vit_b16", "augreg/X_16-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0.npz", "with a model of Ti_16"),
        ("vit_s16", f"augreg/{AUGREG_B16}.npz", "are vit_b16's. Received: vit_s16"),
        ("vit_s16", "vit_b16.augreg_in21k", "are vit_b16's. Received: vit_s16"),
        ("vit_h14", "imagenet21k+imagenet2012", "for vit_h14. There is orig_in21k, mae; or pass the path"),
        ("vit_g14", "imagenet21k", "No weights of it are published"),
        ("vit_b16", "orig", "There are no weights 'orig' for vit_b16. There is orig_in21k"),
    ],
)
def test_wrong_names_are_told(variant, weights, message):
    with pytest.raises(ValueError, match=re.escape(message).replace("with", ".*with")):
        catalog.find(variant, weights)


@pytest.mark.parametrize(
    ("variant", "weights", "tag"),
    [
        ("vit_b16", "imagenet21k+imagenet2012", "orig_in21k_ft_in1k_384"),
        ("vit_b16", "imagenet21k", "orig_in21k"),
        ("vit_b16", "vit_b16.sam_in1k", "sam_in1k"),
        ("vit_s16", "imagenet21k+imagenet2012", "augreg_in21k_ft_in1k_384"),
        ("vit_s16", "imagenet21k", "augreg_in21k"),
        ("r50_b16", "imagenet21k+imagenet2012", "orig_in21k_ft_in1k_384"),
        ("vit_mini", "fashion_mnist", "fashion_mnist"),
    ],
)
def test_names_mean_what_they_did(variant, weights, tag):
    assert catalog.find(variant, weights).tag == tag


def test_rows_are_plain_json():
    for row in ROWS:
        json.dumps(dataclasses.asdict(row))


# --- weights by name, served locally ---------------------------------------------------------------------------------


@pytest.fixture(name="served")
def _served(tmp_path, monkeypatch):
    """A function that serves, at the address of a row, the checkpoint of a model."""
    monkeypatch.setenv("VIT_KERAS_HOME", str(tmp_path / "cache"))
    with serve({}) as server:
        monkeypatch.setenv("VIT_KERAS_MIRROR", server.url)

        def serve_row(name, model):
            variant, _, tag = name.partition(".")
            row = catalog.find(variant, tag)
            if row.format == "original":
                path = tmp_path / "x.npz"
                checkpoints.save_npz(model, path)
            else:
                checkpoints.save_checkpoint(model, tmp_path / "x", row.format, force=True)
                path = tmp_path / "x" / "model.safetensors"
            server.files[urlsplit(row.url).path] = path.read_bytes()
            return server

        yield serve_row


def randomised(model):
    for variable in model.weights:
        variable.assign(np.random.default_rng(len(variable.path)).normal(size=variable.shape) * 0.05)
    return model


TI = "vit_ti16.augreg_in21k_ft_in1k_384"


def test_create_by_name(served):
    source = randomised(vit.vit_ti16(384, pretrained=False))
    served(TI, source)
    model = vit_keras.create(TI)
    np.testing.assert_array_equal(model.get_weights()[-2], source.get_weights()[-2])
    assert model.input_shape == (None, 384, 384, 3)
    record = model.get_layer("embedding").record
    assert (record["source"], record["labels"], record["head"]) == (TI, "imagenet1k", True)
    new_head = vit_keras.create(TI, classes=37)
    assert new_head.output_shape == (None, 37)
    assert not np.asarray(new_head.get_layer("head").kernel).any()
    assert new_head.get_layer("embedding").record["labels"] is None
    assert vit_keras.create(TI, image_size=64, include_top=False).output_shape == (None, 192)
    small = vit.vit_ti16(image_size=(64, 32))  # the default weights, resized
    assert small.get_layer("embedding").record["source_grid"] == [24, 24]
    assert small.get_layer("embedding").record["grid"] == [4, 2]
    with pytest.raises(ValueError, match="names its weights already"):
        vit_keras.create(TI, weights="imagenet21k")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vit_ti16.deit_distilled_in1k", {"distillation": True}),
        ("vit_s16.dino", {"include_top": False}),
        ("vit_b32.hf_orig_in21k_ft_in1k_384", {"epsilon": 1e-12}),
    ],
)
def test_create_from_the_hub(name, changes, served):
    """Other layouts, other numerics, other pixels; a distillation token, or no head, as the file has it."""
    row = catalog.ROWS[name]
    variant = name.partition(".")[0]
    source = getattr(vit, variant)(row.image_size, pretrained=False, gelu="exact", **changes)
    served(name, randomised(source))
    model = vit_keras.create(name)
    pixels = np.random.default_rng(0).normal(size=(1, row.image_size, row.image_size, 3)).astype("float32")
    np.testing.assert_allclose(model(pixels), source(pixels), atol=1e-5)
    expected = dataclasses.replace(row.preprocessing, size=(row.image_size, row.image_size))
    assert vit_keras.preprocessing.of(model) == expected
    with_head = vit_keras.create(name, classes=3, image_size=64)
    assert with_head.output_shape == (None, 3)


def test_what_the_row_says_goes_into_the_model(served, monkeypatch):
    """Rows of other formats will differ from the original's numerics, preprocessing and resize rule."""
    served(TI, randomised(vit.vit_ti16(32, pretrained=False)))
    row = dataclasses.replace(
        catalog.ROWS[TI],
        gelu="exact",
        epsilon=1e-5,
        resize=catalog.Resize("antialiased_bicubic"),
        preprocessing=vit_keras.preprocessing.TIMM,
    )
    monkeypatch.setitem(catalog.ROWS, TI, row)
    model = vit_keras.create(TI, image_size=64, source_grid=(2, 2))
    record = model.get_layer("embedding").record
    assert (record["gelu"], record["epsilon"], record["resize"]["method"]) == ("exact", 1e-5, "antialiased_bicubic")
    block = model.get_layer("Transformer_encoderblock_0")
    assert (block.gelu, block.epsilon) == ("exact", 1e-5)
    assert vit_keras.preprocessing.of(model).interpolation == "bicubic"


def test_representation_size_follows_the_file(served):
    served("vit_b32.orig_in21k", vit.vit_b32(32, classes=3, pretrained=False, representation_size=16))
    with pytest.warns(UserWarning, match=r"all zeros|Setting manually"):
        model = vit.vit_b32(32, weights="imagenet21k")
    assert model.get_layer("pre_logits").units == 16


def test_wrong_arguments_are_told_before_a_download(served):
    server = served(TI, tiny())
    with pytest.raises(ValueError, match="not divisible"):
        vit_keras.create(TI, image_size=30)
    with pytest.raises(TypeError, match="Did you mean 'dropout'"):
        vit_keras.create(TI, dropuot=0.1)
    assert server.requests == []


def test_another_file_than_the_row_says(served):
    served(TI, tiny())
    with pytest.raises(checkpoints.CheckpointError, match=r"2 blocks of width 32 .* The model has .*Ti/16"):
        vit_keras.create(TI, pretrained_top=False, classes=3)


def test_labels_of_a_fine_tuned_file_by_its_name(tmp_path):
    name = f"{AUGREG_B16}--oxford_iiit_pet-steps_0k-lr_0.001-res_384.npz".replace("B_16", "Ti_16")
    checkpoints.save_npz(randomised(vit.vit_ti16(32, classes=37, pretrained=False)), tmp_path / name)
    model = vit.vit_ti16(32, classes=37, weights=tmp_path / name)
    assert vit_keras.Predictor(model).labels[1] == "american_bulldog"


# --- the index of AugReg ---------------------------------------------------------------------------------------------

FIELDS = (
    *("name", "ds", "final_val", "adapt_ds", "adapt_resolution", "adapt_final_val", "adapt_final_test"),
    *("filename", "adapt_filename"),
)
B, B8, S = AUGREG_B16, AUGREG_B16.replace("B_16", "B_8"), AUGREG_B16.replace("B_16", "S_16")
INDEX = [
    ("B/16", "i21k", "0.48", "imagenet2012", "384", "0.850", "0.86", B, f"{B}--imagenet2012-a"),
    ("B/16", "i21k", "0.48", "imagenet2012", "224", "0.860", "0.80", B, f"{B}--imagenet2012-b"),
    ("B/16", "i1k", "0.79", "imagenet2012", "384", "0.800", "0.90", "B_16-i1k-x", "B_16-i1k-x--imagenet2012-c"),
    ("B/16", "i21k", "0.49", "cifar100", "384", "0.930", "0.93", "B_16-i21k-y", "B_16-i21k-y--cifar100-d"),
    ("B/8", "i21k", "0.60", "imagenet2012", "384", "0.990", "0.99", B8, f"{B8}--imagenet2012-e"),
    ("S/16", "i21k", "0.45", "imagenet2012", "384", "", "", S, f"{S}--imagenet2012-f"),
]


@pytest.fixture(name="index")
def _index(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_KERAS_HOME", str(tmp_path / "cache"))
    text = "\n".join(",".join(row) for row in (FIELDS, *INDEX))
    with serve({"/vit_models/augreg/index.csv": text.encode()}) as server:
        monkeypatch.setenv("VIT_KERAS_MIRROR", server.url)
        yield server


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ({"adapt_ds": "imagenet2012", "resolution": 384}, f"{B}--imagenet2012-a"),
        ({"adapt_ds": "imagenet2012"}, f"{B}--imagenet2012-b"),
        ({"adapt_ds": "imagenet2012", "ds": "i1k"}, "B_16-i1k-x--imagenet2012-c"),
        ({"adapt_ds": "cifar100"}, "B_16-i21k-y--cifar100-d"),
        ({}, "B_16-i21k-y"),
        ({"ds": "i1k"}, "B_16-i1k-x"),
    ],
)
def test_best_of_the_index(index, question, answer):
    assert augreg.best("vit_b16", **question) == f"augreg/{answer}.npz"
    augreg.best("vit_b16")
    assert len(index.requests) == 1


def test_rows_without_a_score_are_passed_over(index):
    rows = [(*INDEX[5][:5], value, "", S, f"{S}--imagenet2012-{value or 'none'}") for value in ("", "0.8", "0.7")]
    text = "\n".join(",".join(row) for row in (FIELDS, *rows))
    index.files["/vit_models/augreg/index.csv"] = text.encode()
    assert augreg.best("vit_s16", adapt_ds="imagenet2012") == f"augreg/{S}--imagenet2012-0.8.npz"


def test_questions_without_an_answer(index):
    with pytest.raises(ValueError, match="and adapt_ds cifar100, imagenet2012"):
        augreg.best("vit_b16", adapt_ds="imagenet1k")
    with pytest.raises(ValueError, match="nothing for vit_l16 with adapt_ds='imagenet2012'"):
        augreg.best("vit_l16", adapt_ds="imagenet2012")
    with pytest.raises(ValueError, match="nothing for vit_g14"):
        augreg.best("vit_g14")
    with pytest.raises(ValueError, match="pass adapt_ds too"):
        augreg.best("vit_b16", resolution=384)


def test_an_index_that_is_none(index):
    index.files["/vit_models/augreg/index.csv"] = b"a,b\n1,2\n"
    with pytest.raises(checkpoints.CheckpointError, match="has no column filename"):
        augreg.best("vit_b16")


# --- labels ----------------------------------------------------------------------------------------------------------


def test_label_sets():
    assert labels.names() == sorted(catalog.CLASSES)
    for name, classes in catalog.CLASSES.items():
        found = labels.load(name)
        assert len(found) == classes
        assert all(label and label == label.strip() for label in found)
    imagenet = labels.load("imagenet1k")
    assert imagenet[0] == "tench, Tinca tinca"
    assert imagenet[282] == "tiger cat"
    assert imagenet[999] == "toilet tissue, toilet paper, bathroom tissue"
    assert labels.load("imagenet21k")[0] == "organism, being"
    assert labels.load("imagenet21k")[359] == "tench, Tinca tinca"
    assert utils.get_imagenet_classes() == imagenet
    with pytest.raises(ValueError, match="no label set 'imagenet'"):
        labels.load("imagenet")


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("cifar10", "bb3914949cecedee"),
        ("cifar100", "fbe8ad23bbaf2496"),
        ("fashion_mnist", "39a730d3fc82d698"),
        ("imagenet1k", "a40d9be82eb4738b"),
        ("imagenet21k", "1cc12d5969905d8d"),
        ("oxford_iiit_pet", "6f968994332adab1"),
        ("resisc45", "5433d6c078c12b52"),
    ],
)
def test_no_label_has_moved(name, digest):
    """Each set as it was taken from timm (ImageNet) and TensorFlow Datasets; see `vit_keras/labels.py`."""
    assert hashlib.sha256("\n".join(labels.load(name)).encode()).hexdigest()[:16] == digest


def test_decode_predictions():
    logits = np.zeros((2, 1000), "float32")
    logits[0, 282], logits[1, 0] = 20.0, 10.0
    found = vit_keras.decode_predictions(logits, top=3)
    assert [len(row) for row in found] == [3, 3]
    assert (found[0][0].index, found[0][0].label) == (282, "tiger cat")
    assert found[1][0].probability == pytest.approx(math.exp(10) / (math.exp(10) + 999))
    assert vit_keras.decode_predictions([[0.1, 0.9]], labels=["no", "yes"], activation="softmax")[0][0].label == "yes"
    assert vit_keras.decode_predictions([[0.0, 1.0]])[0][0].label == "1"
    with pytest.raises(ValueError, match=r"shape \(B, classes\)"):
        vit_keras.decode_predictions(np.zeros(3))
    with pytest.raises(ValueError, match="2 classes"):
        vit_keras.decode_predictions([[0.0, 1.0]], labels=["a"])


# --- tables and pages ------------------------------------------------------------------------------------------------


def test_list_weights():
    assert vit_keras.list_weights("vit_b16.orig*") == [
        "vit_b16.orig_in21k",
        "vit_b16.orig_in21k_ft_in1k_224",
        "vit_b16.orig_in21k_ft_in1k_384",
    ]
    assert all("augreg" in name and name.endswith("384") for name in vit_keras.list_weights("*augreg*384"))


def test_weights_table():
    runner = CliRunner(env={"COLUMNS": "160"})
    result = runner.invoke(vit_keras_cli.main, ["models", "vit_b16.*", "--weights"])
    assert result.exit_code == 0
    assert "81.20" in result.output
    assert "vit_l16" not in result.output
    rows = json.loads(runner.invoke(vit_keras_cli.main, ["models", "--weights", "--json"]).output)
    assert [row["name"] for row in rows] == list(catalog.ROWS)
    assert "goes with --weights" in runner.invoke(vit_keras_cli.main, ["models", "--markdown"]).output


def test_docs_page_is_fresh():
    page = (ROOT / "docs" / "weights.md").read_text(encoding="utf-8")
    assert page == weights_page() + "\n", "run: vit-keras models --weights --markdown > docs/weights.md"


def test_catalog_imports_no_keras():
    code = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("vit_keras", "vit_keras/__init__.py")
sys.modules["vit_keras"] = importlib.util.module_from_spec(spec)
import vit_keras.catalog, vit_keras.labels
assert not {"keras", "tensorflow"} & set(sys.modules)
"""
    run_python(code)


# --- the weights in the package --------------------------------------------------------------------------------------


def test_vit_mini_needs_no_network(monkeypatch):
    monkeypatch.setenv("VIT_KERAS_OFFLINE", "1")
    model = vit.vit_mini(pretrained=True)
    assert model.output_shape == (None, 10)
    assert vit_keras.preprocessing.of(model) == dataclasses.replace(ORIGINAL, size=(28, 28))
    assert vit_keras.Predictor(model).labels == labels.load("fashion_mnist")
    assert (variants.EMBEDDED / catalog.ROWS["vit_mini.fashion_mnist"].url).stat().st_size <= 1.5e6
    larger = vit.vit_mini(image_size=(32, 40))
    assert larger(images(1, 32, 40, 3)).shape == (1, 10)
