"""Downloaded files on disk: where they lie, whether they are whole. Imports no Keras, so that tables are quick.

Each source address has a folder of its own, `<home>/downloads/<host>-<hash of the address>/`, in which lie the file,
its record (`record.json`: address, size, sha256), and while it is fetched a partial file and a lock.
"""

import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import filelock

RECORD, PARTIAL, LOCK = "record.json", "partial.json", "lock"


def home() -> Path:
    """The cache folder: `VIT_KERAS_HOME`, else `vit-keras` in `XDG_CACHE_HOME` or `~/.cache`."""
    given = os.environ.get("VIT_KERAS_HOME")
    try:
        if given:
            return Path(given).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vit-keras"
    except RuntimeError as error:  # a user without an entry in passwd, as in containers
        raise ValueError("There is no home folder for the cache of downloads: set VIT_KERAS_HOME.") from error


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """A downloaded file, whole or in part.

    Args:
        folder: of its own.
        url: its source address.
    """

    folder: Path
    url: str

    @classmethod
    def of(cls, url: str) -> "CacheEntry":
        """The entry of an address, there or not."""
        host = re.sub(r"[^\w.-]", "_", urlsplit(url).netloc.rpartition("@")[2])
        return cls(home() / "downloads" / f"{host}-{hashlib.sha256(url.encode()).hexdigest()[:16]}", url)

    @property
    def path(self) -> Path:
        """Of the whole file."""
        name = unquote(PurePosixPath(urlsplit(self.url).path).name)
        return self.folder / (re.sub(r"[^\w.+=,-]", "_", name).lstrip(".") or "file")

    @property
    def partial(self) -> Path:
        """Of a file whose transfer has not ended."""
        return self.path.with_name(self.path.name + ".part")

    @property
    def lock(self) -> Path:
        return self.folder / LOCK

    def record(self, name: str = RECORD) -> dict:
        """What was written down when the file came, or of the running transfer; {} when there is nothing readable."""
        try:
            found = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def write_record(self, name: str = RECORD, **facts) -> None:
        """Write a record, whole or not at all."""
        temporary = self.folder / f"{name}.tmp"
        temporary.write_text(json.dumps({"url": self.url, **facts}, indent=1), encoding="utf-8")
        os.replace(temporary, self.folder / name)

    def state(self) -> str:
        """`"ok"`, `"corrupted"` (not what was recorded), `"foreign"` (nothing was), `"partial"` or `"missing"`.

        Reads the whole file.
        """
        if not self.path.is_file():
            return "partial" if self.partial.is_file() else "missing"
        record = self.record()
        if not record:
            return "foreign"
        if self.path.stat().st_size != record.get("size") or digest(self.path) != record.get("sha256"):
            return "corrupted"
        return "ok"

    def size(self) -> int:
        """Bytes on disk."""
        return sum(file.stat().st_size for file in self.folder.iterdir() if file.is_file())


def digest(path: Path, algorithm: str = "sha256") -> str:
    """Hexadecimal digest of a file."""
    found = hashlib.new(algorithm)
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            found.update(block)
    return found.hexdigest()


def entries(pattern: str = "*") -> Iterator[CacheEntry]:
    """The entries whose address or file name matches a shell pattern."""
    root = home() / "downloads"
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        entry = _entry_in(folder)
        if entry and (fnmatch.fnmatchcase(entry.url, pattern) or fnmatch.fnmatchcase(entry.path.name, pattern)):
            yield entry


def _entry_in(folder: Path) -> CacheEntry | None:
    """The entry of a folder; one whose record does not lead back to it is not ours."""
    found = CacheEntry(folder, "")
    url = found.record().get("url") or found.record(PARTIAL).get("url")
    with contextlib.suppress(ValueError):
        if isinstance(url, str) and CacheEntry.of(url).folder == folder and not folder.is_symlink():
            return CacheEntry(folder, url)
    return None


def remove(entry: CacheEntry) -> int:
    """Remove an entry's own files, and its folder if nothing else is in it; return the bytes that they held.

    Raises:
        BlockingIOError: it is being fetched at the moment.
    """
    lock = filelock.FileLock(entry.lock)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        raise BlockingIOError(f"{entry.path.name} is being fetched") from error
    files = [entry.path, entry.partial, *(entry.folder / name for name in (RECORD, PARTIAL))]
    size = sum(file.stat().st_size for file in files if file.is_file())
    for file in files:
        file.unlink(missing_ok=True)
    entry.lock.unlink(missing_ok=True)
    lock.release()
    with contextlib.suppress(OSError):
        entry.folder.rmdir()
    return size
