"""From image files to labels."""

import collections
import concurrent.futures
import dataclasses
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from scipy.special import softmax

from vit_keras import catalog, preprocessing, registry
from vit_keras import labels as label_sets
from vit_keras.checkpoints import fetch
from vit_keras.checkpoints.model import load_keras
from vit_keras.checks import as_int
from vit_keras.layers import AttentionPooling, TokenPooling, walk
from vit_keras.records import Weights


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One class of one image: its index, label and probability in 0..1."""

    index: int
    label: str
    probability: float


class Predictor:
    """A model with its preprocessing and labels.

    ```python
    predictor = Predictor("vit_b16.augreg_in21k_ft_in1k_384")
    for prediction in predictor("photo.png", top=3):
        print(prediction.label, prediction.probability)
    ```

    Args:
        model: a name of `vit_keras.list_weights` or `list_models`, whose weights are fetched if need be; a Keras model
            of this library; or the path of a `.keras` file, or of a checkpoint or folder that
            `vit_keras.from_checkpoint` reads.
        labels: name of each class; or the name of a label set, or the path of a text file with a name on each line.
            None (default): those that the weights are known to have; ImageNet's, in the
            original order, for 1,000 or 21,843 classes of an `.npz`; else the indices.
        image_size: height and width in pixels to which images are resized. None (default): the model's own, or for a
            model of any size the one whose position table it holds.
        **options: with a name, arguments of `vit_keras.create`; with a checkpoint, of `vit_keras.from_checkpoint`.

    Raises:
        CheckpointError: the file cannot be fetched or read as a model.
        ValueError: the model is no classifier of images, it does not take this image size, or the number of labels
            is not its number of classes.
    """

    def __init__(
        self,
        model: keras.Model | str | os.PathLike,
        labels: Sequence[str] | str | None = None,
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
        if any(isinstance(layer, (keras.layers.Rescaling, keras.layers.Normalization)) for layer in walk(model)):
            warnings.warn(
                f"Model {model.name!r} scales pixels itself, and Predictor scales them as its weights expect: together "
                "that is twice. Use the model without the scaling layer.",
                stacklevel=2,
            )
        self.image_size = preprocessing.image_size_of(model, image_size)
        self.preprocessing = dataclasses.replace(preprocessing.of(model), size=self.image_size)
        classes = model.output_shape[-1]
        given = label_sets.read(labels) if isinstance(labels, str) else labels
        names = given if given is not None else known_labels(model) or range(classes)
        if len(names) != classes:
            raise ValueError(f"The model has {classes} classes. Received: {len(names)} labels")
        self.labels = [str(name) for name in names]

    def __call__(self, image: Any, top: int = 5) -> list[Prediction]:
        """The most probable classes of one image: a path, file object, Pillow image or array (H, W, C) in 0..255."""
        return next(self.stream([image], top=top, batch_size=1))

    def stream(self, images: Iterable[Any], top: int = 5, batch_size: int = 8) -> Iterator[list[Prediction]]:
        """The most probable classes of each image, in order.

        Images are read and resized by other threads while the model computes a batch of `batch_size`; the last one is
        filled up, so that the model is compiled for one shape.
        """
        count = 2 * as_int(batch_size, "batch_size")
        return self.stream_prepared(ahead(self.prepare, images, count), as_int(top, "top"), batch_size)

    def stream_prepared(
        self, images: Iterable[np.ndarray], top: int = 5, batch_size: int = 8
    ) -> Iterator[list[Prediction]]:
        """As `stream`, for images that went through `prepare`."""
        images = iter(images)
        while batch := list(itertools.islice(images, batch_size)):
            filled = np.stack(batch + batch[-1:] * (batch_size - len(batch)))
            preprocessing.warn_of_inputs(filled, self.preprocessing, stacklevel=3)
            outputs = keras.ops.convert_to_numpy(self.model.predict_on_batch(filled))
            yield from decode_predictions(outputs[: len(batch)], top, self.labels, self.activation)

    def prepare(self, image: Any) -> np.ndarray:
        """One image as the model takes it, float32 (H, W, C).

        Raises:
            preprocessing.ImageError: it is not an image that can be read.
        """
        pixels = image if isinstance(image, np.ndarray) else preprocessing.read_image(image)
        channels = self.model.input_shape[-1]
        if channels == 1 and pixels.ndim == 3 and pixels.shape[-1] == 3:
            pixels = preprocessing.to_grey(pixels)
        if pixels.ndim != 3 or pixels.shape[-1] != channels:
            raise preprocessing.ImageError(f"Expected an image (H, W, {channels}). Received: shape {pixels.shape}")
        if not np.isfinite(pixels).all():
            raise preprocessing.ImageError("Expected an image of finite values. Received: NaN or infinity")
        return preprocessing.preprocess(pixels, rule=self.preprocessing)


def ahead(function: Callable[[Any], Any], items: Iterable[Any], count: int) -> Iterator[Any]:
    """`map` whose next `count` results are computed by other threads; no more items are taken than that."""
    waiting: collections.deque = collections.deque()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def decode_predictions(
    outputs: Any, top: int = 5, labels: Sequence[str] | str | None = None, activation: str = "linear"
) -> list[list[Prediction]]:
    """The most probable classes of each row of a classifier's outputs.

    ```python
    decode_predictions(model.predict(images), top=3)[0][0].label
    ```

    Args:
        outputs: (B, classes), logits.
        top: how many classes, most probable first. Default 5.
        labels: name of each class, or name of a label set or a file. None (default): ImageNet-1k's for 1,000 classes,
            -21k's for 21,843, else the index.
        activation: what the outputs went through already: `"linear"` (default, nothing), `"softmax"` or `"sigmoid"`.

    Returns:
        `Prediction`s for each row.

    Raises:
        ValueError: the outputs are not (B, classes), or the number of labels is not that of classes.
    """
    as_int(top, "top")
    outputs = keras.ops.convert_to_numpy(outputs).astype("float32")
    if outputs.ndim != 2:
        raise ValueError(f"Expected outputs of shape (B, classes). Received: shape {outputs.shape}")
    classes = outputs.shape[1]
    assumed = label_sets.ASSUMED.get(classes)
    given = label_sets.read(labels) if isinstance(labels, str) else labels
    names = given if given is not None else label_sets.load(assumed) if assumed else range(classes)
    if len(names) != classes:
        raise ValueError(f"The outputs have {classes} classes. Received: {len(names)} labels")
    probabilities = softmax(outputs, axis=-1) if activation == "linear" else outputs
    order = np.argsort(-probabilities, axis=-1, kind="stable")[:, :top]
    return [
        [Prediction(int(index), str(names[index]), float(row[index])) for index in indices]
        for row, indices in zip(probabilities, order)
    ]


def known_labels(model: keras.Model) -> list[str] | None:
    """The labels that a model's weights are known to have, or taken to have; None if there are none.

    Weights in the original layout with 1,000 or 21,843 classes are taken for ImageNet's.
    """
    classes = model.output_shape[-1]
    if _last_layer(model)[0].name != "head":  # a user's own in its place
        return None
    for record in map(Weights.from_dict, preprocessing.records(model)):
        assumed = label_sets.ASSUMED.get(classes) if record.head else None
        found = label_sets.of(record.labels or assumed, classes)
        if found:
            return found
    return None


def output_activation(model: keras.Model) -> str:
    """Activation of a classifier's outputs: `"linear"`, `"softmax"` or `"sigmoid"`.

    Raises:
        ValueError: the model is not one that gives a score a class for images.
    """
    if not hasattr(model, "outputs"):
        raise ValueError(f"Expected a functional model. Received: {model.name!r}, which has no inputs and outputs yet")
    if len(model.outputs) != 1 or len(model.inputs) != 1 or len(model.output_shape) != 2 or len(model.input_shape) != 4:
        raise ValueError(
            f"Expected a model with one input and one output (B, classes). Received: {model.name!r} with outputs "
            f"{model.output_shape}"
        )
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


def load_model(model: str | os.PathLike, **options: Any) -> keras.Model:
    """Load a `.keras` file (in safe mode), build the model of a checkpoint, or create one by name.

    Raises:
        CheckpointError: the file is missing, neither of the two, or cannot be fetched.
        ValueError: there is no model or no weights of this name.
    """
    name = os.fspath(model)
    if name.startswith("augreg/") and not os.path.exists(name):
        name = f"{catalog.augreg_row(name.removeprefix('augreg/')).variant}.{name}"
    variant, _, tag = name.partition(".")
    if variant in registry.VARIANTS and (not tag or catalog.knows(variant, tag)):
        return registry.create(name, **options)
    if "://" in name:
        return registry.from_checkpoint(fetch(name), **options)
    if not name.endswith(".keras"):
        is_name = not os.path.exists(name) and not name.endswith(".npz") and os.sep not in name
        return (registry.create if is_name else registry.from_checkpoint)(name, **options)
    if options:
        raise ValueError(f"A .keras file is loaded as it was saved; {', '.join(options)} cannot change it.")
    return load_keras(name)
