"""Files read for the proof by NumPy, h5py and safetensors themselves, and which layout their keys are of."""

import io
import json
import os
import zipfile
from collections.abc import Mapping

import numpy as np


def read_arrays(path: str) -> dict[str, np.ndarray]:
    """Every array of a file or folder, under its own key; those of pre-training codes without what wraps the encoder.

    Args:
        path: an `.npz`, `.safetensors`, HDF5, `.keras` or PyTorch file, or a folder with `model.safetensors` or
            keras-hub's `model.weights.h5` and `task.weights.h5` (whose keys get `task/` in front).

    Raises:
        ValueError: it is none of these.
    """
    if os.path.isdir(path):
        return _read_folder(path)
    if path.endswith(".npz"):
        with np.load(path, allow_pickle=False) as file:
            return {key: _widened(file[key]) for key in file.files}
    if path.endswith(".safetensors"):
        from safetensors.numpy import load_file

        return load_file(path)
    if path.endswith((".h5", ".hdf5")):
        return _read_hdf5(path)
    if path.endswith(".keras"):
        with zipfile.ZipFile(path) as archive:
            return _read_hdf5(io.BytesIO(archive.read("model.weights.h5")))
    if path.endswith((".pt", ".pth", ".bin")):
        return _read_torch(path)
    raise ValueError(f"Expected .npz, .safetensors, .h5, .pt, .pth, .bin or a folder that holds one. Received: {path}")


def _widened(array: np.ndarray) -> np.ndarray:
    """bfloat16, which `.npz` holds as two bytes of nothing, are the upper bytes of float32."""
    if array.dtype != np.dtype("V2"):
        return array
    return (np.ascontiguousarray(array).view("<u2").astype("<u4") << 16).view("<f4")


def _read_folder(path: str) -> dict[str, np.ndarray]:
    index = os.path.join(path, "model.safetensors.index.json")
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
        return {key: array for name in names for key, array in read_arrays(os.path.join(path, name)).items()}
    for name in ("model.safetensors", "model.weights.h5", "pytorch_model.bin"):
        if os.path.isfile(os.path.join(path, name)):
            arrays = read_arrays(os.path.join(path, name))
            task = os.path.join(path, "task.weights.h5")
            if name == "model.weights.h5" and os.path.isfile(task):
                arrays |= {f"task/{key}": value for key, value in _read_hdf5(task).items()}
            return arrays
    raise ValueError(f"Expected a folder with model.safetensors or model.weights.h5. Received: {path}")


def _read_hdf5(path: str | io.BytesIO) -> dict[str, np.ndarray]:
    import h5py

    arrays: dict[str, np.ndarray] = {}
    with h5py.File(path, "r") as file:
        file.visititems(lambda key, item: arrays.update({key: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return arrays


def _read_torch(path: str) -> dict[str, np.ndarray]:
    import torch

    state = torch.load(path, map_location="cpu", weights_only=True)
    for wrapper in ("model", "state_dict", "teacher"):
        state = state.get(wrapper, state)
    return {key: value.float().numpy() for key, value in state.items()}


def layout_of(keys: Mapping[str, np.ndarray]) -> str:
    """The layout of `conversion.reference.LAYOUTS` whose keys these are.

    Raises:
        ValueError: they are of none.
    """
    signs = {
        "vit_keras_legacy": "class_token",  # before the original, whose names it has inside its own
        "original": "Transformer/",
        "huggingface": "patch_embeddings.projection.",
        "timm": "patch_embed.proj.",
        "keras_hub": "vi_t_encoder/",
    }
    for layout, sign in signs.items():
        if any(sign in key for key in keys):
            return layout
    raise ValueError(f"Expected the keys of {', '.join(signs)}. Received: {', '.join(sorted(keys)[:4])}")
