"""Files of arrays: `.npz`, `.safetensors`, HDF5 (`.h5`, `.weights.h5`), Keras' `.keras`, PyTorch's; and folders.

Whatever the kind, arrays are read one at a time and nothing in a file is run.
"""

import dataclasses
import io
import json
import os
import re
import zipfile
from collections.abc import Mapping
from typing import Any

from vit_keras.checkpoints.arrays import (
    CheckpointError,
    Entry,
    from_mapping,
    read_errors,
    what_it_is,
    zip_entries,
)
from vit_keras.checkpoints.kinds import hdf5_entries, safetensors_entries, torch_entries

CONFIG = "config.json"
# Further JSON files: Hugging Face's, and two of keras-hub's.
BESIDE_CONFIG = PROCESSOR, TASK_CONFIG, IMAGE_CONVERTER = "preprocessor_config", "task", "image_converter"
MOST_CONFIG_BYTES = 16 * 2**20  # ImageNet-21k's 21,843 names take 1 MB
# What a folder of Hugging Face, timm or keras-hub holds, in the order in which it is looked for.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model.weights.h5",
    "pytorch_model.bin",
)
TASK = "task/"  # before keys of keras-hub's `task.weights.h5`, which lies beside `model.weights.h5`
KINDS = "Expected an .npz, .safetensors, .h5, .keras, .pt, .pth or .bin file"


@dataclasses.dataclass(frozen=True)
class Opened:
    """An opened file.

    Args:
        name: its name, without folders.
        entries: key → lazy array.
        config: what `config.json` beside it says, empty without one.
        folder: where it lies, None for a mapping.
    """

    name: str
    entries: dict[str, Entry]
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    folder: str | None = None


def open_file(source: str | os.PathLike | Mapping[str, Any]) -> Opened:
    """Open a file of arrays, a folder that holds one, or a mapping.

    Args:
        source: path, or a mapping from key to array.

    Raises:
        CheckpointError: the source is missing, empty, of no known kind, truncated, pickled, or holds what are no
            numbers.
    """
    if isinstance(source, Mapping):
        return Opened("the checkpoint", from_mapping(source))
    path = os.path.abspath(os.fspath(source))
    name = os.path.basename(path)
    if os.path.isdir(path):
        path = _weights_in(path)
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}: there is no such file. {KINDS}.")
    folder = os.path.dirname(path)
    config = read_config(folder)
    if path.endswith(".index.json"):
        return Opened(name, _sharded(path), config, folder)
    entries = _entries(path)
    task = os.path.join(folder, "task.weights.h5")
    if os.path.basename(path) == "model.weights.h5" and os.path.isfile(task):
        entries |= {TASK + key: entry for key, entry in hdf5_entries(task, task).items()}
    return Opened(name, entries, config or _keras_config(path), folder)


def _keras_config(path: str) -> dict[str, Any]:
    """What the architecture inside a whole model of Keras says of its attention; empty for any other file."""
    text = ""
    with read_errors(path, "the architecture"):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                info = archive.getinfo(CONFIG) if CONFIG in archive.namelist() else None
                if info and info.file_size <= MOST_CONFIG_BYTES:
                    text = archive.read(info).decode()
        elif path.endswith(".h5"):
            import h5py

            with h5py.File(path, "r") as file:
                text = str(file.attrs.get("model_config", ""))
    found = re.search(r'"num_heads": (\d{1,4})\b', text)
    return {"num_heads": int(found[1])} if found else {}


def read_config(folder: str) -> dict[str, Any]:
    """`config.json` of a folder, and in it, under their names, `BESIDE_CONFIG`; empty when there is none.

    Raises:
        CheckpointError: one is no JSON object, or too large to be a configuration.
    """
    if not os.path.isfile(os.path.join(folder, CONFIG)):
        return {}
    config = read_json(os.path.join(folder, CONFIG))
    for name in BESIDE_CONFIG:
        path = os.path.join(folder, f"{name}.json")
        if os.path.isfile(path):
            config[name] = read_json(path)
    return config


def read_json(path: str) -> dict[str, Any]:
    """A JSON object of a bounded size from a file."""
    try:
        if os.path.getsize(path) > MOST_CONFIG_BYTES:
            raise ValueError(f"it is larger than {MOST_CONFIG_BYTES:,} bytes")
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
        if not isinstance(value, dict):
            raise ValueError("it holds no JSON object")
        return value
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from None


def _weights_in(folder: str) -> str:
    for name in WEIGHT_FILES:
        if os.path.isfile(os.path.join(folder, name)):
            return os.path.join(folder, name)
    raise CheckpointError(
        f"{folder}: this is a folder without {', '.join(WEIGHT_FILES[:-1])} or {WEIGHT_FILES[-1]}. {KINDS}, or a "
        "folder that holds one of these."
    )


def _entries(path: str) -> dict[str, Entry]:
    try:
        with open(path, "rb") as file:
            start = file.read(16)
    except OSError as error:
        raise CheckpointError(f"{path}: the file cannot be read ({error}).") from error
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return hdf5_entries(path, path)
    if start.startswith(b"PK"):
        return _zip_entries(path)
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < os.path.getsize(path):
        return safetensors_entries(path)
    if start.startswith(b"\x80") and path.endswith((".pt", ".pth", ".bin")):
        return torch_entries(path)
    raise CheckpointError(f"{path}: {what_it_is(path)}. {KINDS}.")


def _zip_entries(path: str) -> dict[str, Entry]:
    try:
        archive = zipfile.ZipFile(path)
    except OSError as error:
        raise CheckpointError(f"{path}: the file cannot be read ({error}).") from error
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError) as error:
        raise CheckpointError(f"{path}: {what_it_is(path)} ({error}). {KINDS}.") from None
    names = archive.namelist()
    if any(name.endswith("/data.pkl") for name in names):
        return torch_entries(path)
    if "model.weights.h5" in names:
        with read_errors(path, "model.weights.h5"):
            info = archive.getinfo("model.weights.h5")
            if info.file_size > 4 * os.path.getsize(path):  # Keras stores it uncompressed
                raise ValueError(f"it claims {info.file_size:,} bytes in a file of {os.path.getsize(path):,}")
            content = archive.read("model.weights.h5")
        return hdf5_entries(path, io.BytesIO(content))
    return zip_entries(path, archive)


def _sharded(path: str) -> dict[str, Entry]:
    """The entries of a checkpoint in several `.safetensors` files that an index lists."""
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(f"{path}: expected a `weight_map` from keys to file names.")
    entries: dict[str, Entry] = {}
    for name in sorted(set(files.values())):
        if os.path.basename(name) != name:
            raise CheckpointError(f"{path}: {name!r} does not lie beside it, and is refused.")
        part = os.path.join(os.path.dirname(path), name)
        if not os.path.isfile(part):
            raise CheckpointError(f"{part}: there is no such file, which {os.path.basename(path)} names.")
        entries.update(_entries(part))
    missing = files.keys() - entries.keys()
    if missing:
        raise CheckpointError(f"{path}: its files lack {len(missing)} arrays that it lists, such as {min(missing)}.")
    return entries
