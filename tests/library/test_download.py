"""Downloads against a server that breaks off, stalls, lies and refuses; the cache and its commands."""

import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import trustme
from click.testing import CliRunner

import vit_keras_cli
from tests.conftest import ROOT
from tests.server import serve
from vit_keras import checkpoints, vit
from vit_keras.checkpoints import CacheEntry, DownloadError, download, fetch

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
        ([{"body": b"<!DOCTYPE html><p>Log in"}], 1, "no checkpoint: .*a web page"),
        ([{"body": b""}], 1, "no checkpoint: .*the file is empty"),
        ([{"body": b"\x80\x04\x95evil"}], 1, "no checkpoint: .*a pickle"),
        ([{"body": DATA[:1000]}], 1, "no checkpoint: .*truncated"),
        ([{"headers": {"Content-Length": str(10**18)}}], 1, "it needs .* more"),
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
    monkeypatch.setattr(download.socket, "getaddrinfo", lambda *args, **kwargs: found)
    monkeypatch.setattr(download.socket, "create_connection", drop)
    monkeypatch.setattr(download.time, "monotonic", lambda: clock[0])
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


@pytest.mark.parametrize("harm", ["flipped", "shortened", "record lost"])
def test_a_corrupted_entry_is_fetched_again(harm):
    with serve({PATH: DATA}) as server:
        path = Path(fetch(server.url + PATH))
        if harm == "record lost":
            (path.parent / "record.json").write_text("{")
        else:
            path.write_bytes(DATA[:-1] + (b"" if harm == "shortened" else bytes([DATA[-1] ^ 1])))
        assert read(fetch(server.url + PATH)) == DATA
        assert len(server.requests) == 2
        path.write_bytes(b"gone bad")
    with pytest.raises(DownloadError):
        fetch(server.url + PATH)
    assert path.read_bytes() == b"gone bad"  # what there is stays until there is better


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
