"""What is asked over HTTP and what the answers say."""

import base64
import contextlib
import os
import re
import socket
import threading
import time
from email.utils import mktime_tz, parsedate_tz
from urllib.parse import urljoin, urlsplit, urlunsplit

import requests
import requests.utils
import urllib3.exceptions

PATIENCE = 6.0  # seconds to look a host up and to try its addresses, all together
CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")


class Unreachable(Exception):
    """No connection to a host."""


class Session(requests.Session):
    """A session with the user's proxies and certificates that never follows from https to plain http."""

    def __init__(self):
        super().__init__()
        for name in CERTIFICATES:
            if not os.path.exists(os.environ.get(name) or os.sep):
                raise Unreachable(f"{name} names {os.environ[name]}, which does not exist")
        # requests reads the first two itself; OpenSSL's own variable it does not.
        self.verify = os.environ.get("SSL_CERT_FILE") or True
        self.headers.update({"User-Agent": "vit-keras-zoo", "Accept-Encoding": "identity"})

    def get_redirect_target(self, resp):
        target = super().get_redirect_target(resp)
        if target and resp.url.startswith("https:") and urljoin(resp.url, target).startswith("http:"):
            raise Unreachable(f"the server leads to {public(urljoin(resp.url, target))}, which is not encrypted")
        return target


def address(url: str) -> str:
    """An address that can be fetched; `gs://bucket/…` is Google storage's own name for its public files.

    Raises:
        ValueError: it is of another form.
    """
    if url.startswith("gs://"):
        return f"https://storage.googleapis.com/{url.removeprefix('gs://')}"
    if not url.startswith(("https://", "http://")) or not urlsplit(url).hostname:
        raise ValueError(f"Expected an address of the form https://…, http://… or gs://…. Received: {url!r}")
    return url


def public(url: str) -> str:
    """An address without the user name and password in it."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def is_offline() -> bool:
    """Whether `VIT_KERAS_OFFLINE` forbids the network."""
    return os.environ.get("VIT_KERAS_OFFLINE", "0").lower() not in ("", "0", "false", "no")


def source_of(url: str) -> str:
    """The address to ask: the mirror's, when there is one."""
    mirror = os.environ.get("VIT_KERAS_MIRROR")
    if not mirror:
        return url
    parts = urlsplit(url)
    return address(mirror.rstrip("/") + parts.path + (f"?{parts.query}" if parts.query else ""))


def check_reachable(source: str) -> None:
    """Connect once and let go, unless a proxy does it.

    Storage hosts have a dozen addresses, and where a firewall drops packets each of them would cost a timeout; where
    it drops look-ups, these take long as well, and cannot be interrupted: another thread waits for them.

    Raises:
        Unreachable: there is no connection within `PATIENCE` seconds.
    """
    if requests.utils.select_proxy(source, requests.utils.get_environ_proxies(source)):
        return
    reasons: list[str] = []
    thread = threading.Thread(target=_connect, args=(source, reasons), daemon=True)
    thread.start()
    thread.join(PATIENCE + 1)
    if thread.is_alive():
        reasons.append(f"no answer in {PATIENCE:.0f} seconds")
    if reasons:
        raise Unreachable(f"no connection to {urlsplit(source).hostname}: {reasons[-1]}")


def _connect(source: str, reasons: list[str]) -> None:
    """Try the addresses of a host until one answers or patience ends; leave a reason for each that does not."""
    parts, deadline = urlsplit(source), time.monotonic() + PATIENCE
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reasons.append(f"the name cannot be looked up ({error})")
        return
    for *_, place in found:
        try:
            socket.create_connection((str(place[0]), port), timeout=PATIENCE / 2).close()
        except OSError as error:
            reasons.append(str(error))
            if time.monotonic() >= deadline:
                return
        else:
            reasons.clear()
            return


def is_final(error: Exception) -> bool:
    """Whether asking again is no use: nobody listens there, the name is unknown, the certificate or proxy is wrong."""
    reason = getattr(error.args[0] if error.args else None, "reason", None)
    final = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
    return isinstance(reason, final) or isinstance(
        error, (requests.exceptions.SSLError, requests.exceptions.ProxyError, requests.ConnectTimeout)
    )


def reason_of(error: Exception) -> str:
    """A few words of what went wrong, without the library's own names for things."""
    if isinstance(error, (requests.Timeout, urllib3.exceptions.TimeoutError)):
        return "the server did not answer in time"
    inner = getattr(error.args[0] if error.args else None, "reason", None) or error
    # urllib3 puts its objects before what happened: "<… object at 0x7f…>: Connection refused".
    return re.sub(r"^.*object at 0x\w+>: ", "", str(inner)).strip().rstrip(".")


def _integer(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def retry_after(response: requests.Response) -> float | None:
    """Seconds that the server asks to wait, written as a number or as a date."""
    value = response.headers.get("Retry-After", "")
    seconds = _integer(value)
    if seconds is not None:
        return float(seconds)
    with contextlib.suppress(ValueError, OverflowError, TypeError):
        date = parsedate_tz(value)
        return max(0.0, mktime_tz(date) - time.time()) if date else None
    return None


def range_start(response: requests.Response) -> int | None:
    """First byte of a partial answer."""
    return _integer(response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0])


def length_of(response: requests.Response) -> int | None:
    """Bytes of the answer itself."""
    return _integer(response.headers.get("Content-Length", ""))


def total_of(response: requests.Response, offset: int) -> int | None:
    """Bytes of the whole file, as the server says."""
    said = _integer(response.headers.get("Content-Range", "").rpartition("/")[2])
    length = length_of(response)
    if said is None and length is not None:
        return length + (offset if response.status_code == 206 else 0)
    return said


def validator_of(response: requests.Response) -> str | None:
    """What tells that a later answer is of the same file: a strong ETag, else the date of its last change."""
    etag = response.headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")


def stated_digests(response: requests.Response) -> dict[str, str]:
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
            if re.fullmatch("[0-9a-f]{64}", value):
                found.setdefault("sha256", value)
    return found
