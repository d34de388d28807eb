"""Files over HTTPS into the cache: resumed, retried, checked, one transfer at a time, whole or not at all."""

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import filelock
import google_crc32c
import requests

from vit_keras.checkpoints import http
from vit_keras.checkpoints.arrays import CheckpointError, open_arrays, what_it_is
from vit_keras.checkpoints.cache import PARTIAL, CacheEntry, digest
from vit_keras.progress import BYTES, progress_bar

TIMEOUT = (5.0, 30.0)  # seconds to connect, and between two pieces of an answer
PATIENCE = 6.0  # seconds for all addresses of a host together
ATTEMPTS = 5  # transfers in a row that bring nothing, or as good as nothing
PIECE = 2**16  # bytes at a time; a piece that breaks off is lost
LONGEST_WAIT = 30.0  # seconds between two of them
LARGEST = 32 * 2**30  # bytes; no checkpoint is larger, and a broken server must not fill the disk
RETRIED = (408, 425, 429, 500, 502, 503, 504)


class DownloadError(CheckpointError):
    """A file could not be fetched. What was transferred is kept, and a later call goes on with it."""


class _Retry(Exception):
    """A transfer that failed and may go better after `wait` seconds; it uses up `cost` of the attempts."""

    def __init__(self, reason: str, wait: float | None = None, cost: int = 1):
        super().__init__(reason)
        self.wait, self.cost = wait, cost


def fetch(url: str) -> str:
    """Path of the file at an address, from the cache or, the first time, from the network.

    The cached file is checked against its recorded sha256 each time; a corrupted one is fetched again. Variables:
    `VIT_KERAS_HOME` moves the cache, `VIT_KERAS_MIRROR` replaces scheme and host (and may add a path before the
    file's own), `VIT_KERAS_OFFLINE=1` forbids the network; proxies and certificates come from `HTTPS_PROXY`,
    `NO_PROXY`, `REQUESTS_CA_BUNDLE`, `SSL_CERT_FILE`.

    Args:
        url: `https://…`, or `http://…` for a mirror of one's own.

    Raises:
        DownloadError: there is no network, the server refuses, or what it sends is not what it said or no checkpoint.
    """
    entry = CacheEntry.of(url)
    try:
        if entry.state() == "ok":
            return str(entry.path)
        if os.environ.get("VIT_KERAS_OFFLINE", "0").lower() not in ("", "0", "false"):
            raise _failure(entry, "VIT_KERAS_OFFLINE forbids the network")
        entry.folder.mkdir(parents=True, exist_ok=True)
        with _alone(entry):
            if entry.state() != "ok":  # else another process has fetched it meanwhile
                _transfer(entry)
    except OSError as error:
        raise _failure(entry, f"the cache cannot be written ({error}); VIT_KERAS_HOME moves it") from error
    return str(entry.path)


def _failure(entry: CacheEntry, reason: str) -> DownloadError:
    return DownloadError(
        f"{entry.url} could not be fetched: {reason}. It would be kept as {entry.path}. Without network, bring the "
        f"file by other means and pass its path, weights='/path/{entry.path.name}'."
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


def _transfer(entry: CacheEntry) -> None:
    """Fetch the file in as many attempts as it takes, each going on where the last one ended."""
    failures = 0
    _check_reachable(entry)
    with http.session() as session:
        while True:
            before = entry.partial.stat().st_size if entry.partial.exists() else 0
            try:
                return _attempt(entry, session, before)
            except _Retry as error:
                after = entry.partial.stat().st_size if entry.partial.exists() else 0
                failures = error.cost + (0 if after > before + PIECE else failures)
                if failures >= ATTEMPTS:
                    raise _failure(entry, f"{error}, again and again") from error
                time.sleep(min(LONGEST_WAIT, 2.0 ** (failures - 1) if error.wait is None else error.wait))
            except requests.RequestException as error:
                raise _failure(entry, http.reason_of(error)) from error


def _check_reachable(entry: CacheEntry) -> None:
    """Connect once and let go, unless a proxy does it.

    Storage hosts have a dozen addresses, and where a firewall drops packets, each of them would cost a timeout.
    """
    source = http.source_of(entry.url)
    parts = urlsplit(source)
    if requests.utils.get_environ_proxies(source, no_proxy=None) or not parts.hostname:
        return
    port = parts.port or (443 if parts.scheme == "https" else 80)
    deadline, reason = time.monotonic() + PATIENCE, "it has no address"
    try:
        for _, _, _, _, address in socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM):
            try:
                return socket.create_connection((str(address[0]), port), timeout=PATIENCE / 2).close()
            except OSError as error:
                reason = str(error)
            if time.monotonic() >= deadline:
                break
    except OSError as error:
        reason = f"the name cannot be looked up ({error})"
    raise _failure(entry, f"no connection to {parts.hostname}: {reason}")


def _attempt(entry: CacheEntry, session: requests.Session, offset: int) -> None:
    """One request: the rest of the file, or all of it; then the checks, then the file's own name."""
    source, known = http.source_of(entry.url), entry.record(PARTIAL)
    validator = known.get("validator") if known.get("source") == source else None
    headers = {"Range": f"bytes={offset}-", "If-Range": validator} if offset and validator else {}
    try:
        with session.get(source, headers=headers, stream=True, timeout=TIMEOUT) as response:
            _check_answer(entry, source, response)
            resumed = response.status_code == 206 and http.range_start(response) == offset
            _check_room(entry, response, offset if resumed else 0)
            entry.write_record(PARTIAL, source=source, validator=http.validator_of(response))
            total = _receive(entry, response, offset if resumed else 0)
            stated = http.stated_digests(response)
    except (requests.Timeout, requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
        if http.is_final(error):
            raise
        raise _Retry(http.reason_of(error)) from error
    _check_file(entry, total, stated)
    entry.write_record(size=entry.partial.stat().st_size, sha256=digest(entry.partial), source=source)
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
        raise _failure(entry, f"the server answered {status} {response.reason} for {source}")
    if source.startswith("https:") and not response.url.startswith("https:"):
        raise _failure(entry, f"the server led to {response.url}, which is not encrypted")


def _check_room(entry: CacheEntry, response: requests.Response, offset: int) -> None:
    rest = http.length_of(response) or 0
    free = shutil.disk_usage(entry.folder).free
    if rest > free:
        raise _failure(entry, f"it needs {_mib(rest)} more, and {_mib(free)} are free; VIT_KERAS_HOME moves the cache")
    if rest + offset > LARGEST:
        raise _failure(entry, f"the server says it has {_mib(rest + offset)}, more than any checkpoint")


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def _receive(entry: CacheEntry, response: requests.Response, offset: int) -> int | None:
    """Write the answer to the partial file; return the length that the server said the whole has."""
    length = http.length_of(response)
    total = None if length is None else offset + length
    with (
        progress_bar(entry.path.name, total, offset, BYTES) as advance,
        open(entry.partial, "ab" if offset else "wb") as file,
    ):
        for piece in response.iter_content(PIECE):
            file.write(piece)
            advance(len(piece))
            if file.tell() > LARGEST:
                raise _failure(entry, f"the server sent more than {_mib(LARGEST)}")
    return total


def _check_file(entry: CacheEntry, total: int | None, stated: dict[str, str]) -> None:
    """Length, digests and kind of a file that has come; a wrong one is not kept."""
    size = entry.partial.stat().st_size
    if total is not None and size < total:
        raise _Retry(f"the connection ended after {size} of {total} bytes", wait=0.0)
    computed = {name: _crc32c(entry.partial) if name == "crc32c" else digest(entry.partial, name) for name in stated}
    wrong = [name for name in stated if stated[name] != computed[name]]
    if wrong or (total is not None and size > total):
        entry.partial.unlink()
        what = f"its {wrong[0]} is not the one that the server states" if wrong else f"it has {size} of {total} bytes"
        raise _Retry(f"what came is not what the server said: {what}", wait=0.0, cost=ATTEMPTS // 2 + 1)
    try:
        _check_kind(entry)
    except CheckpointError as error:
        entry.partial.unlink()
        raise _failure(entry, f"what the server sent is no checkpoint: {error}") from error


def _check_kind(entry: CacheEntry) -> None:
    if entry.path.suffix == ".npz":
        open_arrays(entry.partial)
    elif not entry.partial.stat().st_size or "web page" in what_it_is(str(entry.partial)):
        raise CheckpointError(what_it_is(str(entry.partial)))


def _crc32c(path: Path) -> str:
    checksum: Any = google_crc32c.Checksum()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            checksum.update(block)
    return checksum.digest().hex()
