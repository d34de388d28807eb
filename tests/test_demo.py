"""The README's first command, as a user runs it."""

import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.mark.slow
def test_demo_reaches_its_mark(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--out", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Held-out accuracy: 9" in result.stdout
    assert (tmp_path / "out" / "digits.keras").exists()


def test_demo_runs_from_end_to_end(tmp_path):
    """One epoch: everything but the accuracy."""
    command = [sys.executable, str(ROOT / "examples" / "digits.py"), "--out", str(tmp_path / "out"), "--epochs", "1"]
    command += ["--fine-tune-epochs", "1"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr  # one epoch misses the mark, and the demo says so
    assert "A fresh process loaded the saved model and named" in result.stdout
    assert re.search(r"vit_mini pretrained: \d+\.\d+%.*\n  vit_mini from scratch: \d+\.\d+%", result.stdout)
    assert len(list((tmp_path / "out" / "held_out").glob("*.png"))) == 20
