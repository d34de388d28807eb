"""Files over HTTPS into the cache: resumed, retried, checked, one transfer at a time, whole or not at all."""

import base64
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from email.utils import mktime_tz, parsedate_tz
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import filelock
import google_crc32c
import requests
import rich.console
import rich.progress
import urllib3.exceptions

from vit_keras.checkpoints.arrays import CheckpointError, open_arrays, what_it_is
from vit_keras.checkpoints.cache import PARTIAL, CacheEntry, digest

TIMEOUT = (5.0, 30.0)  # seconds to connect, and between two pieces of an answer
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
    with _session() as session:
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
                raise _failure(entry, _reason(error)) from error


def _session() -> requests.Session:
    session = requests.Session()
    # requests reads REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE itself; OpenSSL's own variable it does not.
    session.verify = os.environ.get("SSL_CERT_FILE") or True
    session.headers.update({"User-Agent": "vit-keras-zoo", "Accept-Encoding": "identity"})
    return session


def _source(url: str) -> str:
    """The address to ask: the mirror's, when there is one."""
    mirror = os.environ.get("VIT_KERAS_MIRROR")
    if not mirror:
        return url
    parts = urlsplit(url)
    return mirror.rstrip("/") + parts.path + (f"?{parts.query}" if parts.query else "")


def _attempt(entry: CacheEntry, session: requests.Session, offset: int) -> None:
    """One request: the rest of the file, or all of it; then the checks, then the file's own name."""
    source, known = _source(entry.url), entry.record(PARTIAL)
    validator = known.get("validator") if known.get("source") == source else None
    headers = {"Range": f"bytes={offset}-", "If-Range": validator} if offset and validator else {}
    try:
        with session.get(source, headers=headers, stream=True, timeout=TIMEOUT) as response:
            _check_answer(entry, source, response)
            resumed = response.status_code == 206 and _range_start(response) == offset
            _check_room(entry, response, offset if resumed else 0)
            entry.write_record(PARTIAL, source=source, validator=_validator(response))
            total = _receive(entry, response, offset if resumed else 0)
            stated = _stated_digests(response)
    except (requests.Timeout, requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
        if _is_final(error):
            raise
        raise _Retry(_reason(error)) from error
    _check_file(entry, total, stated)
    entry.write_record(size=entry.partial.stat().st_size, sha256=digest(entry.partial), source=source)
    os.replace(entry.partial, entry.path)
    (entry.folder / PARTIAL).unlink(missing_ok=True)


def _is_final(error: Exception) -> bool:
    """Whether asking again is no use: nobody listens there, the name is unknown, the certificate or proxy is wrong."""
    reason = getattr(error.args[0] if error.args else None, "reason", None)
    final = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
    return isinstance(reason, final) or isinstance(
        error, (requests.exceptions.SSLError, requests.exceptions.ProxyError, requests.ConnectTimeout)
    )


def _reason(error: Exception) -> str:
    if isinstance(error, requests.Timeout):
        return "the server did not answer in time"
    inner = getattr(error.args[0] if error.args else None, "reason", None) or error
    text = str(inner).rpartition("object at 0x")[2].partition(": ")[2] or str(inner)
    return text.strip().rstrip(".")


def _check_answer(entry: CacheEntry, source: str, response: requests.Response) -> None:
    status = response.status_code
    if status == 416:  # the partial file is not the beginning of what is there now
        entry.partial.unlink(missing_ok=True)
        raise _Retry("the server has no such part of the file", wait=0.0)
    if status in RETRIED:
        raise _Retry(f"the server answered {status} {response.reason}", _retry_after(response))
    if status not in (200, 206):
        raise _failure(entry, f"the server answered {status} {response.reason} for {source}")
    if source.startswith("https:") and not response.url.startswith("https:"):
        raise _failure(entry, f"the server led to {response.url}, which is not encrypted")


def _retry_after(response: requests.Response) -> float | None:
    """Seconds that the server asks to wait, written as a number or as a date."""
    value = response.headers.get("Retry-After", "")
    if value.isdigit():
        return float(value)
    date = parsedate_tz(value)
    return max(0.0, mktime_tz(date) - time.time()) if date else None


def _range_start(response: requests.Response) -> int:
    first = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdigit() else -1


def _validator(response: requests.Response) -> str | None:
    """What tells that a later answer is of the same file: a strong ETag, else the date of its last change."""
    etag = response.headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")


def _length(response: requests.Response) -> int | None:
    value = response.headers.get("Content-Length", "")
    return int(value) if value.isdigit() else None


def _check_room(entry: CacheEntry, response: requests.Response, offset: int) -> None:
    rest = _length(response) or 0
    free = shutil.disk_usage(entry.folder).free
    if rest > free:
        raise _failure(entry, f"it needs {_mib(rest)} more, and {_mib(free)} are free; VIT_KERAS_HOME moves the cache")
    if rest + offset > LARGEST:
        raise _failure(entry, f"the server says it has {_mib(rest + offset)}, more than any checkpoint")


def _mib(size: float) -> str:
    return f"{size / 2**20:.1f} MiB"


def _receive(entry: CacheEntry, response: requests.Response, offset: int) -> int | None:
    """Write the answer to the partial file; return the length that the server said the whole has."""
    length = _length(response)
    total = None if length is None else offset + length
    console = rich.console.Console(stderr=True)
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.DownloadColumn(binary_units=True),
        rich.progress.TransferSpeedColumn(),
        rich.progress.TimeRemainingColumn(),
    )
    with (
        rich.progress.Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        open(entry.partial, "ab" if offset else "wb") as file,
    ):
        task = progress.add_task(entry.path.name, total=total, completed=offset)
        for piece in response.iter_content(PIECE):
            file.write(piece)
            progress.advance(task, len(piece))
            if file.tell() > LARGEST:
                raise _failure(entry, f"the server sent more than {_mib(LARGEST)}")
    return total


def _stated_digests(response: requests.Response) -> dict[str, str]:
    """Digests that the server states, algorithm → hexadecimal: Google storage's headers, the Hugging Face hub's ETag.

    Reference: Google Cloud Storage XML API, `x-goog-hash`; huggingface_hub `file_download.py`, `X-Linked-Etag` (on the
    answer that redirects to the storage).
    """
    found = {}
    for answer in (*response.history, response):
        for item in answer.headers.get("x-goog-hash", "").split(","):
            name, _, value = item.strip().partition("=")
            if name in ("md5", "crc32c"):
                with contextlib.suppress(ValueError):
                    found[name] = base64.b64decode(value, validate=True).hex()
        for header in ("X-Linked-Etag", "ETag"):
            value = answer.headers.get(header, "").removeprefix("W/").strip('"').lower()
            if len(value) == 64 and set(value) <= set("0123456789abcdef"):
                found.setdefault("sha256", value)
    return found


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
