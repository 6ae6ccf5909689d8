"""A store in a bucket of the Hugging Face Hub, by the client's own filesystem.

The service needs an account. Here a stand-in answers the Hub's API of buckets: listings, batches, tokens and downloads.
The client's own Xet library keeps the content in a directory of this host, which only one process at a time can open.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
hf_xet = pytest.importorskip("hf_xet", reason="hf_xet is not installed")

import tierfs
from tierfs.store.maintenance.gc import GcOptions, collect

BUCKET = "somebody/checkpoints"
MIB = 1 << 20


class Hub(ThreadingHTTPServer):
    """The Hub's API for one bucket."""

    daemon_threads = True

    def __init__(self, directory):
        super().__init__(("127.0.0.1", 0), Answer)
        self.directory = directory
        self.files = {}  # by path: Xet hash, size and time
        self.session = hf_xet.XetSession()
        self.lock = threading.Lock()

    def content(self, path):
        found = self.files[path]
        out = self.directory / f"out-{time.monotonic_ns()}"
        with self.session.new_file_download_group(endpoint=f"local://{self.directory}") as group:
            group.start_download_file(hf_xet.XetFileInfo(found["xetHash"], found["size"]), str(out))
        data = out.read_bytes()
        out.unlink()
        return data


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def send(self, data, status=200, **headers):
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, kind="EntryNotFound"):
        self.send({"error": "not found"}, 404, **{"X-Error-Code": kind})

    def do_GET(self):
        url, hub = urlsplit(self.path), self.server
        base = f"/api/buckets/{BUCKET}"
        if url.path == base:
            created = "2026-01-01T00:00:00.000Z"
            self.send({"id": BUCKET, "private": True, "createdAt": created, "size": 0, "totalFiles": len(hub.files)})
        elif url.path.startswith(f"{base}/xet-"):
            self.send({"accessToken": "t", "exp": int(time.time()) + 3600, "casUrl": f"local://{hub.directory}"})
        elif url.path.startswith(f"{base}/tree"):
            prefix = unquote(url.path.removeprefix(f"{base}/tree")).strip("/")
            self.send(self.tree(prefix, recursive=parse_qs(url.query).get("recursive") in (["true"], ["True"])))
        elif url.path.startswith(f"/buckets/{BUCKET}/resolve/"):
            self.resolve(unquote(url.path.removeprefix(f"/buckets/{BUCKET}/resolve/")))
        else:
            self.missing("RepoNotFound")

    do_HEAD = do_GET  # noqa: N815 - the name that the server asks for

    def tree(self, prefix, *, recursive):
        found, folders = [], set()
        with self.server.lock:
            files = sorted(self.server.files.items())
        for path, about in files:
            if prefix and not path.startswith(f"{prefix}/"):
                continue
            rest = path[len(prefix) :].lstrip("/")
            if recursive or "/" not in rest:
                found.append({"type": "file", "path": path, **about})
            else:
                folders.add(path[: len(path) - len(rest)] + rest.partition("/")[0])
        at = "2026-01-01T00:00:00.000Z"
        return found + [{"type": "directory", "path": path, "uploadedAt": at} for path in sorted(folders)]

    def resolve(self, path):
        if path not in self.server.files:
            self.missing()
            return
        data, asked = self.server.content(path), self.headers.get("Range")
        if asked is None:
            self.send(data)
            return
        start, _, stop = asked.removeprefix("bytes=").partition("-")
        self.send(data[int(start) : int(stop) + 1 if stop else None], 206)

    def do_POST(self):
        body = (
            self.rfile.read(int(self.headers["Content-Length"])) if "Content-Length" in self.headers else self.chunks()
        )
        hub = self.server
        if self.path.endswith("/batch"):
            with hub.lock:
                for line in body.splitlines():
                    change = json.loads(line)
                    if change["type"] == "addFile":
                        size = self.size_of(change["xetHash"])
                        moment = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(change["mtime"] / 1000))
                        hub.files[change["path"]] = {"xetHash": change["xetHash"], "size": size, "mtime": moment}
                    else:
                        hub.files.pop(change["path"], None)
            self.send({"success": True, "processed": 1, "succeeded": 1, "failed": []})
        elif self.path.endswith("/paths-info"):
            paths = json.loads(body)["paths"]
            self.send([{"type": "file", "path": path, **hub.files[path]} for path in paths if path in hub.files])
        else:
            self.missing()

    def chunks(self):
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def size_of(self, xet_hash):
        out = self.server.directory / f"size-{time.monotonic_ns()}"
        with self.server.session.new_file_download_group(endpoint=f"local://{self.server.directory}") as group:
            group.start_download_file(hf_xet.XetFileInfo(xet_hash), str(out))
        size = out.stat().st_size
        out.unlink()
        return size


@pytest.fixture
def hub(tmp_path):
    directory = tmp_path / "cas"
    directory.mkdir()
    hub = Hub(directory)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    yield hub
    hub.shutdown()
    thread.join()
    hub.server_close()


@pytest.fixture
def options(hub):
    return {"endpoint": f"http://127.0.0.1:{hub.server_port}", "token": "hf_nobody"}


def test_a_bucket_is_a_single_writer_store(options):
    store = tierfs.init(f"hf://buckets/{BUCKET}/run", options=options)
    assert store.descriptor.single_writer
    assert not store.descriptor.endpoint.conditional_create
    fs = tierfs.TierFileSystem(target_protocol="hf", target_options=options, ram="0", nvme="0")
    data = bytes(range(256)) * (3 * MIB // 256)
    fs.pipe_file(f"buckets/{BUCKET}/run/step_1/a", data)
    fs.pipe_file(f"buckets/{BUCKET}/run/step_1/b", b"small")
    assert fs.cat_file(f"buckets/{BUCKET}/run/step_1/a") == data
    assert fs.cat_file(f"buckets/{BUCKET}/run/step_1/a", 1000, 2000) == data[1000:2000]
    assert {path.rpartition("/")[2] for path in fs.find(f"buckets/{BUCKET}/run")} == {"a", "b"}
    fs.rm_file(f"buckets/{BUCKET}/run/step_1/b")
    assert not fs.exists(f"buckets/{BUCKET}/run/step_1/b")
    assert collect(store, GcOptions(dry_run=True)).reached.count == 1
