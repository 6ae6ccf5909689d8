"""Answers that break off at any byte: a call returns the right result, or an error that allows a retry."""

from __future__ import annotations

import contextlib

import pytest
import servers
from saying import saying

import tierfs
from tierfs.errors import AlreadyExistsError, ConflictError, NotFoundError, StoreError
from tierfs.objects import connect
from tierfs.objects.protocol import CREATE, Update
from tierfs.testing import TcpFault, TcpFaultProxy

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

HEAD_BYTES = 1200
STRIDE = 61  # after the head
CONTENT = bytes(range(256)) * 2
NAMES = [f"run/{number}" for number in range(5)]


@contextlib.contextmanager
def unless_lost(*lost):
    """Suppress transient errors, and these errors."""
    try:
        yield
    except lost:
        pass
    except StoreError as error:
        if not error.transient:
            raise


@pytest.fixture(scope="module", params=["ministack", "azurite", "gcs_fake"])
def server(request):
    with servers.running(request.param) as server:
        yield server


@pytest.fixture(scope="module")
def cut(server):
    """Return intact objects, and a function that runs a call with every cut of the answer by a proxy."""
    root = server.new_root()
    tierfs.init(f"{server.protocol}://{root}", options=server.options)
    sound = connect(server.protocol, root, server.options)
    for name in NAMES:
        sound.put(name, [CONTENT])
    with TcpFaultProxy("127.0.0.1", server.port) as proxy:
        connected = connect(server.protocol, root, server.options_at(proxy.port), attempts=1)
        connected.head(NAMES[0])

        def each(call, right, lost=(), root=root):
            broken = connect(server.protocol, root, server.options_at(proxy.port), attempts=1)
            at = 0
            while True:
                struck = len(proxy.fired)
                proxy.clear()
                proxy.inject(TcpFault.TRUNCATED, at=at)
                is_right = False
                with unless_lost(*lost):
                    is_right = right(call(broken))
                    assert is_right, f"cut at byte {at}"
                if len(proxy.fired) == struck:
                    assert is_right, "a whole answer is right"
                    return
                at += 1 if at < HEAD_BYTES else STRIDE

        yield sound, each


def test_what_an_object_is(cut):
    sound, each = cut
    info = sound.head(NAMES[0])

    def is_right(found):
        # A cut within the length drops digits of it, because nothing else marks the end of an answer to HEAD.
        return found == info or (found.version, found.size) == (
            info.version,
            int(str(info.size)[: len(str(found.size))]),
        )

    each(lambda objects: objects.head(NAMES[0]), is_right)


def test_what_is_in_it(cut):
    sound, each = cut
    whole = sound.read(NAMES[0], 1000)
    each(lambda objects: objects.read(NAMES[0], 1000), lambda found: found == whole)


def test_a_range_of_it(cut):
    sound, each = cut

    def get(objects):
        out = bytearray(100)
        return objects.get(NAMES[0], [(100, memoryview(out))]), out

    right = get(sound)
    each(get, lambda found: found == right)


@pytest.mark.parametrize("delimiter", [False, True])
def test_what_is_there(cut, delimiter):
    sound, each = cut
    listed = set(sound.list("", delimiter=delimiter))
    assert listed
    each(lambda objects: set(objects.list("", delimiter=delimiter)), lambda found: found == listed)


def test_what_was_put(cut):
    sound, each = cut
    each(lambda objects: objects.put("put", [CONTENT]), lambda found: found == sound.head("put"))


def test_what_was_created(cut):
    sound, each = cut

    def create(objects):
        sound.delete(["created"])
        return objects.put("created", [CONTENT], mode=CREATE)

    # A client that retries on its own finds the object that it made. A retry by tierfs finds it, too.
    each(create, lambda found: found == sound.head("created"), (AlreadyExistsError,))


def test_what_was_updated(cut):
    sound, each = cut
    sound.put("updated", [b"before"])

    def update(objects):
        return objects.put(
            "updated", [CONTENT, str(sound.head("updated")).encode()], mode=Update(sound.head("updated").version)
        )

    each(update, lambda found: found == sound.head("updated"), (ConflictError,))


def test_what_was_refused(cut):
    sound, each = cut
    sound.put("there", [CONTENT])

    def refused(objects, mode, error):
        try:
            return objects.put("there", [b"other"], mode=mode)
        except error:
            return None

    each(lambda objects: refused(objects, CREATE, AlreadyExistsError), lambda found: found is None)
    stale = Update(sound.head(NAMES[0]).version)
    sound.put("there", [b"another"])
    each(lambda objects: refused(objects, stale, ConflictError), lambda found: found is None)
    assert sound.read("there", 10)[0] == b"another"


def test_what_was_deleted(cut):
    sound, each = cut

    def delete(objects):
        sound.put("deleted", [CONTENT])
        objects.delete(["deleted"])
        return list(sound.list("deleted"))

    each(delete, lambda found: found == [])


@pytest.mark.parametrize("ask", [lambda objects: objects.head("absent"), lambda objects: objects.read("absent", 10)])
def test_what_is_not_there(cut, ask):
    _, each = cut

    def is_absent(objects):
        try:
            ask(objects)
        except NotFoundError:
            return True

    each(is_absent, lambda found: found)


@pytest.mark.parametrize(
    "ask",
    [
        lambda objects: list(objects.list("")),
        lambda objects: objects.read("absent", 10),
        lambda objects: objects.put("absent", [CONTENT]),
    ],
    ids=["list", "read", "put"],
)
def test_a_bucket_that_is_not_there(cut, ask):
    _, each = cut

    def is_told(objects):
        try:
            ask(objects)
        except NotFoundError:  # the answer broke off before its reason
            return True
        except StoreError as error:
            if error.transient:
                raise
            return True

    each(is_told, lambda told: told, root="absent-bucket/run")


@pytest.mark.parametrize("body", [b"", b'{"kind": "stor', b"<?xml version='1.0'?><Enum", b"<html></html>"])
def test_a_listing_of_no_told_length_that_broke_off_is_not_empty(server, body):
    with saying(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body) as port, pytest.raises(StoreError):
        list(connect(server.protocol, "bucket/run", server.options_at(port), attempts=1).list(""))


def test_a_part_that_does_not_say_of_what_is_none(server):
    head = (
        b'HTTP/1.1 206 Partial Content\r\nETag: "1"\r\nX-Goog-Generation: 1\r\n'
        b"Last-Modified: Sat, 21 Nov 2026 08:31:47 GMT\r\nContent-Length: 20\r\n\r\n"
    )
    with saying(head + bytes(20)) as port, pytest.raises(StoreError) as caught:
        objects = connect(server.protocol, "bucket/run", server.options_at(port), attempts=1)
        objects.get("a", [(10, memoryview(bytearray(5)))])
    assert caught.value.transient
