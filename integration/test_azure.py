"""The Azure backend against azurite."""

import base64
import hashlib
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from random import Random

import pytest
from servers import azurite

from tierfs.testing import ObjectTierTests

azurite.require()

from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.blob import ContainerClient, ContentSettings

import tierfs
from tierfs.errors import ConflictError, InvalidInputError, NotFoundError, ReadOnlyError, StoreError, TierfsError
from tierfs.objects import CREATE, Checksum, Prefix, Update, as_promised, connect, probe
from tierfs.objects.backends import azure
from tierfs.objects.checksums import compute
from tierfs.session import parse_url

pytestmark = pytest.mark.filterwarnings("default")

SECRET = "c2VjcmV0" * 10 + "c2VjcmV0c2Vj"


@pytest.fixture(scope="module")
def server():
    with azurite.running() as server:
        yield server


@pytest.fixture
def root(server):
    return server.new_root()


@pytest.fixture
def backend(server, root):
    return connect("abfs", root, server.options, attempts=1)


@pytest.fixture
def requests(monkeypatch):
    """Yield the requests sent so far: methods and names of blobs."""
    sent = []
    send = AioHttpTransport.send

    async def counted(self, request, **options):
        sent.append((request.method, request.url.partition("?")[0].rpartition("/")[2]))
        return await send(self, request, **options)

    monkeypatch.setattr(AioHttpTransport, "send", counted)
    return sent


def container(server, root):
    """Return the container as Microsoft's client shows it."""
    return ContainerClient.from_connection_string(server.options["connection_string"], root.partition("/")[0])


class TestAzureObjects(ObjectTierTests):
    @pytest.fixture
    def objects(self, backend):
        return as_promised(backend, probe(backend).capabilities)


def test_what_the_server_heeds_is_found_out_and_nothing_is_left_behind(backend):
    assert backend.capabilities.checksums == ("crc64nvme", "md5")
    findings = probe(backend)
    assert not findings.capabilities.single_writer
    assert findings.capabilities.checksums == ("md5",)
    [refused] = [test for test in findings.tests if not test.kept]
    assert refused.name == "checksum crc64nvme"
    assert "FeatureNotSupported" in refused.detail
    assert list(backend.list("")) == []


def test_bytes_with_another_md5_are_refused_and_not_stored(backend):
    kept = backend.put("kept", [b"content"], checksum=Checksum("md5", hashlib.md5(b"content").digest()))
    wrong = Checksum("md5", hashlib.md5(b"other").digest())
    for key in ("kept", "new"):
        with pytest.raises(StoreError, match="MD5"):
            backend.put(key, [b"content!"], checksum=wrong)
    assert backend.read("kept", 100) == (b"content", kept)
    assert [listed.key for listed in backend.list("")] == ["kept"]


def test_a_crc64_is_sent_as_azure_writes_it(backend, monkeypatch):
    # azurite computes none. Microsoft's azure-storage-extensions 0.1.0 gives 0x02e51cc85efce1a5 for this content.
    sent = []
    send = AioHttpTransport.send
    monkeypatch.setattr(AioHttpTransport, "send", lambda *given, **more: sent.append(given[1]) or send(*given, **more))
    with pytest.raises(StoreError, match="does not support the request"):
        backend.put("a", [b"Hello World!"], checksum=compute("crc64nvme", [b"Hello World!"]))
    value = (0x02E51CC85EFCE1A5).to_bytes(8, "little")
    assert [request.headers["x-ms-content-crc64"] for request in sent] == [base64.b64encode(value).decode()]


@pytest.mark.parametrize("size", [0, 1 << 20, 16 << 20, 20 << 20])
def test_a_put_a_get_and_a_read_are_one_request_each(backend, requests, size):
    content = Random(size).randbytes(size)
    info = backend.put("large", [content], mode=CREATE, checksum=Checksum("md5", hashlib.md5(content).digest()))
    assert requests == [("PUT", "large")]
    assert backend.read("large", size) == (content, info)
    assert requests[1:] == [("GET", "large")]
    if size:
        out = bytearray(size)
        assert backend.get("large", [(0, memoryview(out))], version=info.version) == info
        assert out == content
        assert requests[2:] == [("GET", "large")]


def test_times_are_told_to_the_second(backend):
    put = backend.put("a", [b"content"])
    told = [backend.head("a"), backend.read("a", 10)[1], *backend.list("")]
    assert put.modified_ns > 1_700_000_000_000_000_000
    assert {info.modified_ns // 1_000_000_000 for info in told} == {put.modified_ns // 1_000_000_000}


def test_a_listing_goes_from_page_to_page(backend, requests, monkeypatch):
    monkeypatch.setattr("tierfs.objects.backends.azure.PAGE_MAX", 7)
    keys = [f"run/{number % 10}/{number:02}" for number in range(50)]
    for key in keys:
        backend.put(key, [b""])
    requests.clear()
    assert sorted(listed.key for listed in backend.list("")) == sorted(keys)
    assert len(requests) == 8
    assert sorted(listed.key for listed in backend.list("run/", delimiter=True)) == [f"run/{n}/" for n in range(10)]


def test_directories_that_other_tools_mark_are_no_objects(server, root, backend):
    with container(server, root) as others:
        others.upload_blob("root/run/marked", b"", metadata={"hdi_isfolder": "true"})
        others.upload_blob("root/run/slash/", b"")
    backend.put("run/marked/a", [b"content"])
    assert [listed.key for listed in backend.list("")] == ["run/marked/a"]
    assert set(backend.list("run/", delimiter=True)) == {Prefix("run/marked/"), Prefix("run/slash/")}
    for look in (backend.head, lambda key: backend.read(key, 10)):
        with pytest.raises(NotFoundError):
            look("run/marked")


def test_what_is_stored_compressed_is_read_as_it_lies_there(server, root, backend):
    with container(server, root) as others:
        others.upload_blob("root/a.gz", b"any bytes", content_settings=ContentSettings(content_encoding="gzip"))
    assert backend.read("a.gz", 100)[0] == b"any bytes"


def test_a_container_that_is_not_there_is_named(server):
    backend = connect("abfs", "absent-container/root", server.options, attempts=1)
    for request in _everything(backend):
        with pytest.raises(StoreError, match="create --name absent-container") as caught:
            request()
        assert not caught.value.transient


def test_a_version_of_what_is_not_there_is_not_found(backend):
    version = backend.put("a", [b"content"]).version
    backend.delete(["a"])
    with pytest.raises(NotFoundError):
        backend.get("a", [(0, memoryview(bytearray(1)))], version=version)
    with pytest.raises(NotFoundError):
        backend.delete_version("a", version)


def test_a_refused_update_does_not_say_that_it_may_be_tried_again(backend):
    version = backend.put("a", [b"first"]).version
    backend.put("a", [b"second"])
    with pytest.raises(ConflictError):
        backend.put("a", [b"third"], mode=Update(version))


@pytest.mark.parametrize("protocol", ["abfs", "az"])
def test_a_store_on_azure_saves_lists_verifies_and_takes_many_writers(server, root, protocol):
    container = root.partition("/")[0]
    store = tierfs.init(f"{protocol}://{container}/run", options=server.options)
    assert not store.descriptor.single_writer
    fs = tierfs.TierFileSystem(target_protocol=protocol, target_options=server.options)
    content = os.urandom(20_000_000)
    fs.pipe_file(f"{container}/run/step/data.bin", content)
    fs.pipe_file(f"{container}/run/step/.metadata", b"metadata")
    assert fs.cat_file(f"{container}/run/step/data.bin") == content
    assert fs.cat_file(f"{container}/run/step/data.bin", 16_000_000, 17_000_000) == content[16_000_000:17_000_000]
    fs.mv(f"{container}/run/step/data.bin", f"{container}/run/step/moved.bin")
    assert fs.ls(f"{container}/run/step", detail=False) == [
        f"{container}/run/step/.metadata",
        f"{container}/run/step/moved.bin",
    ]
    fs.wait(f"{container}/run", "object", 60)
    from tierfs.store import verify

    assert verify(store).damage == []


@pytest.mark.parametrize(
    ("url", "account"),
    [
        ("abfs://container/run/x", {}),
        ("az://container/run/x", {}),
        ("abfs://container@account.dfs.core.windows.net/run/x", {"account_name": "account"}),
        ("abfss://container@account.dfs.core.windows.net/run/x", {"account_name": "account"}),
        ("abfs://account.dfs.core.windows.net/container/run/x", {"account_name": "account"}),
    ],
)
def test_a_url_may_name_the_account(url, account):
    location = parse_url(f"tierfs::{url}")
    assert (location.path, location.options) == ("container/run/x", account)
    backend = connect(location.protocol, location.path, {**location.options, "account_key": "a2V5"})
    assert "'abfs://container/run/x'" in repr(backend)


@pytest.mark.parametrize("given", [False, True])
def test_a_credential_is_closed_by_who_made_it(given, monkeypatch):
    from azure.identity.aio import ClientSecretCredential

    closed = []
    monkeypatch.setattr(ClientSecretCredential, "close", lambda self: _append(closed, self))
    identity = {"tenant_id": "tenant", "client_id": "client", "client_secret": SECRET}

    options = {"credential": ClientSecretCredential(**identity)} if given else identity
    azure.connect({"account_name": "account", **options}).close()
    assert len(closed) == (0 if given else 1)


async def _append(items, item):
    items.append(item)


@contextmanager
def answering(status, headers):
    """Run a server with one answer to everything; yield its port and the requests."""
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            seen.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            for name, value in {**headers, "Content-Length": "0"}.items():
                self.send_header(name, value)
            self.end_headers()

        do_GET = do_PUT = do_HEAD = do_DELETE = answer  # noqa: N815 - the names it is given

        def log_message(self, *arguments):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield httpd.server_port, seen
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


def _everything(backend):
    def get():
        backend.get("a", [(0, memoryview(bytearray(1)))])

    def put():
        backend.put("a", [b"content"])

    return [
        put,
        get,
        lambda: backend.read("a", 10),
        lambda: backend.head("a"),
        lambda: list(backend.list("")),
        lambda: list(backend.list("", delimiter=True)),
        lambda: backend.delete(["a"]),
        lambda: backend.delete_version("a", "1"),
    ]


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_that_is_busy_is_not_asked_again_behind_our_back(status):
    with answering(status, {"x-ms-error-code": "ServerBusy"}) as (port, seen):
        account = f"AccountName=account;AccountKey={SECRET};BlobEndpoint=http://127.0.0.1:{port}/account"
        backend = connect("abfs", "bucket/root", {"connection_string": account}, attempts=1)
        for number, request in enumerate(_everything(backend), 1):
            with pytest.raises(StoreError) as caught:
                request()
            assert caught.value.transient
            assert len(seen) == number


def test_timeouts_among_the_options_are_kept():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        account = f"AccountName=account;AccountKey={SECRET};BlobEndpoint=http://127.0.0.1:{port}/account"
        options = {"connection_string": account, "timeout": 30, "connection_timeout": 5, "read_timeout": 0.2}
        backend = connect("abfs", "bucket/root", options, attempts=1)
        for request in _everything(backend):
            began = time.monotonic()
            with pytest.raises(StoreError) as caught:
                request()
            assert caught.value.transient
            assert time.monotonic() - began < 10


def test_no_secret_is_shown(server, root, caplog):
    caplog.set_level("DEBUG")
    endpoint = server.options["connection_string"].rpartition("BlobEndpoint=")[2].rstrip(";")
    gone = "BlobEndpoint=http://127.0.0.1:1/devstoreaccount1"
    account = {"account_name": "account", "account_host": "127.0.0.1:1"}
    ways = [
        (ReadOnlyError, f"AccountName=devstoreaccount1;AccountKey={SECRET};BlobEndpoint={endpoint}"),
        (ReadOnlyError, f"SharedAccessSignature=sv=2024-01-01&sig={SECRET};BlobEndpoint={endpoint}"),
        (StoreError, f"AccountName=devstoreaccount1;AccountKey={SECRET};{gone}"),
        (StoreError, f"AccountName=devstoreaccount1;AccountKey={SECRET}x;{gone}"),
        (StoreError, f"SharedAccessSignature=sv=2024-01-01&sig={SECRET};{gone}"),
        (InvalidInputError, f"AccountName=devstoreaccount1;{SECRET};{gone}"),
        (InvalidInputError, f"AccountKey={SECRET}"),
        (StoreError, {**account, "sas_token": f"sv=2024-01-01&sig={SECRET}"}),
        (InvalidInputError, {**account, "account_key": SECRET}),  # it cannot tell the account from an address
        (InvalidInputError, {"account_key": SECRET}),
    ]
    for kind, given in ways:
        options = given if isinstance(given, dict) else {"connection_string": given}
        backend = connect("abfs", root, options, attempts=1)
        for request in _everything(backend):
            with pytest.raises(TierfsError) as caught:
                request()
            chain = [caught.value, caught.value.__cause__, caught.value.__context__]
            assert type(caught.value) is kind, (options, caught.value)
            assert SECRET not in " ".join([repr(backend), str(chain), *map(str, chain)])
    assert SECRET not in caplog.text


SCRIPT = """
import os, sys
from tierfs.objects import connect
backend = connect("abfs", sys.argv[1], {"connection_string": sys.argv[2]}, attempts=1)
backend.put("a", [b"content"])
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
assert backend.read("a", 10)[0] == b"content"
"""


def test_the_end_of_a_process_and_of_a_forked_one_are_quiet(server, root):
    command = [sys.executable, "-W", "always", "-c", SCRIPT, root, server.options["connection_string"]]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
