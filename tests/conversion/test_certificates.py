"""Certificates, conversions and releases: what is proven, what is refused, what goes on."""

import json
import shutil

import h5py
import numpy as np
import pytest
import scipy.special
from click.testing import CliRunner

import vit_keras
from conversion import __main__ as command
from conversion import certificate, judging, layouts, release
from tests.conftest import GOLDEN, randomise, tiny
from tests.library.test_formats import PEERS, WRAPPED, peer_arrays
from vit_keras.checkpoints import CheckpointError, kinds
from vit_keras.converter import TARGETS, convert

TINY = str(GOLDEN / "vit_token_prelinen.npz")


def invoke(*arguments, code=0):
    result = CliRunner().invoke(command.main, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


SOURCES = {
    "original": (TINY, {}),
    "hybrid": (str(GOLDEN / "hybrid_r50.npz"), {}),
    "rectangle": (str(GOLDEN / "vit_rect.npz"), {"source_grid": (4, 6)}),
    "keras_hub": (str(PEERS / "keras_hub_token"), {}),
    "keras_hub gap": (str(PEERS / "keras_hub_gap"), {}),
    "vit_keras 0.2": (str(PEERS / "vit_keras_plain.weights.h5"), {"num_heads": 4}),
    "vit_keras 0.1": (str(PEERS / "vit_keras_01.h5"), {"num_heads": 4}),
    "vit_keras .h5": (str(PEERS / "vit_keras_plain.h5"), {}),
    "vit_keras pre_logits": (str(PEERS / "vit_keras_pre_logits.weights.h5"), {"num_heads": 4}),
}
TORCH = [
    "timm_plain",
    "timm_gap",
    "timm_distilled",
    "timm_registers",
    "timm_map",
    "timm_hybrid",
    "timm_hybrid_stem",
    "transformers_vit",
    "transformers_deit_with_teacher",
    "transformers_dinov2_registers_head",
]


@pytest.mark.parametrize("name", [*SOURCES, *TORCH])
def test_the_library_and_the_reference_agree_on_every_stage(name, tmp_path):
    source, options = SOURCES.get(name, (None, {"num_heads": 4}))
    if source is None:
        source = str(tmp_path / "model.safetensors")
        kinds.write_safetensors(source, peer_arrays(name), {})
    result = certificate.certify(source, **options)
    assert result["verdict"] == "pass", result["stages"]
    assert {"embedding", "block_0", "logits"} <= set(result["stages"])
    assert result["source"]["sha256"]
    json.dumps(result)


CHANGES = [
    {"image_size": (96, 48)},
    {"patch_size": 8},
    {"patch_size": 32},
    {"classes": 3},
    {"in_channels": 1},
    {"in_channels": 4},
    {"image_size": (70, 90), "remainder": "pad"},
    {"image_size": (70, 90), "remainder": "crop"},
    {"image_size": 96, "resize": "bicubic"},
    {"pooling": "gap"},
    {"pooling": None},
    {"include_top": False},
    {"image_size": None},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_surgery_agrees_with_the_reference(changes):
    result = certificate.certify(TINY, source_grid=(4, 4), **changes)
    assert result["verdict"] == "pass", result["problems"]
    assert {name: value for name, value in changes.items() if value is not None}.items() <= result["options"].items()


@pytest.mark.parametrize("channels", [1, 2])
def test_stems_of_other_channels_agree_with_the_reference(channels):
    result = certificate.certify(str(GOLDEN / "hybrid_r50.npz"), in_channels=channels)
    assert result["verdict"] == "pass", result["problems"]


def test_options_that_a_certificate_cannot_follow():
    with pytest.raises(ValueError, match=r"A certificate follows .* Received: position"):
        certificate.certify(TINY, position="none")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_0": np.full((2, 3), np.nan)}, "block_0: values that are not finite"),
        ({"block_0": np.zeros((1, 3))}, r"block_0: shape (1, 3), expected (2, 3)"),
        ({"block_1": np.zeros((2, 3))}, "block_1: only the Keras model has it"),
        ({"features": None}, "features: only the reference has it"),
        ({"logits": None}, "logits: only the reference has it"),
    ],
)
def test_what_cannot_be_compared_is_a_problem(change, message):
    stages = {name: np.ones((2, 3)) for name in ("embedding", "block_0", "features", "logits")}
    found = {name: value for name, value in {**stages, **change}.items() if value is not None}
    assert judging.compare(found, stages)[1] == [message]


def test_a_model_of_this_library_is_proven_by_what_it_was_converted_to(tmp_path):
    model = randomise(tiny(pooling="gap", registers=2))
    model.save(tmp_path / "own.keras")
    convert(tmp_path / "own.keras", "timm", tmp_path / "timm", accept_numerics=True)
    result = certificate.certify(str(tmp_path / "own.keras"), str(tmp_path / "timm"))
    assert result["verdict"] == "pass", result["problems"]
    with pytest.raises(CheckpointError, match="which the reference does not read: pass a target"):
        certificate.certify(str(tmp_path / "own.keras"))


OWN = {
    "timm": [
        {"registers": 3, "layer_scale": 0.1},
        {"registers": 2, "image_size": (32, 48)},
        {"activation": "softmax"},
        {"dtype": "mixed_bfloat16"},
        {"position": "none"},
    ],
    "huggingface": [
        {"include_top": False, "pooling": None, "class_token": True},
        {"distillation": True, "pooling": "both"},
    ],
    "keras_hub": [{"activation": "softmax", "gelu": "exact"}, {"dtype": "bfloat16", "gelu": "exact"}],
    "npz": [{"image_size": (32, 48)}, {"dtype": "bfloat16"}, {"position": "none"}],
}


@pytest.mark.filterwarnings("ignore:.*has no place for the head's activation:UserWarning")
@pytest.mark.parametrize(("to", "changes"), [(to, changes) for to in OWN for changes in OWN[to]], ids=str)
def test_own_models_into_every_format_with_proof(to, changes, tmp_path):
    randomise(tiny(**changes)).save(tmp_path / "own.keras")
    out = tmp_path / f"out{'.npz' if to == 'npz' else ''}"
    convert(tmp_path / "own.keras", to, out)
    result = certificate.certify(str(tmp_path / "own.keras"), str(out))
    assert result["verdict"] == "pass", result["problems"]
    known = {"image_size": changes.get("image_size", 32)} if to == "npz" else {}
    grid = {"source_grid": (4, 6)} if to == "npz" and "image_size" in changes else {}
    again = vit_keras.from_checkpoint(out, **known, **grid)
    model = vit_keras.from_checkpoint(tmp_path / "own.keras", activation="linear", dtype="float32")
    expected = np.asarray(model(judging.inputs_of(model, {})))
    expected = expected.mean(axis=1) if changes.get("pooling") == "both" else expected
    if not changes.get("include_top", True):
        return  # a folder without a head does not say what is read
    if to == "keras_hub" and "activation" in changes:
        expected = scipy.special.softmax(expected, axis=-1)
    np.testing.assert_allclose(again(judging.inputs_of(model, {})), expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("origin", WRAPPED)
def test_files_of_pre_training_are_proven(origin, tmp_path):
    arrays = {WRAPPED[origin](key): value for key, value in peer_arrays("timm_plain").items() if "head" not in key}
    kinds.write_safetensors(tmp_path / "model.safetensors", arrays, {})
    result = certificate.certify(str(tmp_path / "model.safetensors"), num_heads=4)
    assert result["verdict"] == "pass", result["problems"]


def test_weights_that_do_not_load_do_not_pass(tmp_path):
    """The judged model has nothing of the source but its architecture."""
    convert(TINY, "weights", tmp_path / "w.weights.h5")
    with h5py.File(tmp_path / "w.weights.h5", "r+") as file:
        file.visititems(lambda key, item: touch(item) if key.endswith("vars/0") else None)
    result = certificate.certify(TINY, str(tmp_path / "w.weights.h5"))
    assert result["verdict"] == "fail"


def touch(item):
    item[...] = item[()] * np.float32(1.01)


def test_a_wrong_conversion_fails():
    """A model whose query and key are exchanged in one block: the certificate names the block."""
    model = vit_keras.from_checkpoint(TINY)
    attention = model.get_layer("Transformer_encoderblock_1").attention
    query, key = (np.array(dense.kernel) for dense in (attention.query, attention.key))
    attention.query.kernel.assign(key)
    attention.key.kernel.assign(query[:, ::-1])
    images, settings = judging.inputs(64, 64), judging.settings_of(vit_keras.checkpoints.open_checkpoint(TINY), {})
    stages, problems = judging.compare(
        judging.keras_stages(model, images), judging.reference_stages(TINY, settings, images, {}, 10)
    )
    assert not problems
    assert stages["block_0"]["relative"] < certificate.TOLERANCE < stages["block_1"]["relative"]


@pytest.mark.parametrize("to", TARGETS)
def test_convert_to_every_target_and_certify(to, tmp_path):
    suffix = {"keras": ".keras", "weights": ".weights.h5", "npz": ".npz"}.get(to, "")
    out = tmp_path / f"out{suffix}"
    options = ["--accept-numerics"] if to == "keras_hub" else []
    said = invoke("convert", TINY, "--to", to, "--out", out, "--explain", *options)
    assert "cls → class_token/cls" in said
    assert "56 arrays loaded" in said
    said = invoke("certify", TINY, "--target", out, *options)
    assert "pass, at a tolerance of 2e-05" in said
    saved = json.loads((tmp_path / f"{out.name}.certificate.json").read_text())
    assert saved["target"]["sha256"]
    assert saved["stages"]["logits"]["max"] < 1e-5
    assert ("served" in saved["stages"]) == (to == "savedmodel")
    if to in ("npz", "timm", "huggingface", "keras_hub"):
        assert saved["target_read_by_reference"]["logits"]["max"] < 1e-12
    if to == "keras_hub":  # it computes the exact GELU, and the certificate holds what that costs
        assert 1e-4 < saved["numerics_difference"]["logits"]["max"] < 1e-2
        assert "numerics: the target computes otherwise" in invoke("certify", TINY, "--target", out, code=1)
    before = out.stat().st_mtime_ns
    assert "exists already" in invoke("convert", TINY, "--to", to, "--out", out, code=2)
    assert out.stat().st_mtime_ns == before


def test_own_model_to_another_library_and_back(tmp_path):
    model = randomise(tiny(distillation=True))
    model.save(tmp_path / "own.keras")
    convert(tmp_path / "own.keras", "huggingface", tmp_path / "hf")
    convert(tmp_path / "hf", "keras", tmp_path / "back.keras")
    again = vit_keras.predictor.load_model(tmp_path / "back.keras")
    for first, second in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(first, second)
    convert(tmp_path / "own.keras", "keras", tmp_path / "larger.keras", image_size=48, classes=3)


@pytest.mark.parametrize(
    ("to", "out", "message"),
    [
        ("keras", "x.h5", "ends in .keras"),
        ("weights", "x.h5", "ends in .weights.h5"),
        ("npz", "x", "ends in .npz"),
        ("onnx", "x", "`to` must be one of"),
    ],
)
def test_names_that_do_not_fit_the_target(to, out, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert(TINY, to, tmp_path / out)


def test_release_goes_on_and_can_be_resumed(tmp_path, monkeypatch):
    shutil.copy(TINY, tmp_path / "good.npz")
    (tmp_path / "bad.npz").write_bytes(b"PK nothing")
    manifest = {
        "out": "released",
        "checkpoints": [
            {"name": "bad", "source": "bad.npz", "to": ["keras"]},
            {"name": "good", "source": "good.npz", "to": ["keras", "timm"]},
            {"name": "large", "source": "good.npz", "to": ["npz"], "image_size": 96},
        ],
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    said = invoke("release", tmp_path / "manifest.json", code=1)
    assert [line.split()[2] for line in said.splitlines()[1:] if line.strip()] == ["failed", "done", "done", "done"]
    assert "truncated" in said
    shutil.copy(TINY, tmp_path / "bad.npz")
    real = release.converter.convert
    monkeypatch.setattr(release.converter, "convert", lambda *a, **k: calls.append(a) or real(*a, **k))
    calls = []
    said = invoke("release", tmp_path / "manifest.json")
    assert [line.split()[2] for line in said.splitlines()[1:] if line.strip()] == ["done", "kept", "kept", "kept"]
    assert len(calls) == 1
    (tmp_path / "released/good/timm/config.json").write_text("{}")  # what was changed since is made anew
    assert "good        timm    done" in invoke("release", tmp_path / "manifest.json")
    manifest["checkpoints"][2]["image_size"] = 128
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert "large       npz     done" in invoke("release", tmp_path / "manifest.json")


def test_release_of_other_numerics_weights_and_saved_models(tmp_path):
    targets = ["keras_hub", "weights", "savedmodel"]
    entry = {"name": "a", "source": TINY, "to": targets, "accept_numerics": True, "format": "original"}
    (tmp_path / "manifest.json").write_text(json.dumps({"out": "released", "checkpoints": [entry]}))
    invoke("release", tmp_path / "manifest.json")
    (tmp_path / "released/a/weights.weights.h5").write_bytes(b"damaged since")
    said = invoke("release", tmp_path / "manifest.json")
    assert [line.split()[2] for line in said.splitlines()[1:] if line.strip()] == ["kept", "done", "kept"]


@pytest.mark.parametrize(
    "manifest",
    [
        {},
        {"out": "x", "checkpoints": [{}]},
        *({"out": "x", "checkpoints": [{"name": name, "source": "b", "to": []}]} for name in ("../a", "..", ".", "")),
        {"out": "x", "checkpoints": [{"name": "a", "source": "b", "to": ["keras"]}] * 2},
        {"out": "x", "checkpoints": [{"name": "a", "source": "b", "to": [[]]}]},
    ],
)
def test_manifests_that_are_none(manifest, tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert "expected" in invoke("release", tmp_path / "manifest.json", code=1)


def test_what_the_proof_cannot_read(tmp_path):
    (tmp_path / "x.txt").write_text("no")
    with pytest.raises(ValueError, match=r"Expected \.npz"):
        layouts.read_arrays(str(tmp_path / "x.txt"))
    with pytest.raises(ValueError, match="Expected a folder with"):
        layouts.read_arrays(str(tmp_path))
    with pytest.raises(ValueError, match="Expected the keys of "):
        layouts.layout_of({"foo": np.zeros(1)})
    with pytest.raises(CheckpointError):
        certificate.certify(str(tmp_path / "x.txt"))
    assert "there is no folder" in invoke("certify", TINY, "--out", tmp_path / "none" / "c.json", code=1)
