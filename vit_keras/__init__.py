"""Vision Transformers for Keras 3. Importing this registers every layer, so `keras.models.load_model` works."""

import importlib.util as _importlib_util
import os as _os

if _os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow" and not _importlib_util.find_spec("tensorflow"):
    raise ImportError(
        "vit_keras needs TensorFlow, which is not installed. Run `pip install 'vit-keras-zoo[tensorflow]'`, or "
        "'vit-keras-zoo[cpu]' for tensorflow-cpu; or set KERAS_BACKEND to jax or torch."
    )

from vit_keras import analysis as analysis
from vit_keras import checkpoints as checkpoints
from vit_keras import hybrid as hybrid
from vit_keras import layers as layers
from vit_keras import preprocessing as preprocessing
from vit_keras import vit as vit
from vit_keras.checkpoints import export_arrays as export_arrays
from vit_keras.checkpoints import load_weights_from as load_weights_from
from vit_keras.checkpoints import save_npz as save_npz
from vit_keras.predictor import Predictor as Predictor
from vit_keras.registry import create as create
from vit_keras.registry import from_checkpoint as from_checkpoint
from vit_keras.registry import list_models as list_models
