"""Certificates, conversions and releases: what is proven, what is refused, what goes on."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner

import vit_keras
from conversion import __main__ as command
from conversion import certificate, layouts, release
from tests.conftest import GOLDEN, golden, randomise, tiny
from tests.library.test_formats import PEERS, peer_arrays
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


@pytest.mark.parametrize("changes", [{"image_size": (96, 48)}, {"patch_size": 8}, {"patch_size": 32}, {"classes": 3}])
def test_surgery_agrees_with_the_reference(changes):
    result = certificate.certify(TINY, source_grid=(4, 4), **changes)
    assert result["verdict"] == "pass", result["stages"]
    assert changes.items() <= result["options"].items()


def test_a_wrong_conversion_fails():
    """A model whose query and key are exchanged in one block: the certificate names the block."""
    model = vit_keras.from_checkpoint(TINY)
    attention = model.get_layer("Transformer_encoderblock_1").attention
    query, key = (np.array(dense.kernel) for dense in (attention.query, attention.key))
    attention.query.kernel.assign(key)
    attention.key.kernel.assign(query[:, ::-1])
    found = certificate.keras_outputs(model, certificate.inputs(64, 64))
    checkpoint = vit_keras.checkpoints.open_checkpoint(TINY)
    expected = certificate.reference_outputs(TINY, checkpoint, certificate.inputs(64, 64), {})
    stages = certificate.compare(found, expected)
    assert stages["block_0"]["relative"] < certificate.TOLERANCE < stages["block_1"]["relative"]


@pytest.mark.parametrize("to", TARGETS)
def test_convert_to_every_target_and_certify(to, tmp_path):
    suffix = {"keras": ".keras", "weights": ".weights.h5", "npz": ".npz"}.get(to, "")
    out = tmp_path / f"out{suffix}"
    options = ["--accept-numerics"] if to == "keras_hub" else []
    said = invoke("convert", TINY, "--to", to, "--out", out, "--explain", *options)
    assert "cls → class_token/cls" in said
    assert "56 arrays loaded" in said
    if to in ("keras", "npz", "timm", "huggingface"):
        said = invoke("certify", TINY, "--target", out)
        assert "pass, at a tolerance of 2e-05" in said
        saved = json.loads((tmp_path / f"{out.name}.certificate.json").read_text())
        assert saved["target"]["sha256"]
        assert saved["stages"]["logits"]["max"] < 1e-5
    if to == "keras_hub":  # it computes the exact GELU, and the certificate holds what that costs
        invoke("certify", TINY, "--target", out, code=1)
        stages = json.loads((tmp_path / "out.certificate.json").read_text())["stages"]
        assert 1e-4 < stages["logits"]["max"] < 1e-2
    if to == "savedmodel":
        import tensorflow as tf

        expected = golden("vit_token_io")
        served = tf.saved_model.load(str(out))
        np.testing.assert_allclose(served.serve(expected["images"]), expected["logits"], atol=2e-5)
    if to == "weights":
        model = tiny(image_size=64, patch_size=16, num_layers=3, hidden_size=64, mlp_dim=128, classes=10)
        model.load_weights(out)
        expected = golden("vit_token_io")
        np.testing.assert_allclose(model(expected["images"]), expected["logits"], atol=2e-5)
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


@pytest.mark.parametrize(
    "manifest",
    [{}, {"out": "x", "checkpoints": [{}]}, {"out": "x", "checkpoints": [{"name": "../a", "source": "b", "to": []}]}],
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
