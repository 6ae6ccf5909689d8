"""Errors that s3fs raises over the wire become the tierfs error for the caller's next action."""

import http.server
import threading
import uuid

import pytest
import s3server
from saying import saying

s3server.require()

import fsspec

import tierfs
from tierfs.errors import ReadOnlyError, StoreError
from tierfs.objects import FsspecObjects, LimitedObjects, connect

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def port():
    with s3server.running() as number:
        yield number


@pytest.mark.parametrize(
    "ask",
    [
        lambda objects: objects.head("a"),
        lambda objects: objects.read("a", 10),
        lambda objects: objects.get("a", [(0, memoryview(bytearray(1)))]),
        lambda objects: objects.put("a", [b"x"]),
        lambda objects: objects.delete(["a"]),
        lambda objects: list(objects.list("")),
        lambda objects: list(objects.list("", delimiter=True)),
    ],
    ids=["head", "read", "get", "put", "delete", "list", "list below"],
)
def test_an_absent_bucket_is_no_absent_object(port, ask):
    fs = fsspec.filesystem("s3", use_listings_cache=False, **s3server.options(port))
    with pytest.raises(StoreError, match=r"the bucket is not there: .* aws s3 mb") as caught:
        ask(FsspecObjects(fs, f"absent-{uuid.uuid4().hex[:12]}/run"))
    assert not caught.value.transient


def test_no_store_is_looked_for_or_made_in_an_absent_bucket(port):
    options = s3server.options(port)
    url = f"s3://absent-{uuid.uuid4().hex[:12]}/run"
    with pytest.raises(StoreError, match="the bucket is not there"):
        tierfs.init(url, options=options)
    with pytest.raises(StoreError, match="the bucket is not there"):
        tierfs.TierFileSystem(target_protocol="s3", target_options=options).cat_file(f"{url}/a")


ANSWER = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>said</Message></Error>"


@pytest.fixture
def answering():
    """Yield a function that sets the one status and code of an endpoint's answers, and connects."""
    answer = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self):
            self.rfile.read(int(self.headers.get("content-length") or 0))
            body = b"" if self.command == "HEAD" else ANSWER.format(**answer).encode()
            self.send_response(answer["status"])
            for name, value in answer["headers"].items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer  # noqa: N815 - http.server's names

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()

        def connect(status, code, headers):
            answer.update(status=status, code=code, headers=headers)
            fs = fsspec.filesystem(
                "s3",
                key="AKIAKEY",
                secret="s3cr3t",
                token="t0ken",
                endpoint_url=f"http://127.0.0.1:{server.server_port}",
                use_listings_cache=False,
                config_kwargs={"retries": {"max_attempts": 0}},
            )
            return FsspecObjects(fs, "bucket/run")

        try:
            yield connect
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("status", "code", "headers", "expected", "message"),
    [
        (400, "ExpiredToken", {}, StoreError, "renew them"),
        (403, "InvalidAccessKeyId", {}, StoreError, "not accepted"),
        (403, "RequestTimeTooSkewed", {}, StoreError, "clock"),
        (301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-3"}, StoreError, "the bucket is in eu-west-3"),
        (403, "AccessDenied", {}, ReadOnlyError, "ask for the right"),
    ],
)
def test_a_refused_put_says_what_to_do(answering, status, code, headers, expected, message):
    with pytest.raises(expected, match=message) as caught:
        answering(status, code, headers).put("a", [b"x"])
    assert type(caught.value) is expected
    assert not getattr(caught.value, "transient", False)
    assert not [secret for secret in ("AKIAKEY", "s3cr3t", "t0ken") if secret in str(caught.value)]


@pytest.mark.parametrize("code", ["BadDigest", "RequestTimeout"])
def test_a_put_that_went_wrong_on_its_way_may_be_sent_again(answering, code):
    with pytest.raises(StoreError) as caught:
        answering(400, code, {}).put("a", [b"x"])
    assert caught.value.transient


def test_an_endpoint_that_asks_for_fewer_requests_gets_fewer(answering):
    objects = LimitedObjects(answering(503, "ServiceUnavailable", {"Retry-After": "7"}))
    for number, ask in enumerate((lambda: objects.put("a", [b"x"]), lambda: objects.head("a")), 1):
        with pytest.raises(StoreError, match="asks for fewer requests") as caught:
            ask()
        assert caught.value.throttled
        assert objects.throttled == number
    assert objects.limit == 16


@pytest.mark.parametrize(
    "answer",
    [
        b"Content-Length: 100\r\n\r\n" + b"a" * 50,
        b"Transfer-Encoding: chunked\r\n\r\n64\r\n" + b"a" * 50,
        b"Transfer-Encoding: chunked\r\n\r\n32\r\n" + b"a" * 50 + b"\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n32\r\n" + b"a" * 50 + b"\r\n0\r\n\r\n",
        b"\r\n" + b"a" * 50,
    ],
    ids=["of known length", "in a chunk", "between chunks", "ended in order", "of unknown length"],
)
@pytest.mark.parametrize(
    "ask",
    [lambda objects: objects.get("a", [(0, memoryview(bytearray(100)))]), lambda objects: objects.read("a", 100)],
    ids=["get", "read"],
)
def test_an_answer_that_broke_off_may_be_asked_for_again(answer, ask):
    head = b'HTTP/1.1 206 Partial Content\r\nETag: "1"\r\nContent-Range: bytes 0-99/100\r\n'
    with saying(head + answer) as port, pytest.raises(StoreError) as caught:
        ask(connect("s3", "bucket/run", s3server.options(port), attempts=1))
    assert caught.value.transient


@pytest.mark.parametrize("head", [b"", b"Content-Type: application/xml\r\nx-amz-i"], ids=["before", "within a line"])
def test_a_listing_whose_answer_broke_off_in_its_head_is_not_empty(head):
    # The HTTP client takes the head as complete, and botocore takes an empty answer as one without a message.
    with saying(b"HTTP/1.1 200 OK\r\n" + head) as port, pytest.raises(StoreError) as caught:
        list(connect("s3", "bucket/run", s3server.options(port), attempts=1).list(""))
    assert caught.value.transient


ASKING = {"put": lambda objects: objects.put("a", [b"x"]), "head": lambda objects: objects.head("a")}


@pytest.mark.parametrize(
    "answer",
    [
        b"HT",
        b"HTTP/1.1 100 Conti",
        b"HTTP/1.1 100 Continue\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b'HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nETag: "12',
        b'HTTP/1.1 200 OK\r\nContent-Length: 1\r\nETag: "12',
    ],
)
@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
@pytest.mark.timeout(30)
def test_an_answer_that_broke_off_in_its_head_may_be_asked_for_again(answer, ask):
    with saying(answer) as port, pytest.raises(StoreError) as caught:
        ask(connect("s3", "bucket/run", s3server.options(port), attempts=1))
    assert caught.value.transient
    assert "unhandled" not in str(caught.value)
