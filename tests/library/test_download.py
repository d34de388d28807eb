"""Downloads against a server that breaks off, stalls, lies and refuses; the cache and its commands."""

import email.utils
import hashlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import filelock
import numpy as np
import pytest
import trustme
from click.testing import CliRunner

import vit_keras_cli
from tests.conftest import ROOT
from tests.server import serve
from vit_keras import checkpoints, vit
from vit_keras.checkpoints import CacheEntry, DownloadError, cache, download, fetch, http

PATH = "/vit_models/imagenet21k/a.npz"


def npz(size=300_000, seed=0):
    """A valid archive of about `size` bytes that does not compress."""
    buffer = io.BytesIO()
    np.savez(buffer, x=np.random.default_rng(seed).normal(size=size // 8))
    return buffer.getvalue()


DATA = npz()
PIECE = download.PIECE


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("VIT_KERAS_HOME", str(tmp_path / "cache"))
    for name in ("VIT_KERAS_MIRROR", "VIT_KERAS_OFFLINE", "HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "TIMEOUT", (2.0, 0.5))
    waits = []
    monkeypatch.setattr(download.time, "sleep", waits.append)
    return waits


def read(path):
    return Path(path).read_bytes()


def leftovers(url):
    return sorted(path.name for path in CacheEntry.of(url).folder.iterdir())


def test_a_file_comes_once_and_whole():
    with serve({PATH: DATA}) as server:
        path = fetch(server.url + PATH)
        assert read(path) == DATA
        assert fetch(server.url + PATH) == path
        assert len(server.requests) == 1
        assert leftovers(server.url + PATH) == ["a.npz", "lock", "record.json"]
    assert fetch(server.url + PATH) == path  # with the server gone


@pytest.mark.parametrize("fault", [{"cut": 3 * PIECE}, {"stall": 3 * PIECE}], ids=["breaks off", "stalls"])
def test_a_broken_transfer_is_resumed(fault):
    with serve({PATH: DATA}, [fault]) as server:
        assert read(fetch(server.url + PATH)) == DATA
        assert server.requests == [(PATH, None), (PATH, "bytes=196608-")]


def test_many_breaks_with_progress_are_no_failure():
    with serve({PATH: DATA}, [{"cut": 2 * PIECE}] * 2) as server:
        assert read(fetch(server.url + PATH)) == DATA
        assert [wanted for _, wanted in server.requests][1:] == [f"bytes={2 * PIECE * i}-" for i in range(1, 3)]


def test_a_server_without_ranges_sends_all_again():
    with serve({PATH: DATA}, [{"cut": 3 * PIECE}], ranges=False) as server:
        assert read(fetch(server.url + PATH)) == DATA


def test_a_file_that_changed_meanwhile_is_not_mixed():
    other = npz(seed=1)
    with serve({PATH: other}, [{"body": DATA, "cut": 3 * PIECE}]) as server:
        assert read(fetch(server.url + PATH)) == other
    with serve({PATH: other}, [{"body": DATA, "cut": 3 * PIECE}], {"ETag": "W/weak"}) as server:
        assert read(fetch(server.url + PATH)) == other
        assert server.requests[1] == (PATH, None)


def test_a_partial_file_longer_than_the_file_starts_anew():
    with serve({PATH: DATA}, [{"cut": 3 * PIECE}, 404]) as server:
        with pytest.raises(DownloadError, match="404"):
            fetch(server.url + PATH)
        entry = CacheEntry.of(server.url + PATH)
        entry.partial.write_bytes(DATA + b"more")
        assert read(fetch(server.url + PATH)) == DATA


@pytest.mark.parametrize(
    ("plan", "waits"),
    [([503, 500, 429], [1.0, 2.0, 4.0]), ([{"status": 503, "headers": {"Retry-After": "7"}}], [7.0])],
)
def test_a_busy_server_is_asked_again_after_a_while(plan, waits, home):
    with serve({PATH: DATA}, plan) as server:
        assert read(fetch(server.url + PATH)) == DATA
    assert home == waits


@pytest.mark.parametrize(
    ("plan", "requests", "message"),
    [
        ([404], 1, "answered 404 Not Found"),
        ([403], 1, "answered 403 Forbidden"),
        ([503] * 9, 5, "answered 503 Service Unavailable, again and again"),
        ([{"cut": 10}] * 9, 5, "again and again"),
        ([{"headers": {"x-goog-hash": "md5=AAAAAAAAAAAAAAAAAAAAAA=="}}] * 9, 2, "its md5 is not the one"),
        ([{"headers": {"x-goog-hash": "crc32c=AAAAAA=="}}] * 9, 2, "its crc32c is not the one"),
        ([{"headers": {"ETag": f'"{"0" * 64}"'}}] * 9, 2, "its sha256 is not the one"),
        ([{"body": b"<!DOCTYPE html><p>Log in"}], 1, "of another kind: .*a web page"),
        ([{"body": b""}], 1, "of another kind: .*the file is empty"),
        ([{"body": b"\x80\x04\x95evil"}], 1, "of another kind: .*a pickle"),
        ([{"body": DATA[:1000]}], 1, "of another kind: .*truncated"),
        ([{"headers": {"Content-Length": str(10**18)}}], 1, "more than any checkpoint"),
    ],
)
def test_what_goes_wrong_is_said_and_leaves_nothing_wrong(plan, requests, message):
    with serve({PATH: DATA}, plan) as server:
        url = server.url + PATH
        with pytest.raises(DownloadError, match=message) as caught:
            fetch(url)
        assert len(server.requests) == requests
        for part in (url, str(CacheEntry.of(url).path), "weights='/path/a.npz'"):
            assert part in str(caught.value)
        assert not CacheEntry.of(url).path.exists()
        server.plan.clear()
        assert read(fetch(url)) == DATA


def test_one_lie_is_forgiven():
    with serve(
        {PATH: DATA}, [{"body": DATA[:-1] + b"x", "headers": {"x-goog-hash": "md5=AAAAAAAAAAAAAAAAAAAAAA=="}}]
    ) as server:
        assert read(fetch(server.url + PATH)) == DATA


def test_hub_digest_of_the_redirecting_answer():
    good = {"X-Linked-Etag": f'"{hashlib.sha256(DATA).hexdigest()}"'}
    for linked, fine in ((good, True), ({"X-Linked-Etag": f'"{"1" * 64}"'}, False)):
        with serve({"/cdn/a.npz": DATA}, []) as server:
            redirect = {"status": 302, "headers": {"Location": f"{server.url}/cdn/a.npz", **linked}}
            server.plan = [redirect] if fine else [redirect, {}, redirect, {}]
            if fine:
                assert read(fetch(server.url + "/org/model/resolve/main/a.npz")) == DATA
            else:
                with pytest.raises(DownloadError, match="sha256"):
                    fetch(server.url + "/org/model/resolve/main/a.npz")


def test_refused_connection_and_unknown_name_are_not_retried(home):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        urls = [f"http://127.0.0.1:{free.getsockname()[1]}{PATH}", f"http://no-such-host.invalid{PATH}"]
    for url in urls:
        start = time.monotonic()
        with pytest.raises(DownloadError) as caught:
            fetch(url)
        assert time.monotonic() - start < 5
        assert "object at 0x" not in str(caught.value)
    assert home == []


def test_a_host_whose_packets_are_dropped_costs_two_timeouts(monkeypatch):
    clock, tried = [0.0], []

    def drop(address, timeout):
        tried.append(address)
        clock[0] += timeout
        raise TimeoutError("timed out")

    found = [(2, 1, 6, "", (f"192.0.2.{i}", 443)) for i in range(16)]
    monkeypatch.setattr(http.socket, "getaddrinfo", lambda *args, **kwargs: found)
    monkeypatch.setattr(http.socket, "create_connection", drop)
    monkeypatch.setattr(http.time, "monotonic", lambda: clock[0])
    with pytest.raises(DownloadError, match=r"no connection to storage\.googleapis\.com: timed out"):
        fetch("https://storage.googleapis.com/a.npz")
    assert tried == [("192.0.2.0", 443), ("192.0.2.1", 443)]


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", None])
def test_certificates_of_the_usual_variables(variable, monkeypatch, tmp_path, home):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    with serve({PATH: DATA}, certificate=authority.issue_cert("localhost")) as server:
        if variable:
            monkeypatch.setenv(variable, str(tmp_path / "ca.pem"))
            assert read(fetch(server.url + PATH)) == DATA
        else:
            with pytest.raises(DownloadError, match="certificate verify failed"):
                fetch(server.url + PATH)
    assert home == []


@pytest.mark.parametrize("harm", ["flipped", "shortened"])
def test_a_corrupted_entry_is_fetched_again(harm):
    with serve({PATH: DATA}) as server:
        path = Path(fetch(server.url + PATH))
        path.write_bytes(DATA[:-1] + (b"" if harm == "shortened" else bytes([DATA[-1] ^ 1])))
        assert read(fetch(server.url + PATH)) == DATA
        assert len(server.requests) == 2
        path.write_bytes(b"gone bad")
    with pytest.raises(DownloadError):
        fetch(server.url + PATH)
    assert path.read_bytes() == b"gone bad"  # what there is stays until there is better


def test_a_file_brought_by_other_means_is_taken():
    """The message says where a file would lie: one that is put there works, with or without a network."""
    url = "http://no-such-host.invalid/a.npz"
    entry = CacheEntry.of(url)
    with pytest.raises(DownloadError, match=re.escape(str(entry.path))):
        fetch(url)
    entry.folder.mkdir(parents=True, exist_ok=True)
    entry.path.write_bytes(b"no archive")
    with pytest.raises(DownloadError, match=r"not fetched by vit-keras, and .*not an archive"):
        fetch(url)
    assert entry.path.read_bytes() == b"no archive"
    entry.path.write_bytes(DATA)
    assert read(fetch(url)) == DATA
    assert entry.state() == "ok"


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def test_damage_that_no_digest_tells_is_found_by_the_archive():
    headers = {"x-goog-hash": None, "ETag": "W/weak"}
    with serve({PATH: DATA}, [{"body": flipped(DATA)}], headers) as server:
        with pytest.raises(DownloadError, match="is damaged"):
            fetch(server.url + PATH)
        assert read(fetch(server.url + PATH)) == DATA


def test_lies_between_breaks_come_to_an_end():
    lie = {"x-goog-hash": "md5=AAAAAAAAAAAAAAAAAAAAAA=="}
    with serve({PATH: DATA}, [{"cut": 3 * PIECE, "headers": lie}, {"headers": lie}] * 9) as server:
        with pytest.raises(DownloadError, match="its md5"):
            fetch(server.url + PATH)
        assert len(server.requests) == 4


def test_a_partial_file_that_is_whole_is_not_fetched_again():
    """A process killed between the last byte and the rename."""
    with serve({PATH: DATA}, [{"cut": 3 * PIECE}, 404]) as server:
        with pytest.raises(DownloadError, match="404"):
            fetch(server.url + PATH)
        CacheEntry.of(server.url + PATH).partial.write_bytes(DATA)
        assert read(fetch(server.url + PATH)) == DATA
        assert server.requests[2:] == [(PATH, f"bytes={len(DATA)}-")]


def test_a_short_partial_answer_is_gone_on_with():
    with serve({PATH: DATA}, [{"cut": PIECE}, {"short": PIECE}]) as server:
        assert read(fetch(server.url + PATH)) == DATA
        assert server.requests[2] == (PATH, f"bytes={2 * PIECE}-")


def test_another_part_than_asked_for_starts_anew():
    wrong = {"headers": {"Content-Range": f"bytes 5-{len(DATA) - 1}/{len(DATA)}"}, "status": 206, "body": DATA[5:]}
    with serve({PATH: DATA}, [{"cut": 2 * PIECE}, wrong]) as server:
        assert read(fetch(server.url + PATH)) == DATA


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Length": "²", "Connection": "close"},
        {"x-goog-hash": "md5=?,crc32c"},
        {"ETag": "²" * 64},
    ],
)
def test_odd_headers_are_no_traceback(headers):
    with serve({PATH: DATA}, [{"headers": headers}]) as server:
        assert read(fetch(server.url + PATH)) == DATA


@pytest.mark.parametrize("value", ["²", "Mon, 01 Jan 99999 00:00:00 GMT", "soon"])
def test_odd_retry_after(value, home):
    with serve({PATH: DATA}, [{"status": 503, "headers": {"Retry-After": value}}]) as server:
        assert read(fetch(server.url + PATH)) == DATA
    assert home == [1.0]


def test_waits_are_bounded_and_dates_understood(home):
    later = email.utils.formatdate(time.time() + 20, usegmt=True)
    plan = [{"status": 503, "headers": {"Retry-After": value}} for value in ("9999", later)]
    with serve({PATH: DATA}, plan) as server:
        assert read(fetch(server.url + PATH)) == DATA
    assert home[0] == 30.0
    assert 15 < home[1] <= 20


def test_progress_forgives_any_number_of_breaks(monkeypatch):
    monkeypatch.setattr(download, "PIECE", 2**12)
    with serve({PATH: DATA}, [{"cut": 2**14}] * 15) as server:
        assert read(fetch(server.url + PATH)) == DATA
        assert len(server.requests) == 16


def test_a_trickle_is_a_stall(monkeypatch):
    monkeypatch.setattr(download, "SLOWEST", -1.0)
    monkeypatch.setattr(download, "PIECE", len(DATA) // 2)
    with serve({PATH: DATA}, [{"trickle": 1000}] * 20) as server, pytest.raises(DownloadError, match="sends less than"):
        fetch(server.url + PATH)


def test_no_more_than_the_largest_is_taken(monkeypatch):
    monkeypatch.setattr(download, "LARGEST", 2 * PIECE)
    with serve({PATH: DATA}, [{}, {"headers": {"Content-Length": None, "Connection": "close"}}]) as server:
        for message in ("more than any checkpoint", "the server sent more than"):
            with pytest.raises(DownloadError, match=message):
                fetch(server.url + PATH)


def test_another_source_does_not_go_on_with_a_part(monkeypatch):
    url = "https://storage.googleapis.com" + PATH
    with serve({PATH: DATA}, [{"cut": 3 * PIECE}, 404]) as one, serve({PATH: DATA}) as two:
        monkeypatch.setenv("VIT_KERAS_MIRROR", one.url)
        with pytest.raises(DownloadError):
            fetch(url)
        monkeypatch.setenv("VIT_KERAS_MIRROR", two.url)
        fetch(url)
        assert two.requests == [(PATH, None)]


def test_passwords_of_a_mirror_stay_out_of_records_and_messages(monkeypatch):
    url = "https://storage.googleapis.com" + PATH
    with serve({PATH: DATA}, [404]) as server:
        monkeypatch.setenv("VIT_KERAS_MIRROR", server.url.replace("//", "//alice:s3cret@"))
        with pytest.raises(DownloadError) as caught:
            fetch(url)
        path = Path(fetch(url))
    assert "s3cret" not in str(caught.value)
    assert "s3cret" not in (path.parent / "record.json").read_text()


def test_no_way_from_https_to_http(monkeypatch, tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))
    with serve({PATH: DATA}) as plain, serve({}, certificate=authority.issue_cert("localhost")) as server:
        server.plan = [{"status": 302, "headers": {"Location": plain.url + PATH}}]
        with pytest.raises(DownloadError, match="which is not encrypted"):
            fetch(server.url + PATH)
        assert plain.requests == []


def test_settings_that_are_wrong_are_named(monkeypatch):
    with serve({PATH: DATA}) as server:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/no/such.pem")
        with pytest.raises(DownloadError, match=r"REQUESTS_CA_BUNDLE names /no/such\.pem, which does not exist"):
            fetch(server.url + PATH)
    monkeypatch.delenv("VIT_KERAS_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.home() == Path("/somewhere/vit-keras")
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-this-name/x")
    with pytest.raises(ValueError, match="set VIT_KERAS_HOME"):
        fetch(server.url + PATH)


@pytest.mark.parametrize("url", ["s3://bucket/a.npz", "hf://a/b", "ftp://h/a.npz", "https://", "http:///a.npz"])
def test_addresses_of_other_forms(url):
    with pytest.raises(ValueError, match=r"Expected an address of the form https://"):
        fetch(url)


def test_googles_own_form_of_an_address(monkeypatch):
    with serve({PATH: DATA}) as server:
        monkeypatch.setenv("VIT_KERAS_MIRROR", server.url)
        assert fetch("gs:/" + PATH) == fetch("https://storage.googleapis.com" + PATH)


@pytest.mark.parametrize("variable", ["NO_PROXY", "http_proxy"])
def test_other_proxies_do_not_hide_an_unreachable_host(variable, monkeypatch):
    monkeypatch.setenv(variable, "http://localhost:9")
    monkeypatch.setattr(http, "PATIENCE", 0.1)
    monkeypatch.setattr(http.socket, "getaddrinfo", lambda *args, **kwargs: threading.Event().wait(1) or [])
    monkeypatch.setattr(http.threading.Thread, "join", lambda self, timeout=None: None)
    with pytest.raises(DownloadError, match="no answer in"):
        fetch("https://storage.googleapis.com/a.npz")


def test_two_files_of_one_name_never_meet():
    other = npz(seed=2)
    with serve({"/x/a.npz": DATA, "/y/a.npz": other}) as server:
        assert read(fetch(server.url + "/x/a.npz")) == DATA
        assert read(fetch(server.url + "/y/a.npz")) == other
        assert read(fetch(server.url + "/y/a.npz?version=2")) == other
        assert len(server.requests) == 3


def test_hostile_names_stay_in_the_cache():
    for url in ("http://h/%2e%2e/%2e%2e/%2fetc%2fpasswd", "http://h/..", "http://h/", "http://u:p@h:1/a%00.npz"):
        entry = CacheEntry.of(url)
        assert entry.path.parent == entry.folder
        assert entry.folder.parent == Path(os.environ["VIT_KERAS_HOME"]) / "downloads"
        assert "p@" not in str(entry.folder)


def test_mirror_and_offline(monkeypatch):
    url = "https://storage.googleapis.com" + PATH
    with serve({"/mirror" + PATH: DATA}) as server:
        monkeypatch.setenv("VIT_KERAS_MIRROR", server.url + "/mirror/")
        monkeypatch.setenv("VIT_KERAS_OFFLINE", "1")
        with pytest.raises(DownloadError, match="VIT_KERAS_OFFLINE"):
            fetch(url)
        monkeypatch.setenv("VIT_KERAS_OFFLINE", "0")
        path = fetch(url)
    monkeypatch.setenv("VIT_KERAS_OFFLINE", "1")
    assert fetch(url) == path


def test_proxy_of_the_usual_variable(monkeypatch):
    with serve({"http://files.example/a.npz": DATA}) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert read(fetch("http://files.example/a.npz")) == DATA
        assert proxy.requests == [("http://files.example/a.npz", None)]


def test_unwritable_cache(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VIT_KERAS_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="VIT_KERAS_HOME moves it"):
        fetch("http://127.0.0.1:1/a.npz")


def test_threads_share_one_transfer():
    with serve({PATH: DATA}) as server:
        found = []
        threads = [threading.Thread(target=lambda: found.append(fetch(server.url + PATH))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1
        assert len(server.requests) == 1


FETCH = "import sys; from vit_keras.checkpoints import fetch; print(fetch(sys.argv[1]))"


def process(url):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.Popen([sys.executable, "-c", FETCH, url], env=environment, cwd=ROOT, stdout=subprocess.PIPE)


def kill_at_half_and_resume(data):
    half = len(data) // 2
    with serve({PATH: data}, [{"stall": half, "seconds": 60}]) as server:
        server.hashes(data)  # beforehand: the client does not wait long
        entry = CacheEntry.of(server.url + PATH)
        child = process(server.url + PATH)
        deadline = time.monotonic() + 60
        while not (entry.partial.exists() and entry.partial.stat().st_size > half - 2**21):
            assert time.monotonic() < deadline, "the transfer did not come to its half"
            threading.Event().wait(0.05)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        have = entry.partial.stat().st_size
        path = fetch(server.url + PATH)
        assert hashlib.sha256(read(path)).digest() == hashlib.sha256(data).digest()
        assert server.requests[1] == (PATH, f"bytes={have}-")


def test_a_killed_download_goes_on():
    kill_at_half_and_resume(npz(8 * 2**20))


@pytest.mark.slow
def test_a_large_killed_download_goes_on():
    kill_at_half_and_resume(npz(350 * 2**20))


def test_processes_share_one_transfer():
    with serve({PATH: DATA}, [{"stall": len(DATA) // 2, "seconds": 0.3}]) as server:
        children = [process(server.url + PATH) for _ in range(2)]
        outputs = {child.communicate()[0] for child in children}
        assert len(outputs) == 1
        assert {child.returncode for child in children} == {0}
        assert len(server.requests) <= 2  # the second goes on where the first was cut off


def cli(*arguments, **options):
    return CliRunner(env={"COLUMNS": "200"}).invoke(vit_keras_cli.main, ["cache", *arguments], **options)


def test_cache_commands(tmp_path):
    assert "0 in" in cli("list").output
    with serve({"/x/a.npz": DATA, "/y/b.npz": npz(seed=3)}) as server:
        paths = [Path(fetch(server.url + name)) for name in ("/x/a.npz", "/y/b.npz")]
    listed = cli("list").output
    assert "a.npz" in listed
    assert f"{server.url}/y/b.npz" in listed
    assert cli("verify").exit_code == 0
    paths[1].write_bytes(b"x")
    result = cli("verify")
    assert result.exit_code == 1
    assert "ok         a.npz" in result.output
    assert "corrupted  b.npz" in result.output
    users = tmp_path / "cache" / "downloads" / "mine"
    users.mkdir()
    (users / "record.json").write_text(json.dumps({"url": f"{server.url}/x/a.npz"}))
    assert cli("clean", input="n\n").exit_code == 1
    assert paths[0].exists()
    assert "0.3 MiB freed" in cli("clean", "*a.npz", "--yes").output
    assert not paths[0].parent.exists()
    assert paths[1].exists()
    cli("clean", "--yes")
    assert not paths[1].parent.exists()
    assert users.exists(), "a folder that is not ours was removed"
    assert "nothing to remove" in cli("clean").output


def test_clean_leaves_what_is_not_ours(tmp_path):
    with serve({"/x/a.npz": DATA, "/y/b.npz": DATA}) as server:
        first, second = (Path(fetch(server.url + name)).parent for name in ("/x/a.npz", "/y/b.npz"))
    (first / "notes.txt").write_text("mine")
    moved = tmp_path / "moved"
    second.rename(moved)
    second.symlink_to(moved)
    odd = first.parent / "odd"
    odd.mkdir()
    (odd / "record.json").write_text(json.dumps({"url": "http://[oops"}))
    assert cli("list").output.startswith("1 in")
    assert cli("clean", "--yes").exit_code == 0
    assert [path.name for path in first.iterdir()] == ["notes.txt"]
    assert (moved / "b.npz").exists()


def test_clean_leaves_what_is_being_fetched():
    with serve({PATH: DATA}) as server:
        entry = CacheEntry.of(server.url + PATH)
        fetch(server.url + PATH)
        with filelock.FileLock(entry.lock):
            result = cli("clean", "--yes")
            assert result.exit_code == 1
            assert "is being fetched" in result.stderr
            assert entry.path.exists()
    assert cli("clean", "--yes").exit_code == 0


def test_no_network_is_one_sentence_in_seconds():
    code = """
import sys, time
from vit_keras import vit
start = time.monotonic()
try:
    vit.vit_b16(pretrained=True)
finally:
    print(time.monotonic() - start)
"""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "VIT_KERAS_MIRROR": "http://no-such-host.invalid"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    last = result.stderr.strip().splitlines()[-1]
    assert (
        "https://storage.googleapis.com/vit_models/imagenet21k+imagenet2012/ViT-B_16.npz could not be fetched" in last
    )
    assert os.environ["VIT_KERAS_HOME"] in last
    assert "weights='/path/ViT-B_16.npz'" in last
    assert float(result.stdout) < 10


def test_weights_from_an_address_and_by_name(monkeypatch, tmp_path):
    model = vit.vit_ti16(pretrained=False, image_size=32)
    checkpoints.save_npz(model, tmp_path / "ti.npz")
    data = read(tmp_path / "ti.npz")
    name = "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-steps_20k-lr_0.03-res_384.npz"
    with serve({f"/vit_models/augreg/{name}": data}) as server:
        monkeypatch.setenv("VIT_KERAS_MIRROR", server.url)
        for weights in ("imagenet21k+imagenet2012", "augreg_in21k_ft_in1k_384", f"augreg/{name}"):
            with pytest.warns(UserWarning, match="all zeros"):
                loaded = vit.vit_ti16(weights=weights, image_size=32)
            np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
        with pytest.warns(UserWarning, match="all zeros"):
            vit.vit_ti16(weights=f"{server.url}/vit_models/augreg/{name}", image_size=32)
        assert len(server.requests) == 2
