"""The GCS backend against a fake as strict as the cloud. `test_lax_servers` tests the emulator, which is not."""

import contextlib
import gzip
import http.server
import os
import subprocess
import sys
import threading

import pytest
from servers import gcs_emulator, gcs_fake
from servers.server import gcs

from tierfs.testing import ObjectTierTests

gcs_fake.require()

import tierfs
from tierfs.errors import InvalidInputError, StoreError
from tierfs.objects import CREATE, as_promised, connect, probe
from tierfs.objects.checksums import compute
from tierfs.store import verify

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def fake():
    with gcs_fake.running() as server:
        yield server


@pytest.fixture(scope="module")
def emulator():
    gcs_emulator.require()
    with gcs_emulator.running() as server:
        yield server


def backend_on(server):
    return connect("gs", server.new_root(), server.options, attempts=1)


@pytest.fixture
def backend(fake):
    return backend_on(fake)


class TestGCSObjects(ObjectTierTests):
    @pytest.fixture
    def objects(self, backend):
        return as_promised(backend, probe(backend).capabilities)


def test_what_the_server_heeds_is_found_out_and_nothing_is_left_behind(backend):
    findings = probe(backend)
    assert [test.name for test in findings.tests if not test.kept] == []
    assert not findings.capabilities.single_writer
    assert findings.capabilities.checksums == ("crc32c", "md5")
    assert list(backend.list("")) == []


@pytest.mark.parametrize("content", [b"\r\n--", b"\r\n--==0==--\r\n", b"--\r\n\r\n--", b"\r", b"\n", b"\r\n" * 3])
@pytest.mark.parametrize("server", ["fake", "emulator"])
def test_content_that_looks_like_the_end_of_an_upload_is_stored_whole(server, content, request):
    backend = backend_on(request.getfixturevalue(server))
    for key, whole in [("a", content), ("b", b"before" + content), ("c", content + b"after")]:
        backend.put(key, [whole], mode=CREATE, checksum=compute("crc32c", [whole]))
        assert backend.read(key, 100)[0] == whole


@pytest.mark.parametrize("algorithm", ["crc32c", "md5"])
@pytest.mark.parametrize("server", ["fake", "emulator"])
def test_other_bytes_than_were_meant_are_refused_by_the_server(server, algorithm, request):
    backend = backend_on(request.getfixturevalue(server))
    right = compute(algorithm, [b"content"])
    with pytest.raises(StoreError, match="do not have the checksum"):
        backend.put("a", [b"c0ntent"], checksum=right)
    assert list(backend.list("")) == []
    backend.put("a", [b"content"], checksum=right)


def test_what_somebody_stored_compressed_comes_as_it_is_stored(fake):
    import fsspec

    root = fake.new_root()
    stored = gzip.compress(b"something " * 100)
    fs = fsspec.filesystem("gcs", **fake.options)
    fs.pipe_file(f"{root}/a", stored, fixed_key_metadata={"content_encoding": "gzip"})
    backend = connect("gs", root, fake.options, attempts=1)
    content, info = backend.read("a", 1000)
    assert (content, info) == (stored, backend.head("a"))
    out = bytearray(10)
    backend.get("a", [(5, memoryview(out))])
    assert out == stored[5:15]


def test_a_time_is_the_same_however_it_is_asked_for(backend):
    put = backend.put("a", [b"content"])
    [listed] = backend.list("")
    times = {each.modified_ns for each in (put, backend.head("a"), backend.read("a", 100)[1], listed)}
    assert len(times) == 1
    assert times != {0}


def test_a_bucket_that_is_not_there_is_told(fake):
    backend = connect("gs", "no-such-bucket/root", fake.options, attempts=1)
    for act in (lambda: backend.put("a", [b"content"]), lambda: backend.head("a"), lambda: list(backend.list(""))):
        with pytest.raises(StoreError, match="create gs://no-such-bucket"):
            act()


@pytest.mark.parametrize("options", [{"access": "all"}, {"token": 5}, {"token": {"type": "service_account"}}])
def test_an_option_that_is_wrong_is_told(options):
    with pytest.raises(InvalidInputError, match="gs://"):
        connect("gs", "bucket/root", options).head("a")


@contextlib.contextmanager
def refusing_server(status):
    """Run a server that refuses with this status; yield its port and the requests."""
    asked = []

    class Refusal(http.server.BaseHTTPRequestHandler):
        def answer(self):
            asked.append(self.headers)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Retry-After", "7")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the names are given

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1], asked
        finally:
            server.shutdown()


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_server_that_asks_for_patience_is_asked_once(status):
    actions = [
        lambda backend: backend.put("a", [b"content"]),
        lambda backend: backend.head("a"),
        lambda backend: backend.read("a", 100),
        lambda backend: list(backend.list("")),
        lambda backend: backend.delete(["a"]),
    ]
    with refusing_server(status) as (port, asked):
        backend = connect("gs", "bucket/root", gcs(port).options, attempts=1)
        for number, act in enumerate(actions):
            with pytest.raises(StoreError) as error:
                act(backend)
            assert (error.value.transient, error.value.retry_after_s) == (True, 7)
            assert len(asked) == number + 1


def test_a_token_is_renewed_before_it_expires():
    from google.auth.credentials import Credentials

    class Renewed(Credentials):
        count = 0

        def refresh(self, request):
            self.count += 1
            self.token = f"token-{self.count}"

    credentials = Renewed()
    with refusing_server(503) as (port, asked):
        backend = connect("gs", "bucket/root", {**gcs(port).options, "token": credentials}, attempts=1)
        for number in (1, 2):
            with pytest.raises(StoreError):
                backend.head("a")
            assert asked[-1]["Authorization"] == f"Bearer token-{number}"
            credentials.token = None


FORKING = """
import os, sys
from tierfs.objects import connect
backend = connect("gs", sys.argv[1], {options!r}, attempts=1)
backend.put("a", [b"content"])
if os.fork() == 0:
    backend.put("b", [b"content"])
    sys.exit(0)
assert os.wait()[1] == 0
for _ in range(8):
    assert backend.read("a", 100)[0] == b"content"
assert backend.read("b", 100)[0] == b"content"
"""


def test_a_forked_child_that_ends_leaves_the_connections_of_its_parent_alone(fake):
    program = FORKING.format(options=fake.options)
    # The limit is shorter than the time after which a server counts as silent.
    command = [sys.executable, "-W", "default", "-c", program, fake.new_root()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_store_saves_lists_and_verifies(fake, caplog):
    root = fake.new_root()
    store = tierfs.init(f"gs://{root}", options=fake.options)
    assert not store.descriptor.single_writer
    assert "only one process may write" not in caplog.text
    fs = tierfs.TierFileSystem(target_protocol="gs", target_options=fake.options)
    content = os.urandom(20_000_000)
    fs.pipe_file(f"{root}/step/data.bin", content)
    fs.pipe_file(f"{root}/step/.metadata", b"metadata")
    fs.wait(root, "object", 60)
    assert fs.cat_file(f"{root}/step/data.bin", 16_000_000, 17_000_000) == content[16_000_000:17_000_000]
    fs.mv(f"{root}/step/data.bin", f"{root}/step/moved.bin")
    fs.wait(root, "object", 60)
    assert fs.ls(f"{root}/step", detail=False) == [f"{root}/step/.metadata", f"{root}/step/moved.bin"]
    assert verify(store).damage == []
