"""Hostile and broken files, by the thousand: nothing but the project's own errors, and never a partly loaded model.

The seeds are fixed, so a failure can be run again by its number.
"""

import contextlib
import io
import json
import shutil
import struct
import warnings
import zipfile

import h5py
import numpy as np
import pytest

from tests.conftest import golden
from tests.library.test_formats import PEERS, TIMM_CONFIG, peer_arrays
from vit_keras import from_checkpoint, load_weights_from
from vit_keras.checkpoints import CheckpointError, kinds, open_checkpoint
from vit_keras.checkpoints.arrays import write_npz

# Of each format; the many are run by `pytest -m slow`.
SEEDS = [pytest.param(range(40), id="few"), pytest.param(range(40, 600), id="many", marks=pytest.mark.slow)]


def truncate(data, rng):
    return data[: rng.integers(len(data))]


def flip(data, rng):
    changed = bytearray(data)
    for place in rng.integers(len(data), size=rng.integers(1, 9)):
        changed[place] = rng.integers(256)
    return bytes(changed)


def flip_the_head(data, rng):
    """In the first bytes, where structures lie."""
    changed = bytearray(data)
    for place in rng.integers(min(len(data), 4096), size=rng.integers(1, 5)):
        changed[place] = rng.integers(256)
    return bytes(changed)


def flip_the_tail(data, rng):
    changed = bytearray(data)
    for place in len(data) - 1 - rng.integers(min(len(data), 4096), size=rng.integers(1, 5)):
        changed[place] = rng.integers(256)
    return bytes(changed)


def overwrite(data, rng):
    start, length = rng.integers(len(data)), rng.integers(1, 64)
    return data[:start] + rng.bytes(length) + data[start + length :]


def cut_out(data, rng):
    start, length = rng.integers(len(data)), rng.integers(1, 64)
    return data[:start] + data[start + length :]


def join(data, rng):
    return data[: rng.integers(len(data))] + data[rng.integers(len(data)) :]


BYTES = (truncate, flip, flip_the_head, flip_the_tail, overwrite, cut_out, join)


def drop(arrays, key, rng):
    del arrays[key]


def rename(arrays, key, rng):
    arrays[key[: rng.integers(len(key))] + rng.choice(["x", "0", "/", "..", "é", ""])] = arrays.pop(key)


def transpose(arrays, key, rng):
    arrays[key] = arrays[key].T


def flatten(arrays, key, rng):
    arrays[key] = arrays[key].reshape(-1)


def exchange(arrays, key, rng):
    other = rng.choice(sorted(arrays))
    arrays[key], arrays[other] = arrays[other], arrays[key]


def spoil(arrays, key, rng):
    arrays[key] = arrays[key].copy()
    arrays[key].reshape(-1)[rng.integers(arrays[key].size)] = rng.choice([np.nan, np.inf, -np.inf])


def retype(arrays, key, rng):
    arrays[key] = np.zeros(arrays[key].shape, rng.choice(["int32", "bool", "float16", "float64", "uint8"]))


def shorten(arrays, key, rng):
    arrays[key] = arrays[key][: rng.integers(max(len(arrays[key]), 1))] if arrays[key].ndim else arrays[key]


def mix(arrays, key, rng):
    """With keys of another format among them."""
    other = peer_arrays("timm_plain") if "cls" in arrays else golden("vit_token")
    for name in rng.choice(sorted(other), size=3):
        arrays[str(name)] = other[name]


def lengthen(arrays, key, rng):
    arrays[key] = np.concatenate([arrays[key]] * 2) if arrays[key].ndim else arrays[key]


ARRAYS = (drop, rename, transpose, flatten, exchange, spoil, retype, shorten, mix, lengthen)


def npz_bytes(arrays, tmp_path):
    write_npz(tmp_path / "made.npz", arrays)
    return (tmp_path / "made.npz").read_bytes()


def safetensors_bytes(arrays, tmp_path):
    kinds.write_safetensors(tmp_path / "made.safetensors", arrays, {})
    return (tmp_path / "made.safetensors").read_bytes()


def hdf5_bytes(arrays, tmp_path):
    with h5py.File(tmp_path / "made.h5", "w") as file:
        for key, value in arrays.items():
            with contextlib.suppress(ValueError):  # a name that HDF5 cannot hold beside the others
                file.create_dataset(key, data=value)
    return (tmp_path / "made.h5").read_bytes()


def keras_bytes(arrays, tmp_path):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("config.json", json.dumps({"config": {"num_heads": 4}}))
        archive.writestr("model.weights.h5", hdf5_bytes(arrays, tmp_path))
    return content.getvalue()


def hdf5_arrays(name):
    return {key: entry.read() for key, entry in kinds.hdf5_entries(name, str(PEERS / name)).items()}


FORMATS = {
    "npz": (lambda: golden("vit_token_prelinen"), npz_bytes, "f.npz", {}),
    "safetensors, timm": (lambda: peer_arrays("timm_plain"), safetensors_bytes, "f.safetensors", {"num_heads": 4}),
    "safetensors, transformers": (
        lambda: peer_arrays("transformers_vit"),
        safetensors_bytes,
        "f.safetensors",
        {"num_heads": 4},
    ),
    "h5": (lambda: hdf5_arrays("vit_keras_plain.h5"), hdf5_bytes, "f.h5", {"num_heads": 4}),
    "weights.h5": (lambda: hdf5_arrays("vit_keras_plain.weights.h5"), hdf5_bytes, "f.weights.h5", {"num_heads": 4}),
    "keras": (lambda: hdf5_arrays("vit_keras_plain.weights.h5"), keras_bytes, "f.keras", {}),
    "keras_hub": (lambda: hdf5_arrays("keras_hub_token/model.weights.h5"), hdf5_bytes, "model.weights.h5", {}),
}


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("name", FORMATS)
def test_mutants(name, seeds, tmp_path):
    """Half of the mutants are wrong bytes, half wrong arrays in a sound file."""
    make, to_bytes, file, options = FORMATS[name]
    arrays = make()
    sound = to_bytes(dict(arrays), tmp_path)
    path = tmp_path / "mutant" / file
    path.parent.mkdir()
    path.write_bytes(sound)
    model = from_checkpoint(path, **options)
    before = [np.array(np.asarray(variable)) for variable in model.weights]
    loaded = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        if seed % 2:
            data = rng.choice(BYTES)(sound, rng)
        else:
            changed = dict(arrays)
            rng.choice(ARRAYS)(changed, str(rng.choice(sorted(changed))), rng)
            data = to_bytes(changed, tmp_path)
        path.write_bytes(data)
        loaded += survives(model, path, before, f"seed {seed}")
    assert loaded < len(seeds) / 2, "most mutants are broken, and are refused"


def survives(model, path, before, which):
    """Whether the mutant was loaded; if it was not, that the model is what it was."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            load_weights_from(model, path, top=True)
    except CheckpointError as error:
        assert_unchanged(model, before, which, error)
        return 0
    except Exception as error:
        pytest.fail(f"{which}: {type(error).__name__} {error}")
    for variable, value in zip(model.weights, before):
        variable.assign(value)
    return 1


def assert_unchanged(model, before, which, error):
    assert str(error), which
    for variable, value in zip(model.weights, before):
        np.testing.assert_array_equal(variable, value, err_msg=f"{which}: partly loaded")


def keras_hub_configs(folder):
    shutil.copytree(PEERS / "keras_hub_token", folder)
    converter = {"scale": [0.01, 0.01, 0.01], "offset": [0.0, 0.0, 0.0], "image_size": [32, 32], "antialias": True}
    (folder / "image_converter.json").write_text(json.dumps({"config": converter}))


def transformers_configs(folder):
    folder.mkdir()
    kinds.write_safetensors(folder / "model.safetensors", peer_arrays("transformers_vit"), {})
    (folder / "config.json").write_text(str(golden("peers/transformers_vit")["config"]))
    processor = {"size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def timm_configs(folder):
    folder.mkdir()
    kinds.write_safetensors(folder / "model.safetensors", peer_arrays("timm_plain"), {})
    pixels = {
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "crop_pct": 0.9,
        "input_size": [3, 32, 32],
        "label_names": ["a", "b"],
    }
    config = {**TIMM_CONFIG, "config": {"global_pool": "token"}, "global_pool": "token", "pretrained_cfg": pixels}
    (folder / "config.json").write_text(json.dumps(config))


CONFIGURATIONS = [
    (keras_hub_configs, "config.json"),
    (keras_hub_configs, "task.json"),
    (keras_hub_configs, "image_converter.json"),
    (transformers_configs, "config.json"),
    (transformers_configs, "preprocessor_config.json"),
    (timm_configs, "config.json"),
]
VALUES = [None, -1, 0, 1e300, "x", [], [1], {}, True, 10**9, [0, 0], [3, 2, 1], "9" * 50, [{}], {"a": []}]


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize(("make", "file"), CONFIGURATIONS)
def test_configurations(make, file, seeds, tmp_path):
    """Wrong bytes and wrong values in the JSON beside the weights."""
    make(tmp_path / "f")
    path = tmp_path / "f" / file
    sound = json.loads(path.read_text())
    open_checkpoint(tmp_path / "f")
    refused = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        if seed % 4:
            changed = json.loads(json.dumps(sound))
            parts = [changed, *(part for part in changed.values() if isinstance(part, dict) and part)]
            inner = parts[rng.integers(len(parts))]
            inner[str(rng.choice(sorted(inner)))] = VALUES[rng.integers(len(VALUES))]
            path.write_text(json.dumps(changed))
        else:
            path.write_bytes(flip(json.dumps(sound).encode(), rng))
        try:
            open_checkpoint(tmp_path / "f")
        except (CheckpointError, UserWarning):
            refused += 1
        except Exception as error:
            pytest.fail(f"seed {seed}: {type(error).__name__} {error}, for {path.read_bytes()!r}")
    assert refused, "the file is never looked at"


def header(entries):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 2**63) + b"{",
        struct.pack("<Q", 10) + b"{" * 10,
        header({"x": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}) + b"0000",
        header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**60]}}) + b"0000",
        header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 4]}}) + b"0000",
        header({"x": {"dtype": "EVIL", "shape": [1], "data_offsets": [0, 4]}}) + b"0000",
        header(
            {
                "x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
                "y": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            }
        )
        + b"0000",
        header({"x": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}) + b"0000",
    ],
)
def test_hostile_headers(data, tmp_path):
    (tmp_path / "f.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError):
        from_checkpoint(tmp_path / "f.safetensors")


def test_a_zip_bomb_is_refused(tmp_path):
    """100 MB of zeros in 100 kB: it is refused before it is inflated."""
    with (
        zipfile.ZipFile(tmp_path / "f.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("cls.npy", "w") as file,
    ):
        np.lib.format.write_array(file, np.zeros(2**25 - 64, "float32"))
    assert (tmp_path / "f.npz").stat().st_size < 2e5
    with pytest.raises(CheckpointError, match="would grow from"):
        from_checkpoint(tmp_path / "f.npz")


def test_members_with_paths_are_names_and_nothing_more(tmp_path):
    arrays = golden("vit_token")
    for key in ("/etc/passwd", "../../evil", "C:\\evil"):
        write_npz(tmp_path / "f.npz", {**arrays, key: np.zeros(1)})
        with pytest.raises(CheckpointError, match="never claimed"):
            from_checkpoint(tmp_path / "f.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["f.npz"]


def test_arrays_that_lie_in_another_file(tmp_path):
    """HDF5 can point to any file of the machine."""
    (tmp_path / "secret").write_bytes(bytes(64))
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file.create_dataset("layers/conv2d/vars/0", (16,), "float32", external=[(str(tmp_path / "secret"), 0, 64)])
    with pytest.raises(CheckpointError, match="lies in another file"):
        from_checkpoint(tmp_path / "f.h5")


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.peer
@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda torch: nested(40) | {"b": torch.zeros(1)}, "lies deeper than 16 dicts"),
        (lambda torch: {"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)}, "'a.b' stands twice"),
        (lambda torch: {"a": print}, "PyTorch cannot read it as data"),
    ],
)
def test_hostile_pytorch_files(state, message, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(state(torch), tmp_path / "f.pth")
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / "f.pth")
