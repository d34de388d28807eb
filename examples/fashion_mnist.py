"""How `vit_mini.fashion_mnist`, the weights in the wheel, were trained: the recipe, from the data to the `.npz`.

```bash
apt-get install dataset-fashion-mnist     # Debian's copy of the complete set, MIT licence
python examples/fashion_mnist.py          # about an hour on two CPU cores
```

Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747): 60,000 training and 10,000 test images of 28x28 grey pixels, ten
classes of clothing. The model sees them as RGB. All 60,000 are trained on, for a number of epochs fixed beforehand;
the test images are looked at once, at the end. An interrupted run goes on with its last epoch when it is started again.
"""

import argparse
import gzip
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import vit_keras

FOLDER = Path("/usr/share/datasets/fashion-mnist")
BATCH, RATE, DECAY, SMOOTHING, DROP_PATH, SHIFT = 64, 1e-3, 0.05, 0.1, 0.0, 2


def read_idx(path: Path) -> np.ndarray:
    """An array of the MNIST family's IDX format, unsigned bytes: LeCun's file format, 4 bytes a dimension."""
    data = gzip.decompress(path.read_bytes())
    ndim = data[3]
    shape = np.frombuffer(data, ">i4", ndim, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def load(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 28, 28, 3) uint8 and labels (N,) of `"train"` or `"t10k"`."""
    grey = read_idx(folder / f"{part}-images-idx3-ubyte.gz")
    return np.repeat(grey[..., None], 3, axis=-1), read_idx(folder / f"{part}-labels-idx1-ubyte.gz").astype(np.int64)


def augment(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Images flipped with probability 1/2 and shifted by up to `SHIFT` pixels, in [-1, 1]; one-hot labels."""

    def one(image: tf.Tensor) -> tf.Tensor:
        padded = tf.pad(image, [[SHIFT, SHIFT], [SHIFT, SHIFT], [0, 0]])
        return tf.image.random_flip_left_right(tf.image.random_crop(padded, (28, 28, 3)))

    images = tf.map_fn(one, images)
    return vit_keras.vit.preprocess_inputs(images), tf.one_hot(labels, 10)


def batches(x: np.ndarray, y: np.ndarray) -> tf.data.Dataset:
    """Shuffled, augmented batches, one pass."""
    data = tf.data.Dataset.from_tensor_slices((x[..., :1], y)).shuffle(len(x)).batch(BATCH, drop_remainder=True)
    grey_to_rgb = lambda images, labels: (tf.repeat(images, 3, axis=-1), labels)  # noqa: E731
    return data.map(grey_to_rgb).map(augment, num_parallel_calls=tf.data.AUTOTUNE).prefetch(2)


def train(x: np.ndarray, y: np.ndarray, epochs: int, folder: Path) -> keras.Model:
    """AdamW, cosine schedule with warm-up over the first twentieth, label smoothing, gradient clipping."""
    model = vit_keras.vit.vit_mini(pretrained=False, drop_path=DROP_PATH)
    steps = epochs * (len(x) // BATCH)
    rate = keras.optimizers.schedules.CosineDecay(0.0, steps, warmup_target=RATE, warmup_steps=steps // 20)
    optimizer = keras.optimizers.AdamW(rate, weight_decay=DECAY, global_clipnorm=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta", "pos_embedding", "cls"])
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=SMOOTHING)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=True)
    resume = keras.callbacks.BackupAndRestore(folder / "backup")
    model.fit(batches(x, y), epochs=epochs, callbacks=[resume], verbose=1 if sys.stdout.isatty() else 2)
    return model


def accuracy(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    """Share of images whose most probable class is right."""
    logits = model.predict(vit_keras.vit.preprocess_inputs(x), batch_size=500, verbose=0)
    return float(np.mean(np.argmax(logits, axis=-1) == y))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder of the four *-ubyte.gz files")
    parser.add_argument("--out", type=Path, default=Path("fashion_mnist_output"), help="folder of the results")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if not (arguments.data / "train-images-idx3-ubyte.gz").exists():
        parser.error(f"{arguments.data} holds no Fashion-MNIST; `apt-get install dataset-fashion-mnist` or pass --data")
    keras.utils.set_random_seed(arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)

    start = time.monotonic()
    model = train(*load(arguments.data, "train"), arguments.epochs, arguments.out)
    minutes = (time.monotonic() - start) / 60

    path = arguments.out / "vit_mini.fashion_mnist.npz"
    vit_keras.save_npz(model, path)
    reloaded = vit_keras.from_checkpoint(path)
    images, labels = load(arguments.data, "t10k")
    print(f"Test accuracy: {accuracy(reloaded, images, labels):.2%} of {len(images):,} images")
    print(f"{model.count_params():,} parameters, {path.stat().st_size / 1e6:.2f} MB, {minutes:.0f} minutes: {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
