"""What is asked over HTTP and what the answers say."""

import base64
import contextlib
import os
import time
from email.utils import mktime_tz, parsedate_tz
from urllib.parse import urlsplit

import requests
import urllib3.exceptions


def session() -> requests.Session:
    """A session with the user's proxies and certificates."""
    session = requests.Session()
    # requests reads REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE itself; OpenSSL's own variable it does not.
    session.verify = os.environ.get("SSL_CERT_FILE") or True
    session.headers.update({"User-Agent": "vit-keras-zoo", "Accept-Encoding": "identity"})
    return session


def source_of(url: str) -> str:
    """The address to ask: the mirror's, when there is one."""
    mirror = os.environ.get("VIT_KERAS_MIRROR")
    if not mirror:
        return url
    parts = urlsplit(url)
    return mirror.rstrip("/") + parts.path + (f"?{parts.query}" if parts.query else "")


def is_final(error: Exception) -> bool:
    """Whether asking again is no use: nobody listens there, the name is unknown, the certificate or proxy is wrong."""
    reason = getattr(error.args[0] if error.args else None, "reason", None)
    final = (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError)
    return isinstance(reason, final) or isinstance(
        error, (requests.exceptions.SSLError, requests.exceptions.ProxyError, requests.ConnectTimeout)
    )


def reason_of(error: Exception) -> str:
    if isinstance(error, requests.Timeout):
        return "the server did not answer in time"
    inner = getattr(error.args[0] if error.args else None, "reason", None) or error
    text = str(inner).rpartition("object at 0x")[2].partition(": ")[2] or str(inner)
    return text.strip().rstrip(".")


def retry_after(response: requests.Response) -> float | None:
    """Seconds that the server asks to wait, written as a number or as a date."""
    value = response.headers.get("Retry-After", "")
    if value.isdigit():
        return float(value)
    date = parsedate_tz(value)
    return max(0.0, mktime_tz(date) - time.time()) if date else None


def range_start(response: requests.Response) -> int:
    first = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdigit() else -1


def validator_of(response: requests.Response) -> str | None:
    """What tells that a later answer is of the same file: a strong ETag, else the date of its last change."""
    etag = response.headers.get("ETag", "")
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")


def length_of(response: requests.Response) -> int | None:
    value = response.headers.get("Content-Length", "")
    return int(value) if value.isdigit() else None


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
            if len(value) == 64 and set(value) <= set("0123456789abcdef"):
                found.setdefault("sha256", value)
    return found
