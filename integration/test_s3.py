"""The S3 backend against a server."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import s3server

from tierfs.testing import ObjectTierTests, TcpFaultProxy

s3server.require()

from tierfs.objects import as_promised, connect, probe

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def port():
    with s3server.running() as number:
        yield number


@pytest.fixture
def options(port):
    return s3server.options(port)


@pytest.fixture
def bucket(port):
    return s3server.new_bucket(port)


class TestS3Objects(ObjectTierTests):
    versions_name_contents = True  # an ETag is a hash

    @pytest.fixture
    def objects(self, options, bucket):
        backend = connect("s3", f"{bucket}/root", options, attempts=1)
        return as_promised(backend, probe(backend).capabilities)


def test_what_the_server_heeds_is_found_out_and_nothing_is_left_behind(options, bucket):
    backend = connect("s3", f"{bucket}/root", options, attempts=1)
    findings = probe(backend)
    assert not findings.capabilities.single_writer
    assert findings.capabilities.checksums == ("crc64nvme", "crc32c", "sha256", "md5")
    passed_over = [test for test in findings.tests if not test.kept]
    assert [(test.name, test.detail) for test in passed_over] == [
        ("checksum xxh3-128", "bytes with a wrong checksum were stored")
    ]
    assert list(backend.list("")) == []


def test_a_large_piece_has_all_the_time_that_a_slow_line_takes(port, bucket):
    content = bytes(range(256)) * (48 << 10)
    with TcpFaultProxy("127.0.0.1", port) as proxy:
        proxy.bandwidth = 4 << 20
        impatient = {"config_kwargs": {"connect_timeout": 1, "read_timeout": 15}}
        slowly = connect("s3", f"{bucket}/root", {**s3server.options(proxy.port), **impatient}, attempts=1)
        slowly.put("a", [content])
        out = memoryview(bytearray(len(content)))
        slowly.get("a", [(0, out)])
    assert out == content


def test_a_payload_is_signed_where_that_is_wanted(options, bucket):
    signing = {"config_kwargs": {"s3": {"payload_signing_enabled": True}}}
    objects = connect("s3", f"{bucket}/root", {**options, **signing}, attempts=1)
    objects.put("a", [b"x" * 300_000, b"y" * 100])
    assert objects.read("a", 1 << 20)[0] == b"x" * 300_000 + b"y" * 100


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_connection_is_used_again_after_a_part_was_read(in_chunks):
    content, connections = bytes(range(256)) * 2000, []

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self):
            connections.append(self.client_address)
            super().setup()

        def do_GET(self):
            first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            piece = content[first : last + 1]
            self.send_response(206)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            if in_chunks:
                self.send_header("Transfer-Encoding", "chunked")
                piece = b"%x\r\n%b\r\n0\r\n\r\n" % (len(piece), piece)
            else:
                self.send_header("Content-Length", str(len(piece)))
            self.end_headers()
            self.wfile.write(piece)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        objects = connect("s3", "bucket/run", s3server.options(server.server_port), attempts=1)
        for start in (0, 1000, 2000):
            out = memoryview(bytearray(400_000))
            objects.get("a", [(start, out)])
            assert out == content[start : start + 400_000]
        server.shutdown()
    assert len(connections) == 1
