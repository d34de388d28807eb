"""Arrays of a checkpoint, read one at a time and never unpickled; files written whole or not at all."""

import collections
import contextlib
import dataclasses
import os
import uuid
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.lib import format as npy


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or does not fit the model. Nothing was changed."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """An array that is read when it is asked for.

    Args:
        shape: of the array.
        dtype: of the array.
        read: returns it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    def then(self, change: Callable[[np.ndarray], np.ndarray]) -> "Entry":
        """The entry with a change of shape (reshape, slice, transpose) still to be applied."""
        shape = change(np.broadcast_to(np.zeros((), self.dtype), self.shape)).shape
        return Entry(shape, self.dtype, lambda: change(self.read()))


def from_mapping(arrays: Mapping[str, Any]) -> dict[str, Entry]:
    """Entries of arrays that are in memory.

    Raises:
        CheckpointError: a key is no text, or an array holds no numbers.
    """
    nameless = [key for key in arrays if not isinstance(key, str)]
    if nameless:
        raise CheckpointError(f"Expected a mapping from names to arrays. Received: the key {nameless[0]!r}")
    values = {key: np.asarray(value) for key, value in arrays.items()}
    return {key: checked(key, Entry(a.shape, a.dtype, a.view)) for key, a in values.items()}


def zip_entries(path: str, archive: zipfile.ZipFile) -> dict[str, Entry]:
    """Lazy entries of an `.npz` archive.

    Raises:
        CheckpointError: a member is no array of numbers, stands twice, or is not of the size it declares.
    """
    members = [info for info in archive.infolist() if not info.is_dir()]
    keys = [info.filename.removesuffix(".npy") for info in members]
    twice = [key for key, count in collections.Counter(keys).items() if count > 1]
    if twice:
        raise CheckpointError(f"{path}: the archive holds {', '.join(twice)} more than once.")
    refuse_inflation(path, sum(info.compress_size for info in members), sum(info.file_size for info in members))
    return {key: _npz_entry(path, archive, info) for key, info in zip(keys, members)}


_MOST_INFLATION = 100  # weights shrink by a tenth or two; a head of zeros, by a thousand, is a small part of a file
_SMALL = 64 * 2**20  # bytes that may be anything


def refuse_inflation(path: str, stored: int, inflated: int) -> None:
    """
    Raises:
        CheckpointError: so many bytes come out of a file of so few that it must be a trap.
    """
    if inflated > max(_SMALL, _MOST_INFLATION * stored):
        raise CheckpointError(
            f"{path}: the file would grow from {stored:,} to {inflated:,} bytes, as no weights do; it is refused."
        )


def what_it_is(path: str) -> str:
    """What a file that is no archive looks like."""
    with open(path, "rb") as file:
        start = file.read(512)
    if not start:
        return "the file is empty"
    if start.startswith(b"PK"):
        return "the archive is truncated or broken; copy or download it again"
    if start.startswith(b"\x80"):
        return "a pickle, which could run code when it is read, and is refused"
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page, probably the answer to a failed download"
    return "not an archive"


def _npz_entry(path: str, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Entry:
    key = info.filename.removesuffix(".npy")
    with read_errors(path, key), archive.open(info) as member:
        shape, fortran, dtype = _npy_header(member)
        size = member.tell() + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if dtype.hasobject:
        raise CheckpointError(f"{path}: {key!r} is pickled, which could run code when it is read; it is refused.")
    if size != info.file_size:
        raise CheckpointError(f"{path}: {key!r} should have {size} bytes by its header. Received: {info.file_size}")

    def read():
        with read_errors(path, key), archive.open(info) as member:
            _npy_header(member)
            array = np.empty(int(np.prod(shape)), dtype)
            view = memoryview(array.view(np.uint8)).cast("B")
            if member.readinto(view) != len(view) or member.read(1):
                raise ValueError("its length is not the one it declares")
            return array.reshape(shape[::-1]).T if fortran else array.reshape(shape)

    return checked(key, Entry(shape, dtype, read), path)


def _npy_header(member: Any) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = npy.read_magic(member)
    if version == (1, 0):
        return npy.read_array_header_1_0(member)
    if version == (2, 0):
        return npy.read_array_header_2_0(member)
    raise ValueError(f"NPY version {version} is not one that checkpoints use")


@contextlib.contextmanager
def read_errors(path: str, key: str) -> Iterator[None]:
    """Whatever goes wrong while an array is read is said as a `CheckpointError` that names it."""
    try:
        yield
    except CheckpointError:
        raise
    # zlib.error, EOFError, RuntimeError (encrypted), NotImplementedError (compression): all say "broken member".
    except Exception as error:
        raise CheckpointError(f"{path}: the array {key!r} cannot be read ({error}).") from error


def checked(key: str, entry: Entry, path: str = "the checkpoint") -> Entry:
    """Only numbers; bfloat16, which NumPy files hold as two-byte void, becomes float32."""
    if entry.dtype == np.dtype("V2"):
        wide = entry.read
        return Entry(entry.shape, np.dtype("float32"), lambda: _from_bfloat16(wide()))
    if entry.dtype.name == "bfloat16" or entry.dtype.kind in "fiub":
        return entry
    raise CheckpointError(f"{path}: {key!r} holds {entry.dtype}. Expected numbers.")


def _from_bfloat16(array: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(array).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Iterator[str]:
    """A temporary name beside `path`, which takes its place at the end, or is removed when the writing fails."""
    path = os.path.abspath(os.fspath(path))
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f"{uuid.uuid4().hex}.tmp.{name}")  # with the suffix, which Keras goes by
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def value_of(value: Any) -> np.ndarray:
    """An array, read now if it is an entry."""
    return value.read() if isinstance(value, Entry) else np.asanyarray(value)


def write_npz(path: str | os.PathLike, arrays: Mapping[str, Any]) -> None:
    """Write arrays or entries as an uncompressed `.npz`, keys sorted; the path holds the whole file or what it held
    before.
    """
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "x", allowZip64=True) as archive:
        for key in sorted(arrays):
            with archive.open(key + ".npy", "w", force_zip64=True) as member:
                npy.write_array(member, value_of(arrays[key]), allow_pickle=False)
