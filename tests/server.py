"""A local HTTP server that can break off, stall, lie and refuse, for the tests of downloads."""

import base64
import contextlib
import functools
import hashlib
import http.server
import re
import ssl
import threading
import time

import google_crc32c


def hashes(data):
    """Headers that Google storage would send."""
    md5 = hashlib.md5(data)
    crc = base64.b64encode(google_crc32c.Checksum(data).digest()).decode()
    return {
        "ETag": f'"{md5.hexdigest()}"',
        "x-goog-hash": f"crc32c={crc},md5={base64.b64encode(md5.digest()).decode()}",
    }


class Server(http.server.ThreadingHTTPServer):
    """Serves `files` (path → bytes); `plan` is a list of faults, one a request, then all goes well.

    A fault is a number (status), or a dict of `status`, `headers`, `cut` (bytes after which the connection closes),
    `stall` (bytes after which it stands still), `trickle` (bytes at a time), `short` (bytes of a partial answer that is
    whole in itself), `body`. What was asked is in `requests`: (path, range).
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, files, plan=(), headers=None, ranges=True, certificate=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.plan, self.requests = files, list(plan), []
        self.hashes = functools.cache(hashes)
        self.headers, self.ranges = headers or {}, ranges
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            certificate.configure_cert(context)
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self.url = f"https://localhost:{self.server_address[1]}"
        self.lock = threading.Lock()

    def handle_error(self, request, client_address):
        pass  # a client that went away is part of the tests


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        server = self.server
        with server.lock:
            server.requests.append((self.path, self.headers.get("Range")))
            fault = server.plan.pop(0) if server.plan else {}
        fault = {"status": fault} if isinstance(fault, int) else fault
        data = fault.get("body", server.files.get(self.path.partition("?")[0]))
        status = fault.get("status", 200 if data is not None else 404)
        if status not in (200, 206):
            return self.answer(status, b"<html>no</html>", fault.get("headers", {}), {})
        headers = {**server.hashes(data), **server.headers, **fault.get("headers", {})}
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted and server.ranges and self.headers.get("If-Range", headers["ETag"]) == headers["ETag"]:
            start = int(wanted[1])
            if start >= len(data):
                return self.answer(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"}, {})
            end = min(len(data), start + fault.get("short", len(data)))
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            status, data = 206, data[start:end]
        return self.answer(status, data, headers, fault)

    def answer(self, status, data, headers, fault):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            if value is not None:
                self.send_header(name, value)
                self.close_connection |= (name, value) == ("Connection", "close")
        self.end_headers()
        for start in range(0, len(data) if "trickle" in fault else 0, fault.get("trickle", 1)):
            self.wfile.write(data[start : start + fault["trickle"]])
            self.wfile.flush()
            threading.Event().wait(0.002)
        if "trickle" in fault:
            return
        limit = fault.get("cut", fault.get("stall"))
        self.wfile.write(data[:limit])
        if limit is not None:
            self.wfile.flush()
            time.sleep(fault.get("seconds", 1.5) if "stall" in fault else 0)
            self.close_connection = True


@contextlib.contextmanager
def serve(files, plan=(), headers=None, ranges=True, certificate=None):
    with Server(files, plan, headers, ranges, certificate) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
