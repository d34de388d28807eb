"""Readers and writers of the kinds of files that hold arrays, beside `.npz`: HDF5, `.safetensors`, PyTorch's."""

import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vit_keras.checkpoints.arrays import (
    CheckpointError,
    Entry,
    checked,
    read_errors,
    refuse_inflation,
    replacing,
    value_of,
)


def hdf5_entries(path: str, file: Any) -> dict[str, Entry]:
    """Lazy entries of an HDF5 file: every data set under its path."""
    import h5py

    entries: dict[str, Entry] = {}
    claimed: list[int] = []

    def visit(key: str, item: Any) -> None:
        if not isinstance(item, h5py.Dataset):
            return
        if not isinstance(key, str):
            raise CheckpointError(f"{path}: {key!r} is no name. Expected UTF-8.")
        if item.external or item.is_virtual:
            raise CheckpointError(f"{path}: {key!r} lies in another file, which is refused.")
        if item.dtype.hasobject or item.dtype.names:
            raise CheckpointError(f"{path}: {key!r} holds {item.dtype}. Expected numbers.")
        if item.chunks is None and item.size * item.dtype.itemsize > opened.id.get_filesize():
            raise CheckpointError(f"{path}: {key!r} claims more bytes than the file has.")
        claimed.append(item.size * item.dtype.itemsize)
        refuse_inflation(path, opened.id.get_filesize(), sum(claimed))

        def read(key: str = key) -> np.ndarray:
            with read_errors(path, key):
                return np.asarray(opened[key][()])

        entries[key] = checked(key, Entry(tuple(item.shape), item.dtype, read), path)

    with read_errors(path, "the HDF5 structure"):
        opened = h5py.File(file, "r")
        opened.visititems(visit)
    return entries


SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


def safetensors_entries(path: str) -> dict[str, Entry]:
    import ml_dtypes  # TensorFlow, JAX and Keras bring it: NumPy's bfloat16

    safetensors = import_extra("safetensors", "convert")
    dtypes = {**SAFETENSORS_DTYPES, "BF16": ml_dtypes.bfloat16}
    entries = {}
    with read_errors(path, "the header"):
        opened = safetensors.safe_open(path, "numpy")
        for key in opened.keys():  # noqa: SIM118  (no dict)
            part = opened.get_slice(key)
            dtype = part.get_dtype()
            if dtype not in dtypes:
                raise CheckpointError(f"{path}: {key!r} holds {dtype}. Expected numbers of 8 to 64 bits.")

            def read(key: str = key) -> np.ndarray:
                with read_errors(path, key):
                    return opened.get_tensor(key)

            entries[key] = checked(key, Entry(tuple(part.get_shape()), np.dtype(dtypes[dtype]), read), path)
    return entries


def torch_entries(path: str) -> dict[str, Entry]:
    """A state dict saved by PyTorch, which alone reads its own pickles as data (`weights_only=True`)."""
    torch = import_extra("torch", "torch", f"{os.path.basename(path)} is a PyTorch file: ")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # its own message explains how to read the file unsafely
        raise CheckpointError(
            f"{path}: PyTorch cannot read it as data: it is damaged, or holds objects other than tensors, which could "
            "run code."
        ) from error
    found: dict[str, Entry] = {}
    for key, tensor in _tensors(torch, "", state, path):
        if key in found:
            raise CheckpointError(f"{path}: {key!r} stands twice.")
        with read_errors(path, key):
            array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
        found[key] = checked(key, Entry(array.shape, array.dtype, array.view), path)
    return found


_DEEPEST = 16  # folders inside folders; training code needs three


def _tensors(torch: Any, prefix: str, value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """The tensors of nested dicts under keys joined by "."; what stands beside them (epochs, arguments) is left."""
    if depth > _DEEPEST:
        raise CheckpointError(f"{path}: {prefix[:60]!r}… lies deeper than {_DEEPEST} dicts, as no weights do.")
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(torch, f"{prefix}.{key}" if prefix else str(key), item, path, depth + 1)
    elif isinstance(value, torch.Tensor):
        yield prefix, value


def import_extra(module: str, extra: str, before: str = "") -> Any:
    """An optional package, or an ImportError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(
            f"{before}this needs {module}, which is not installed: pip install 'vit-keras-zoo[{extra}]'"
        ) from None


def write_hdf5(path: str | os.PathLike, arrays: Mapping[str, Any]) -> None:
    """Write arrays or entries as HDF5 data sets; the path holds the whole file or what it held before."""
    import h5py

    with replacing(path) as temporary, h5py.File(temporary, "w") as file:
        for key, array in arrays.items():
            value = value_of(array)  # HDF5 has no bfloat16
            file.create_dataset(key, data=value.astype("float32") if value.dtype.name == "bfloat16" else value)


def write_safetensors(path: str | os.PathLike, arrays: Mapping[str, Any], metadata: dict[str, str]) -> None:
    """Write arrays or entries as `.safetensors`; the path holds the whole file or what it held before.

    One after the other: the safetensors package writes only what is in memory as a whole. The format is a JSON header
    behind its length, then the arrays (github.com/huggingface/safetensors, "Format").
    """
    names = {name: code for code, name in SAFETENSORS_DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for key, array in arrays.items():
        start, end = end, end + math.prod(array.shape) * array.dtype.itemsize
        header[key] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as temporary, open(temporary, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(value_of(array)).reshape(-1).view(np.uint8).data)
