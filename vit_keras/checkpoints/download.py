"""Files over HTTPS into the cache: resumed, retried, checked, one transfer at a time, whole or not at all."""

import contextlib
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import google_crc32c
import requests
import urllib3.exceptions

from vit_keras.checkpoints import http
from vit_keras.checkpoints.arrays import CheckpointError
from vit_keras.checkpoints.cache import PARTIAL, CacheEntry, digest
from vit_keras.checkpoints.files import open_file
from vit_keras.progress import BYTES, progress_bar

TIMEOUT = (5.0, 30.0)  # seconds to connect, and between two pieces of an answer
ATTEMPTS = 5  # transfers in a row that bring nothing, or as good as nothing
LIES = 2  # files that came whole and were not what the server said
PIECE = 2**16  # bytes at most at a time
SLOWEST = 60.0  # seconds for as many bytes; a server that trickles is asked again
LONGEST_WAIT = 30.0  # seconds between two attempts
LARGEST = 32 * 2**30  # bytes; no checkpoint is larger, and a broken server must not fill the disk
RETRIED = (408, 425, 429, 500, 502, 503, 504)


class DownloadError(CheckpointError):
    """A file could not be fetched. What was transferred is kept, and a later call goes on with it."""


class _Retry(Exception):
    """A transfer that failed and may go better after `wait` seconds."""

    def __init__(self, reason: str, wait: float | None = None):
        super().__init__(reason)
        self.wait = wait


class _Lie(_Retry):
    """The file is not what the server said."""


def check_arrays(path: Path) -> None:
    """Refuse what is no whole file of arrays: every header is looked at and, in archives, every checksum computed.

    Raises:
        CheckpointError: the file is something else, or damaged.
    """
    open_file(path)
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        broken = archive.testzip()
    if broken:
        raise CheckpointError(f"{path}: {broken!r} is damaged")


def fetch(url: str, check: Callable[[Path], None] = check_arrays) -> str:
    """Path of the file at an address, from the cache or, the first time, from the network.

    The cached file is compared with its recorded sha256 each time; a corrupted one is fetched again. A file that
    somebody else put at its place is taken when it passes `check`. Variables: `VIT_KERAS_HOME` moves the cache,
    `VIT_KERAS_MIRROR` replaces scheme and host (and may add a path before the file's own), `VIT_KERAS_OFFLINE=1`
    forbids the network; proxies and certificates come from `HTTPS_PROXY`, `NO_PROXY`, `REQUESTS_CA_BUNDLE`,
    `SSL_CERT_FILE`.

    Args:
        url: `https://…`, `gs://…` (public files of Google storage), or `http://…` for a mirror of one's own.
        check: raises a `CheckpointError` for a file of another kind. Default: a file of arrays.

    Raises:
        DownloadError: there is no network, the server refuses, or what it sends is not what it said or of another kind.
        ValueError: the address is of another form.
    """
    entry = CacheEntry.of(http.address(url))
    try:
        if entry.state() == "ok":
            return str(entry.path)
        if entry.state() != "foreign" and http.is_offline():
            raise _failure(entry, "VIT_KERAS_OFFLINE forbids the network")
        entry.folder.mkdir(parents=True, exist_ok=True)
        with _alone(entry):
            if entry.state() == "foreign":
                _adopt(entry, check)
            elif entry.state() != "ok":  # else another process has fetched it meanwhile
                _transfer(entry, check)
    except OSError as error:
        raise _failure(entry, f"the cache cannot be written ({error}); VIT_KERAS_HOME moves it") from error
    return str(entry.path)


def _failure(entry: CacheEntry, reason: str) -> DownloadError:
    return DownloadError(
        f"{http.public(entry.url)} could not be fetched: {reason}. It would be kept as {entry.path}. Without network, "
        f"bring the file there by other means, or pass its path, weights='/path/{entry.path.name}'."
    )


@contextlib.contextmanager
def _alone(entry: CacheEntry) -> Iterator[None]:
    """Hold the entry's lock; the system lets go of it when a process dies."""
    lock = filelock.FileLock(entry.lock)
    try:
        lock.acquire(timeout=0.2)
    except filelock.Timeout:
        if sys.stderr.isatty():
            print(f"Another process is fetching {entry.path.name}; waiting for it.", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _adopt(entry: CacheEntry, check: Callable[[Path], None]) -> None:
    """Take a file that was put at its place by other means."""
    try:
        check(entry.path)
    except CheckpointError as error:
        raise _failure(entry, f"there is a file at its place that was not fetched by vit-keras, and {error}") from error
    entry.write_record(size=entry.path.stat().st_size, sha256=digest(entry.path), source=None)


def _transfer(entry: CacheEntry, check: Callable[[Path], None]) -> None:
    """Fetch the file in as many attempts as it takes, each going on where the last one ended."""
    failures = lies = 0
    try:
        http.check_reachable(http.source_of(entry.url))
        with http.Session() as session:
            while True:
                before = entry.partial.stat().st_size if entry.partial.exists() else 0
                try:
                    return _attempt(entry, session, before, check)
                except _Retry as error:
                    after = entry.partial.stat().st_size if entry.partial.exists() else 0
                    failures = 1 if after > before + PIECE else failures + 1
                    lies += isinstance(error, _Lie)
                    if failures >= ATTEMPTS or lies >= LIES:
                        raise _failure(entry, f"{error}, again and again") from error
                    time.sleep(min(LONGEST_WAIT, 2.0 ** (failures - 1) if error.wait is None else error.wait))
    except (requests.RequestException, http.Unreachable) as error:
        raise _failure(entry, http.reason_of(error)) from error


def _attempt(entry: CacheEntry, session: requests.Session, offset: int, check: Callable[[Path], None]) -> None:
    """One request: the rest of the file, or all of it; then the checks, then the file's own name."""
    source, known = http.source_of(entry.url), entry.record(PARTIAL)
    validator = known.get("validator") if known.get("source") == http.public(source) else None
    headers = {"Range": f"bytes={offset}-", "If-Range": validator} if offset and validator else {}
    try:
        with session.get(source, headers=headers, stream=True, timeout=TIMEOUT) as response:
            total = http.total_of(response, offset)
            stated = http.stated_digests(response)
            if response.status_code != 416 or total != offset:  # else the partial file is the whole one
                _check_answer(entry, source, response)
                resumed = response.status_code == 206 and http.range_start(response) == offset
                _check_room(entry, response, offset if resumed else 0)
                entry.write_record(PARTIAL, source=http.public(source), validator=http.validator_of(response))
                _receive(entry, response, offset if resumed else 0, total)
    except (
        requests.Timeout,
        requests.ConnectionError,
        requests.exceptions.ChunkedEncodingError,
        urllib3.exceptions.HTTPError,
    ) as error:
        if http.is_final(error):
            raise
        raise _Retry(http.reason_of(error)) from error
    _check_file(entry, total, stated, check)
    size, sha256 = entry.partial.stat().st_size, digest(entry.partial)
    entry.write_record(size=size, sha256=sha256, source=http.public(source))
    os.replace(entry.partial, entry.path)
    (entry.folder / PARTIAL).unlink(missing_ok=True)


def _check_answer(entry: CacheEntry, source: str, response: requests.Response) -> None:
    status = response.status_code
    if status == 416:  # the partial file is not the beginning of what is there now
        entry.partial.unlink(missing_ok=True)
        raise _Retry("the server has no such part of the file", wait=0.0)
    if status in RETRIED:
        raise _Retry(f"the server answered {status} {response.reason}", http.retry_after(response))
    if status not in (200, 206):
        raise _failure(entry, f"the server answered {status} {response.reason} for {http.public(source)}")


def _check_room(entry: CacheEntry, response: requests.Response, offset: int) -> None:
    rest = http.length_of(response) or 0
    free = shutil.disk_usage(entry.folder).free
    if rest + offset > LARGEST:
        raise _failure(entry, f"the server says it has {_mib(rest + offset)}, more than any checkpoint")
    if rest > free:
        raise _failure(entry, f"it needs {_mib(rest)} more, and {_mib(free)} are free; VIT_KERAS_HOME moves the cache")


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def _receive(entry: CacheEntry, response: requests.Response, offset: int, total: int | None) -> None:
    """Write the answer to the partial file."""
    with (
        progress_bar(entry.path.name, total, offset, BYTES) as advance,
        open(entry.partial, "ab" if offset else "wb") as file,
    ):
        mark, since = file.tell(), time.monotonic()
        # Not iter_content: it waits for a whole piece, loses one that breaks off, and never notices a trickle.
        while piece := response.raw.read1(PIECE):
            file.write(piece)
            advance(len(piece))
            if file.tell() > LARGEST:
                raise _failure(entry, f"the server sent more than {_mib(LARGEST)}")
            if time.monotonic() - since > SLOWEST:
                if file.tell() - mark < PIECE:
                    raise _Retry(f"the server sends less than {PIECE} bytes in {SLOWEST:.0f} seconds")
                mark, since = file.tell(), time.monotonic()


def _check_file(entry: CacheEntry, total: int | None, stated: dict[str, str], check: Callable[[Path], None]) -> None:
    """Length, digests and kind of a file that has come; a wrong one is not kept."""
    size = entry.partial.stat().st_size
    if total is not None and size < total:
        raise _Retry(f"the connection ended after {size} of {total} bytes", wait=0.0)
    computed = {name: _crc32c(entry.partial) if name == "crc32c" else digest(entry.partial, name) for name in stated}
    wrong = [name for name in stated if stated[name] != computed[name]]
    if wrong or (total is not None and size > total):
        entry.partial.unlink()
        what = f"its {wrong[0]} is not the one that the server states" if wrong else f"it has {size} of {total} bytes"
        raise _Lie(f"what came is not what the server said: {what}", wait=0.0)
    try:
        check(entry.partial)
    except CheckpointError as error:
        entry.partial.unlink()
        raise _failure(entry, f"what the server sent is of another kind: {error}") from error


def _crc32c(path: Path) -> str:
    checksum: Any = google_crc32c.Checksum()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            checksum.update(block)
    return checksum.digest().hex()
