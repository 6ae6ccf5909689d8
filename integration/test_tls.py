"""Endpoints behind TLS, as in production, with a certificate from a private authority."""

import http.server
import json
import os
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import servers

from tierfs.errors import StoreError
from tierfs.objects import connect
from tierfs.testing import TcpFault, TcpFaultProxy

trustme = pytest.importorskip("trustme", reason="trustme is not installed: pip install -r integration/requirements.txt")

pytestmark = pytest.mark.filterwarnings("default")
WORKER = Path(__file__).with_name("tls_worker.py")
TRUST = ("AWS_CA_BUNDLE", "SSL_CERT_FILE")


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def tls(authority):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.fixture(scope="module")
def bundle(authority, tmp_path_factory):
    path = tmp_path_factory.mktemp("tls") / "authority.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


def options_at(server, port):
    plain = json.dumps(server.options_at(port))
    return json.loads(
        plain.replace("http://", "https://").replace("EndpointsProtocol=http;", "EndpointsProtocol=https;")
    )


@pytest.fixture(scope="module", params=["ministack", "azurite", "gcs_fake"])
def server(request):
    with servers.running(request.param) as server:
        yield server


def run_worker(server, tls, directory, **trust):
    environment = {name: value for name, value in os.environ.items() if name not in TRUST} | trust
    with TcpFaultProxy("127.0.0.1", server.port, tls=tls) as proxy:
        options = json.dumps(options_at(server, proxy.port))
        command = [sys.executable, WORKER, server.protocol, server.new_root(), options, directory]
        return subprocess.run(
            list(map(str, command)), env=environment, capture_output=True, text=True, timeout=120, check=False
        )


def test_a_store_behind_tls(server, tls, bundle, tmp_path):
    done = run_worker(server, tls, tmp_path, **dict.fromkeys(TRUST, bundle))
    assert done.returncode == 0, done.stderr


def test_whom_nobody_trusts_is_not_asked_again_and_what_to_do_is_said(server, tls, tmp_path):
    done = run_worker(server, tls, tmp_path)
    assert done.returncode == 1
    assert "the endpoint's certificate is not trusted" in done.stderr.splitlines()[-1]
    assert (
        "AWS_CA_BUNDLE for S3, in SSL_CERT_FILE for others (certificate verify failed: " in done.stderr.splitlines()[-1]
    )
    assert "attempt 1 of" not in done.stderr


@pytest.mark.parametrize("fault", [TcpFault.RESET, TcpFault.TRUNCATED])
def test_an_answer_that_breaks_off_within_tls_is_none(tls, bundle, monkeypatch, fault):
    monkeypatch.setenv("AWS_CA_BUNDLE", bundle)
    content = os.urandom(1 << 20)
    with servers.running("ministack") as server, TcpFaultProxy("127.0.0.1", server.port, tls=tls) as proxy:
        objects = connect("s3", server.new_root(), options_at(server, proxy.port), attempts=1)
        objects.put("a", [content])
        out = memoryview(bytearray(len(content)))
        proxy.inject(fault, at=300_000, body_only=True)
        with pytest.raises(StoreError) as caught:
            objects.get("a", [(0, out)])
        assert caught.value.transient
        assert [struck for struck, *_ in proxy.fired] == [fault]
        objects.get("a", [(0, out)])
        assert out == content


def test_a_payload_is_not_hashed_for_its_signature(tls, bundle, monkeypatch):
    """TLS protects the payload from changes, and its checksum is signed."""
    monkeypatch.setenv("AWS_CA_BUNDLE", bundle)
    hashes = []

    class Stores(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self):
            self.rfile.read(int(self.headers["content-length"]))
            hashes.append(self.headers["x-amz-content-sha256"])
            self.send_response(200)
            self.send_header("etag", '"1"')
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stores)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        with TcpFaultProxy("127.0.0.1", httpd.server_port, tls=tls) as proxy:
            options = {"key": "any", "secret": "any", "endpoint_url": f"https://127.0.0.1:{proxy.port}"}
            connect("s3", "bucket/root", options, attempts=1).put("a", [b"x" * 100_000])
    finally:
        httpd.shutdown()
        httpd.server_close()
    assert hashes == ["UNSIGNED-PAYLOAD"]
