"""Vision Transformers on real handwritten digits: from scratch, saved, loaded elsewhere; then one pretrained.

Run by `make demo`; takes a few minutes on two cores. The data are scikit-learn's copy of the UCI digits: 1,797 grey
images of 8x8 pixels, of which a fifth is held out. The second part fine-tunes `vit_mini`, whose weights are in the
package (clothes, Fashion-MNIST, 28x28 pixels), at 32x32 pixels, and trains the same model from scratch beside it.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import vit_keras
from vit_keras import preprocessing, vit

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def load_data() -> tuple[np.ndarray, ...]:
    """Train and held-out images (N, 8, 8, 3) as uint8, then their labels."""
    digits = load_digits()
    grey = np.round(digits.images * (255 / 16)).astype(np.uint8)  # the 17 grey levels of the data
    images = np.repeat(grey[..., None], 3, axis=-1)
    return train_test_split(images, digits.target, test_size=0.2, random_state=0, stratify=digits.target)


def build() -> keras.Model:
    """4 blocks of width 64 on 4x4 patches of 2 pixels."""
    return vit.build_model(
        image_size=8,
        patch_size=2,
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        name="vit-digits",
        mlp_dim=128,
        classes=10,
    )


def train(model: keras.Model, x: np.ndarray, y: np.ndarray, epochs: int, rate: float = 2e-3) -> None:
    """AdamW with a cosine schedule; each epoch sees the digits shifted by up to half a pixel of theirs."""
    batch = 64
    steps = epochs * -(-len(x) // batch)
    rate = keras.optimizers.schedules.CosineDecay(0.0, steps, warmup_target=rate, warmup_steps=steps // 10)
    model.compile(
        keras.optimizers.AdamW(rate, weight_decay=0.05),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # compiling takes longer than these few steps
    )
    augment = keras.Sequential(
        [keras.Input(x.shape[1:]), keras.layers.RandomTranslation(0.06, 0.06, "constant", fill_value=-1.0)]
    )
    data = tf_data(x, y, batch).map(lambda images, labels: (augment(images, training=True), labels))
    model.fit(data, epochs=epochs, verbose=1 if sys.stdout.isatty() else 2)


def tf_data(x: np.ndarray, y: np.ndarray, batch: int):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=0).batch(batch)


def write_pictures(images: np.ndarray, labels: np.ndarray, folder: Path) -> list[Path]:
    """Held-out digits as PNG files named after what they show."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{index:02d}_{NAMES[label]}.png" for index, label in enumerate(labels)]
    for path, image in zip(paths, images):
        Image.fromarray(image[..., 0]).save(path)
    return paths


def predict_with_cli(model: Path, labels: Path, pictures: list[Path]) -> list[str]:
    """The best label of each picture, from the console command in a fresh process."""
    command = [sys.executable, "-m", "vit_keras_cli", "predict", *map(str, pictures)]
    command += ["--weights", str(model), "--labels", str(labels), "--top", "1", "--json"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [json.loads(line)["predictions"][0]["label"] for line in lines]


def fine_tune(x_train: np.ndarray, y_train: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, epochs: int) -> None:
    """`vit_mini` on digits of 32x32 pixels, its position embeddings resized, against the same from scratch."""
    print(f"\nvit_mini at 32x32 pixels, {epochs} epochs: pretrained on clothes, and from scratch.", flush=True)
    results = {}
    for name, pretrained in (("pretrained", True), ("from scratch", False)):
        keras.utils.set_random_seed(0)
        model = vit_keras.vit.vit_mini(image_size=32, pretrained=pretrained, pretrained_top=False, classes=10)
        rule = preprocessing.of(model)
        train(model, preprocessing.preprocess(x_train, rule=rule), y_train, epochs, rate=1e-3)
        _, results[name] = model.evaluate(preprocessing.preprocess(x_test, rule=rule), y_test, verbose=0)
    for name, accuracy in results.items():
        print(f"  vit_mini {name}: {accuracy:.2%} of {len(x_test)} held-out digits")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder of all results")
    parser.add_argument("--epochs", type=int, default=40, help="of the model from scratch")
    parser.add_argument("--fine-tune-epochs", type=int, default=8, help="of vit_mini, each way; 0: without it")
    arguments = parser.parse_args()
    keras.utils.set_random_seed(0)
    arguments.out.mkdir(parents=True, exist_ok=True)

    x_train, x_test, y_train, y_test = load_data()
    print(f"Training a ViT from scratch on {len(x_train)} digits; {len(x_test)} are held out.", flush=True)
    model = build()
    train(model, preprocessing.preprocess_inputs(x_train), y_train, arguments.epochs)
    _, accuracy = model.evaluate(preprocessing.preprocess_inputs(x_test), y_test, verbose=0)

    saved, labels = arguments.out / "digits.keras", arguments.out / "labels.txt"
    model.save(saved)
    labels.write_text("\n".join(NAMES) + "\n")
    pictures = write_pictures(x_test[:20], y_test[:20], arguments.out / "held_out")
    found = predict_with_cli(saved, labels, pictures)
    right = sum(NAMES[label] == name for label, name in zip(y_test, found))

    print(f"\nHeld-out accuracy: {accuracy:.2%} of {len(x_test)} digits (95 % is the mark).")
    print(f"A fresh process loaded the saved model and named {right} of {len(pictures)} held-out PNG files right.")
    print(f"Model:    {saved}\nLabels:   {labels}\nPictures: {arguments.out / 'held_out'}")
    if arguments.fine_tune_epochs:
        fine_tune(x_train, y_train, x_test, y_test, arguments.fine_tune_epochs)
    print(f"\nTry it:   vit-keras predict {pictures[0]} --weights {saved} --labels {labels}")
    return 0 if accuracy >= 0.95 and right >= 0.9 * len(pictures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
