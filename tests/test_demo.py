"""The README's first command, as a user runs it."""

import gzip
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT, golden


@pytest.mark.slow
def test_demo_reaches_its_mark(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Held-out accuracy: 9" in result.stdout
    pretrained, scratch = (
        float(re.search(rf"vit_mini {name}: (\d+\.\d+)%", result.stdout)[1]) for name in ("pretrained", "from scratch")
    )
    assert pretrained > scratch
    assert (tmp_path / "out" / "digits.keras").exists()


def test_demo_runs_from_end_to_end(tmp_path):
    """One epoch from scratch: all of that but the accuracy."""
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--out", str(tmp_path / "out"), "--epochs", "1"]
    command += ["--fine-tune-epochs", "0"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr  # one epoch misses the mark, and the demo says so
    assert "A fresh process loaded the saved model and named" in result.stdout
    assert len(list((tmp_path / "out" / "held_out").glob("*.png"))) == 20


@pytest.mark.slow
def test_the_recipe_of_vit_mini_runs(tmp_path):
    """One epoch on 200 images, twice: the second run finds the first one's end."""
    sample = golden("fashion_mnist_sample")
    for part in ("train", "t10k"):
        for name, array in (("images-idx3", sample["images"]), ("labels-idx1", sample["labels"])):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (tmp_path / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    command = [sys.executable, str(ROOT / "examples" / "fashion_mnist.py"), "--epochs", "1"]
    command += ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"Test accuracy: \d+\.\d+% of 200 images", result.stdout)
    assert (tmp_path / "out" / "vit_mini.fashion_mnist.npz").stat().st_size <= 1.5e6
    missing = subprocess.run([*command, "--data", str(tmp_path / "none")], capture_output=True, text=True, cwd=tmp_path)
    assert "holds no Fashion-MNIST" in missing.stderr
