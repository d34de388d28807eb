"""Shared by all tests: golden files, tiny models, fresh processes."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

# Before TensorFlow is imported: quiet, and two logical CPU devices for the tests of distribution come in subprocesses.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Two test processes share the machine: more threads in each only get in each other's way.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import keras
import numpy as np
import pytest

from vit_keras import hybrid, vit

gc.freeze()  # what TensorFlow and Keras hold lives as long as the process, and need not be looked through again

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"

TINY = {
    "image_size": 32,
    "patch_size": 8,
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "name": "tiny",
    "mlp_dim": 64,
    "classes": 5,
}
TINY_STEM = {"stem_layers": (1, 1), "width_factor": 0.5, "patch_size": 1}


def tiny(**changes):
    """A ViT of 2 blocks for 32-pixel images: 4x4 patches of 8 pixels, width 32."""
    return vit.build_model(**{**TINY, **changes})


def tiny_hybrid(**changes):
    """As `tiny`, on a stem of two stages (1/8 of the image)."""
    return hybrid.build_model(**{**TINY, **TINY_STEM, **changes})


def randomise(model, seed=0):
    """Give every weight random values, so that nothing is zero or equal by initialisation."""
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        variable.assign(0.3 * rng.normal(size=variable.shape))
    return model


def images(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, size=shape or (2, 32, 32, 3)).astype("float32")


def golden(name):
    return dict(np.load(GOLDEN / f"{name}.npz"))


def golden_model(name, **changes):
    """The model of a golden case, from its recorded config, without its weights."""
    record = json.loads((GOLDEN / f"{name}.json").read_text())
    config = record["config"]
    classifier = config["classifier"]
    arguments = {
        "image_size": record["image_shape"][1:3],
        "patch_size": config["patches"]["size"],
        "num_layers": config["transformer"]["num_layers"],
        "hidden_size": config["hidden_size"],
        "num_heads": config["transformer"]["num_heads"],
        "name": name,
        "mlp_dim": config["transformer"]["mlp_dim"],
        "classes": record["num_classes"],
        "representation_size": config["representation_size"],
        "pooling": classifier if classifier in ("token", "gap") else None,
        "class_token": classifier.startswith("token"),
        "remainder": "crop" if name == "vit_cropped" else "error",
        **changes,
    }
    if "resnet" not in config:
        return vit.build_model(**arguments)
    stem = {"stem_layers": config["resnet"]["num_layers"], "width_factor": config["resnet"]["width_factor"]}
    return hybrid.build_model(**{**stem, **arguments})


def run_python(code, *arguments, **environment):
    """Run code in a fresh process with warnings as they are; return its output, or fail with it."""
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(autouse=True)
def _fresh_keras_state():
    yield
    keras.config.set_dtype_policy("float32")
    # Names begin anew. Not with free_memory: a collection after each test was a fifth of the time of all.
    keras.utils.clear_session(free_memory=False)
