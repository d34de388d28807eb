"""From image files to labels."""

import dataclasses
import math
import os
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from scipy.special import softmax

from vit_keras import preprocessing, registry
from vit_keras.checkpoints import CheckpointError
from vit_keras.checks import as_pair
from vit_keras.layers import AttentionPooling, Bottleneck, GridTables, Patches, TokenPooling, walk


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One class of one image: its index, label and probability in 0..1."""

    index: int
    label: str
    probability: float


class Predictor:
    """A model with its preprocessing and labels.

    ```python
    predictor = Predictor("digits.keras", labels=["zero", "one", ...])
    for prediction in predictor("photo.png", top=3):
        print(prediction.label, prediction.probability)
    ```

    Args:
        model: a Keras model of this library, or the path of a `.keras` file or of an `.npz` checkpoint in the
            original layout.
        labels: name of each class; None (default) uses the indices.
        image_size: height and width in pixels to which images are resized. None (default): the model's own, or for a
            model of any size the one whose position table it holds.
        **options: with an `.npz`, arguments of `registry.from_checkpoint`.

    Raises:
        CheckpointError: the file cannot be read as a model.
        ValueError: the model is no classifier of RGB images, it does not take this image size, or the number of labels
            is not its number of classes.
    """

    def __init__(
        self,
        model: keras.Model | str | os.PathLike,
        labels: Sequence[str] | None = None,
        image_size: Any = None,
        **options: Any,
    ):
        if isinstance(model, keras.Model):
            if options:
                raise ValueError(f"A model is used as it is; {', '.join(options)} cannot change it.")
        else:
            if image_size is not None and not os.fspath(model).endswith(".keras"):
                options["image_size"] = image_size
            model = load_model(model, **options)
        self.model = model
        self.activation = output_activation(model)
        self.image_size = input_size(model, image_size)
        self.preprocessing = preprocessing.of(self.model)
        classes = self.model.output_shape[-1]
        if labels is not None and len(labels) != classes:
            raise ValueError(f"The model has {classes} classes. Received: {len(labels)} labels")
        self.labels = [str(label) for label in (range(classes) if labels is None else labels)]

    def __call__(self, image: Any, top: int = 5) -> list[Prediction]:
        """The most probable classes of one image: a path, file object, Pillow image or array (H, W, 3) in 0..255."""
        return next(self.stream([image], top=top))

    def stream(self, images: Iterable[Any], top: int = 5, batch_size: int = 8) -> Iterator[list[Prediction]]:
        """The most probable classes of each image, in order, computed in batches of `batch_size`."""
        return self.stream_prepared(map(self.prepare, images), top, batch_size)

    def stream_prepared(
        self, images: Iterable[np.ndarray], top: int = 5, batch_size: int = 8
    ) -> Iterator[list[Prediction]]:
        """As `stream`, for images that went through `prepare`."""
        batch: list[np.ndarray] = []
        for image in images:
            batch.append(image)
            if len(batch) == batch_size:
                yield from self._predict(batch, top)
                batch = []
        if batch:
            yield from self._predict(batch, top)

    def prepare(self, image: Any) -> np.ndarray:
        """One image as the model takes it, float32 (H, W, C).

        Raises:
            preprocessing.ImageError: it is not an image that can be read.
        """
        pixels = image if isinstance(image, np.ndarray) else preprocessing.read_image(image)
        if pixels.ndim != 3 or pixels.shape[-1] != 3:
            raise preprocessing.ImageError(f"An image array must be (H, W, 3). Received: shape {pixels.shape}")
        return preprocessing.preprocess(pixels, self.image_size, self.preprocessing)

    def _predict(self, batch: list[np.ndarray], top: int) -> Iterator[list[Prediction]]:
        outputs = keras.ops.convert_to_numpy(self.model.predict_on_batch(np.stack(batch)))
        for probabilities in softmax(outputs, axis=-1) if self.activation == "linear" else outputs:
            order = np.argsort(-probabilities, kind="stable")[:top]
            yield [Prediction(int(index), self.labels[index], float(probabilities[index])) for index in order]


def output_activation(model: keras.Model) -> str:
    """Activation of a classifier's outputs: `"linear"`, `"softmax"` or `"sigmoid"`.

    Raises:
        ValueError: the model is not one that gives a score a class for RGB images.
    """
    if len(model.outputs) != 1 or len(model.inputs) != 1 or len(model.output_shape) != 2:
        raise ValueError(
            f"Expected a model with one input and one output (B, classes). Received: {model.name!r} with outputs "
            f"{model.output_shape}"
        )
    if model.input_shape[-1] != 3:
        raise ValueError(f"Expected a model for RGB images (B, H, W, 3). Received: input shape {model.input_shape}")
    last, activation = _last_layer(model)
    if isinstance(last, (TokenPooling, AttentionPooling, keras.layers.LayerNormalization)) or last.name == "pre_logits":
        raise ValueError(f"Model {model.name!r} has no head: its outputs are features, not scores of classes.")
    if activation not in ("linear", "softmax", "sigmoid"):
        raise ValueError(
            f"Expected outputs that are logits or probabilities (linear, softmax or sigmoid). Received: {model.name!r} "
            f"with {activation!r}"
        )
    return activation


def _last_layer(model: keras.Model) -> tuple[keras.layers.Layer, str]:
    """The layer that computes a model's outputs, inside nested models too, and the activation they went through."""
    activation = "linear"
    for layer in reversed(model.layers):
        if isinstance(layer, keras.Model):
            inner, inner_activation = _last_layer(layer)
            return inner, inner_activation if activation == "linear" else activation
        if activation == "linear":
            activation = _activation_of(layer)
        if not isinstance(layer, (keras.layers.Softmax, keras.layers.Activation, keras.layers.Dropout)):
            break
    return layer, activation


def _activation_of(layer: keras.layers.Layer) -> str:
    if isinstance(layer, keras.layers.Softmax):
        return "softmax"
    activation = getattr(layer, "activation", None) or keras.activations.linear
    return getattr(activation, "__name__", str(activation))


def input_size(model: keras.Model, wanted: Any = None) -> tuple[int, int]:
    """Height and width of the images to give a model: `wanted` if it takes them, by default its own.

    Raises:
        ValueError: the model has another fixed size, or takes any size and has none of its own.
    """
    fixed = tuple(model.input_shape[1:3])
    if wanted is not None:
        wanted = as_pair(wanted, "image_size")
        if any(length not in (None, asked) for length, asked in zip(fixed, wanted)):
            raise ValueError(
                f"Model {model.name!r} takes images of height and width {fixed}. Received: image_size={wanted}. Build "
                "it at that size and load its weights, which resizes the position embeddings."
            )
        return wanted
    if None not in fixed:
        return fixed
    inner = list(walk(model))
    table = next((layer for layer in inner if isinstance(layer, GridTables) and layer.grid), None)
    if table is None:
        raise ValueError(f"Model {model.name!r} takes images of any size and has none of its own: pass image_size.")
    patch = next(layer.patch_size for layer in inner if isinstance(layer, Patches))
    stride = 4 if any(layer.name == "conv_root" for layer in inner) else 1
    stride *= math.prod(layer.strides for layer in inner if isinstance(layer, Bottleneck))
    return table.grid[0] * patch[0] * stride, table.grid[1] * patch[1] * stride


def load_model(path: str | os.PathLike, **options: Any) -> keras.Model:
    """Load a `.keras` file (in safe mode) or build the model of an `.npz` checkpoint.

    Raises:
        CheckpointError: the file is missing, or neither of the two.
    """
    path = os.fspath(path)
    if not path.endswith(".keras"):
        return registry.from_checkpoint(path, **options)
    if options:
        raise ValueError(f"A .keras file is loaded as it was saved; {', '.join(options)} cannot change it.")
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: there is no such file. Expected the path of a .keras model.")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path}: not a .keras file, or a truncated one; copy or download it again.")
    # A damaged archive can fail anywhere in Keras, HDF5 or the layers.
    try:
        return keras.saving.load_model(path, compile=False)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: not a Keras model that can be loaded ({reason})") from error
