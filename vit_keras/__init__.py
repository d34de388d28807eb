"""Vision Transformers for Keras 3. Importing this registers every layer, so `keras.models.load_model` works."""

try:
    import keras as _keras  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "tensorflow":
        raise
    raise ImportError(
        "vit_keras needs TensorFlow, which is not installed. Run `pip install 'vit-keras-zoo[tensorflow]'`, or "
        "'vit-keras-zoo[cpu]' for tensorflow-cpu; or set KERAS_BACKEND to jax or torch."
    ) from None

from vit_keras import analysis as analysis
from vit_keras import augreg as augreg
from vit_keras import catalog as catalog
from vit_keras import checkpoints as checkpoints
from vit_keras import hybrid as hybrid
from vit_keras import labels as labels
from vit_keras import layers as layers
from vit_keras import preprocessing as preprocessing
from vit_keras import records as records
from vit_keras import utils as utils
from vit_keras import vit as vit
from vit_keras.checkpoints import export_arrays as export_arrays
from vit_keras.checkpoints import load_weights_from as load_weights_from
from vit_keras.checkpoints import save_checkpoint as save_checkpoint
from vit_keras.checkpoints import save_npz as save_npz
from vit_keras.converter import convert as convert
from vit_keras.predictor import Predictor as Predictor
from vit_keras.predictor import decode_predictions as decode_predictions
from vit_keras.registry import create as create
from vit_keras.registry import from_checkpoint as from_checkpoint
from vit_keras.registry import list_models as list_models
from vit_keras.registry import list_weights as list_weights
