"""How tierfs interprets S3's answers; integration/test_s3.py tests with the answers of servers."""

from __future__ import annotations

import http.server
import io
import threading
import traceback
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest

from tierfs.errors import InvalidInputError, ReadOnlyError, StoreError
from tierfs.objects.backends.s3 import _copy_into, connect, open_tier
from tierfs.objects.backends.shared_session import SharedSession


class Session:
    """Returns prepared answers."""

    def __init__(self, answers: list[dict[str, Any]]) -> None:
        self.answers = answers
        self.arguments: dict[str, Any] = {}

    def call(self, method: str, **arguments: object) -> dict[str, Any]:
        self.arguments = arguments
        return self.answers.pop(0)

    def close(self) -> None:
        pass


def _objects(*answers: dict[str, Any]):
    session = Session(list(answers))
    return open_tier(SharedSession("s3", lambda: session), "bucket/base")  # type: ignore[arg-type]


def _listed(*names: str, **more: object) -> dict[str, Any]:
    contents = [{"Key": f"base/{name}", "Size": 1, "ETag": f'"{name}"'} for name in names]
    return {"Contents": contents, "IsTruncated": False, **more}


def _part(content: bytes, span: str | None) -> dict[str, Any]:
    """Return the answer to a request for a range. Without ``span``, the server sends the whole object."""
    answer: dict[str, Any] = {"ETag": '"1"', "ContentLength": len(content), "Body": io.BytesIO(content)}
    if span is None:
        return {**answer, "ResponseMetadata": {"HTTPStatusCode": 200}}
    return {**answer, "ContentRange": f"bytes {span}", "ResponseMetadata": {"HTTPStatusCode": 206}}


def test_a_page_that_is_not_the_last_and_leads_to_no_other_is_no_whole_listing() -> None:
    objects = _objects(_listed("a", "b", IsTruncated=True))
    with pytest.raises(StoreError):
        list(objects.list(""))


def test_an_answer_without_a_body_is_no_listing_of_nothing() -> None:
    with pytest.raises(StoreError) as caught:
        list(_objects({"ResponseMetadata": {"HTTPStatusCode": 200}}).list(""))
    assert caught.value.transient
    assert list(_objects({"IsTruncated": False}).list("")) == []


@pytest.mark.parametrize(
    ("content", "span"),
    [(b"234", "2-4/10"), (b"0123456789", "0-9/10"), (b"0123456789", None)],
    ids=["as-asked", "more", "all-of-it"],
)
def test_bytes_are_taken_from_where_the_answer_says_it_begins(content, span) -> None:
    out = memoryview(bytearray(3))
    assert _objects(_part(content, span)).get("a", [(2, out)]).size == 10
    assert out == b"234"


@pytest.mark.parametrize("come", [300_000, 100_000])
def test_bytes_go_from_the_connection_to_where_they_belong(come: int, monkeypatch: pytest.MonkeyPatch) -> None:
    urllib3 = pytest.importorskip("urllib3")
    content = Random(come).randbytes(300_000)
    body = urllib3.HTTPResponse(io.BytesIO(content[:come]), preload_content=False)
    monkeypatch.setattr(body, "read", lambda *_: pytest.fail("memory of its own was filled"))
    objects = _objects({**_part(content, "0-299999/300000"), "Body": body})
    first, last = memoryview(bytearray(100_000)), memoryview(bytearray(180_000))
    if come < 300_000:
        with pytest.raises(StoreError, match="broke off") as caught:
            objects.get("a", [(120_000, last), (0, first)])
        assert caught.value.transient
        return
    objects.get("a", [(120_000, last), (0, first)])
    assert (first, last) == (content[:100_000], content[120_000:])


def test_a_connection_that_ends_while_bytes_are_read_is_closed() -> None:
    urllib3 = pytest.importorskip("urllib3")

    class Broken(io.BytesIO):
        def readinto(self, out: memoryview) -> int:  # type: ignore[override]
            raise ConnectionResetError(104, "reset")

    connection = io.BytesIO()  # can be closed as well
    body = urllib3.HTTPResponse(Broken(), preload_content=False, connection=connection)
    with pytest.raises(StoreError) as caught:
        _objects({**_part(b"0123456789", "0-9/10"), "Body": body}).get("a", [(0, memoryview(bytearray(10)))])
    assert caught.value.transient
    assert connection.closed


def test_a_part_that_does_not_say_where_it_begins_is_no_whole_object() -> None:
    answer = _part(b"012", "0-2/10")
    del answer["ContentRange"]
    with pytest.raises(StoreError) as caught:
        _objects(answer).get("a", [(0, memoryview(bytearray(3)))])
    assert caught.value.transient


@pytest.mark.parametrize(
    ("code", "kind", "transient"),
    [("InternalError", StoreError, True), ("SlowDown", StoreError, True), ("AccessDenied", ReadOnlyError, None)],
)
def test_a_deletion_that_failed_for_one_key_failed(code: str, kind: type[Exception], transient: bool | None) -> None:
    pytest.importorskip("botocore", reason="botocore is not installed")
    objects = _objects({"Errors": [{"Key": "base/a", "Code": "NoSuchKey"}, {"Key": "base/b", "Code": code}]})
    with pytest.raises(kind) as caught:
        objects.delete(["a", "b"])
    assert getattr(caught.value, "transient", None) == transient


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("NotImplemented", "A header or query you provided requested a function that is not implemented."),
        ("MissingContentMD5", "Missing required header for this request: Content-MD5."),
        ("InvalidRequest", "Missing required header for this request: Content-MD5"),
    ],
)
def test_keys_are_deleted_one_by_one_without_batches(code: str, message: str) -> None:
    exceptions = pytest.importorskip("botocore.exceptions", reason="botocore is not installed")
    deleted: list[str] = []

    class Single(Session):
        def call(self, method: str, **arguments: Any) -> dict[str, Any]:
            if method == "delete_objects":
                raise exceptions.ClientError({"Error": {"Code": code, "Message": message}}, "DeleteObjects")
            assert method == "delete_object"
            deleted.append(arguments["Key"])
            if arguments["Key"] == "base/gone":
                raise exceptions.ClientError({"Error": {"Code": "NoSuchKey"}}, "DeleteObject")
            return {}

    session = Single([])
    open_tier(SharedSession("s3", lambda: session), "bucket/base").delete(["a", "gone", "b"])  # type: ignore[arg-type]
    assert deleted == ["base/a", "base/gone", "base/b"]


def test_deleting_what_is_not_there_is_no_failure() -> None:
    pytest.importorskip("botocore", reason="botocore is not installed")
    _objects({"Errors": [{"Key": "base/a", "Code": "NoSuchKey"}]}).delete(["a"])


def test_an_answer_without_a_body_has_deleted_nothing() -> None:
    pytest.importorskip("botocore", reason="botocore is not installed")
    with pytest.raises(StoreError) as caught:
        _objects({"ResponseMetadata": {"HTTPStatusCode": 200}}).delete(["a"])
    assert caught.value.transient
    _objects({"Deleted": [{"Key": "base/a"}]}).delete(["a"])


def test_a_body_is_read_in_pieces_as_asked_for_and_again_from_the_beginning() -> None:
    session = Session([{"ETag": '"1"', "ResponseMetadata": {}}])
    open_tier(SharedSession("s3", lambda: session), "bucket").put("a", [b"0123456789", b"", b"ab"])  # type: ignore[arg-type,return-value]
    body = session.arguments["Body"]
    assert len(body) == 12
    for _ in range(2):
        assert [bytes(piece) for piece in iter(lambda: body.read(4), b"")] == [b"0123", b"4567", b"89", b"ab"]
        body.seek(0)
    body.read(4)
    body.seek(0)
    assert body.read(100) == b"0123456789"


def test_a_session_for_event_loops_is_refused() -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    with pytest.raises(InvalidInputError, match="cannot use the given session"):
        connect({"session": object()})


def test_credentials_that_come_late_are_found_by_the_next_request(monkeypatch, tmp_path) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    # Nothing listens there: the test checks the error.
    sessions = SharedSession("s3", lambda: connect({"endpoint_url": "http://127.0.0.1:1"}))
    objects = open_tier(sessions, "bucket/base")
    with pytest.raises(StoreError, match="the credentials are missing") as caught:
        objects.head("a")
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = a\naws_secret_access_key = b\n")
    with pytest.raises(StoreError, match="Could not connect") as caught:
        objects.head("a")
    assert caught.value.transient


def test_the_options_stay_as_they_were_given() -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    options = {"key": "a", "secret": "b", "config_kwargs": {"retries": {"max_attempts": 0}}}
    connect(options).close()
    assert options == {"key": "a", "secret": "b", "config_kwargs": {"retries": {"max_attempts": 0}}}


def test_buffers_are_filled_without_what_urllib3_has_of_its_own() -> None:
    body, out = io.BytesIO(b"0123456789"), memoryview(bytearray(7))
    assert [(_copy_into(body, out), bytes(out)) for _ in range(3)] == [
        (7, b"0123456"),
        (3, b"7893456"),
        (0, b"7893456"),
    ]


_OPTIONS = {"key": "a", "secret": "b", "config_kwargs": {"retries": {"max_attempts": 0}}}


@pytest.fixture
def login_page() -> Iterator[Callable[[int], str]]:
    """A function that sets the status of a server's answers, and returns the server's URL."""
    status = 200

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            self.send_header("location", "http://127.0.0.1/login")
            self.send_header("content-length", "0")
            self.end_headers()

        do_GET = do_PUT = do_HEAD = do_POST = answer

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def answering(number: int) -> str:
            nonlocal status
            status = number
            return f"http://127.0.0.1:{server.server_port}"

        yield answering
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("status", [200, 302])
@pytest.mark.parametrize(
    "ask",
    [
        lambda objects: objects.head("a"),
        lambda objects: objects.put("a", [b"x"]),
        lambda objects: list(objects.list("")),
    ],
    ids=["head", "put", "list"],
)
def test_a_login_page_is_told_from_an_endpoint(login_page, status, ask) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    url = login_page(status)
    objects = open_tier(SharedSession("s3", lambda: connect({"endpoint_url": url, **_OPTIONS})), "bucket/base")
    with pytest.raises(StoreError, match="check endpoint_url, and whether a proxy or a login page answers"):
        ask(objects)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"endpoint_url": "http://user:secret@127.0.0.1:9"}, "http://127.0.0.1:9 s3://bucket/base"),
        ({"endpoint_url": "http://user:se/cret@127.0.0.1:9"}, "http://127.0.0.1:9 s3://bucket/base"),
        ({"endpoint_url": "HTTP://LocalHost:9/"}, "http://127.0.0.1:9 s3://bucket/base"),
        ({"endpoint_url": "http://localhost:80"}, "http://127.0.0.1 s3://bucket/base"),
        ({"endpoint_url": "http://minio:443"}, "http://minio:443 s3://bucket/base"),
        ({"endpoint_url": "https://s3.example.org:443"}, "https://s3.example.org s3://bucket/base"),
        ({"client_kwargs": {"region_name": "eu-west-1"}}, "amazonaws.com s3://bucket/base"),
        ({"client_kwargs": {"region_name": "cn-north-1"}}, "amazonaws.com.cn s3://bucket/base"),
    ],
)
def test_a_bucket_is_in_one_place_whoever_asks_from_wherever(options, place):
    pytest.importorskip("botocore", reason="botocore is not installed")
    objects = open_tier(SharedSession("s3", lambda: connect({"key": "a", "secret": "b", **options})), "bucket/base")
    assert objects.places() == (place,)


def test_the_environment_says_where_a_bucket_is_too(monkeypatch):
    pytest.importorskip("botocore", reason="botocore is not installed")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://elsewhere:9")
    objects = open_tier(SharedSession("s3", lambda: connect({"key": "a", "secret": "b"})), "bucket/base")
    assert objects.places() == ("http://elsewhere:9 s3://bucket/base",)


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("bucket/base", {**_OPTIONS, "endpoint_url": "http://AKIAKEY:s3cr3t@bad host"}),
        ("AKIAKEY:s3cr3t/s3cr3t@bucket/base", _OPTIONS),
    ],
    ids=["a host that is none", "in the URL, with a slash"],
)
def test_the_error_of_a_refused_option_has_no_credential(path: str, options: dict[str, object]) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    with pytest.raises(InvalidInputError) as caught:
        open_tier(SharedSession("s3", lambda: connect(options)), path).head("a")
    shown = "".join(traceback.format_exception(caught.value))
    assert "s3cr3t" not in shown
    assert "AKIAKEY" not in shown


def test_a_credential_that_ends_in_a_newline_is_not_shown() -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    options = {**_OPTIONS, "token": "s3cr3t\n", "endpoint_url": "http://127.0.0.1:1"}
    with pytest.raises(StoreError, match="a newline at their end") as caught:
        open_tier(SharedSession("s3", lambda: connect(options)), "bucket/base").head("a")
    assert not caught.value.transient
    assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))
