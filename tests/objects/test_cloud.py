"""Behaviour that the object tiers of all clouds share, tested over a cloud in memory."""

from __future__ import annotations

import gc
import io
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

import pytest

from tierfs.clock import ManualClock
from tierfs.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    StoreError,
)
from tierfs.format.descriptor import Capabilities
from tierfs.objects import CREATE, Checksum, ObjectInfo, RetryingObjects, Take, Update
from tierfs.objects.backends.cloud import CloudObjects, Content, open_cloud
from tierfs.objects.backends.shared_session import SharedSession
from tierfs.objects.backends.spans import GAP_BYTES_MAX
from tierfs.objects.checksums import compute
from tierfs.objects.protocol import Create, Listed, Prefix, PutMode, Range, Version
from tierfs.testing import ObjectTierTests

ALL = Capabilities(
    conditional_create=True,
    conditional_update=True,
    list_after_write=True,
    atomic_put=True,
    checksums=("xxh3-128", "sha256"),
)


class AnswerError(Exception):
    """An SDK's error, which carries the status of the answer."""

    def __init__(self, status: int) -> None:
        super().__init__(f"answer {status}")
        self.status = status


@dataclass
class Cloud:
    """A server. Its attributes decide how it differs from a correct one.

    Attributes:
        fetched: Start and end of every request for bytes.
        heeds_ranges: If False, a request for a range gets the whole object.
        heeds_pins: If False, a request for a version gets the current one.
        piece_bytes: The size of the pieces in which an answer arrives.
        breaks_off_after: The most bytes that an answer has, or None for no limit.
        begins_late_by: How many bytes after the requested one an answer begins.
        bodies: The pieces of each put.
        is_busy: Whether deletions are refused for now.
        before_fetch: Called before each request for bytes.
    """

    objects: dict[str, tuple[bytes, ObjectInfo]] = field(default_factory=dict)
    fetched: list[tuple[int, int | None]] = field(default_factory=list)
    heeds_ranges: bool = True
    heeds_pins: bool = True
    piece_bytes: int = 1000
    breaks_off_after: int | None = None
    begins_late_by: int = 0
    bodies: list[Sequence[memoryview]] = field(default_factory=list)
    is_busy: bool = False
    before_fetch: Callable[[], None] = lambda: None
    has_bucket: bool = True
    page: int = 100
    deleted_at_once: list[int] = field(default_factory=list)
    versions: Iterator[int] = field(default_factory=itertools.count)
    lock: threading.Lock = field(default_factory=threading.Lock)
    open_answers: int = 0

    def session(self) -> SharedSession[Session]:
        return SharedSession("cloud", lambda: Session(self))

    def open(self) -> CloudObjects:
        return CloudObjects(self.session(), Client, ALL, name="cloud://bucket/", bucket="bucket")

    def at(self, key: str) -> tuple[bytes, ObjectInfo]:
        with self.lock:
            if key not in self.objects or not self.has_bucket:
                raise AnswerError(404)
            return self.objects[key]


class Session:
    endpoint = "http://cloud"

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud

    def close(self) -> None:
        pass


class Client:
    """A `CloudClient` of the cloud in memory."""

    deletes_max = 100

    def __init__(self, session: Session) -> None:
        self.cloud = session.cloud

    def put(self, key: str, body: Sequence[memoryview], mode: PutMode, checksum: Checksum | None) -> ObjectInfo:
        cloud = self.cloud
        if checksum is not None and compute(checksum.algorithm, body) != checksum:
            raise AnswerError(400)
        with cloud.lock:
            if not cloud.has_bucket:
                raise AnswerError(404)
            if isinstance(mode, Create) and key in cloud.objects:
                raise AnswerError(412)
            if isinstance(mode, Update):
                if key not in cloud.objects:
                    raise AnswerError(404)
                if cloud.objects[key][1].version != mode.version:
                    raise AnswerError(412)
            info = ObjectInfo(key, sum(map(len, body)), Version(str(next(cloud.versions))))
            cloud.objects[key] = b"".join(body), info
            cloud.bodies.append(body)
        return info

    @contextmanager
    def fetch(self, key: str, start: int, end: int | None, version: Version | None) -> Iterator[Content]:
        cloud = self.cloud
        cloud.fetched.append((start, end))
        cloud.before_fetch()
        start += cloud.begins_late_by
        content, info = cloud.at(key)
        if version is not None and cloud.heeds_pins and info.version != version:
            raise AnswerError(412)
        if end is None or not cloud.heeds_ranges:
            start, end = 0, len(content)
        elif start >= len(content):
            raise AnswerError(416)
        cloud.open_answers += 1
        try:
            body = io.BytesIO(content[start:end][: cloud.breaks_off_after])
            yield Content(info, start, lambda out: body.readinto(out[: cloud.piece_bytes]))
        finally:
            cloud.open_answers -= 1

    def head(self, key: str) -> ObjectInfo:
        return self.cloud.at(key)[1]

    def list_page(
        self, prefix: str, delimiter: bool, after: str | None, start: str = ""
    ) -> tuple[list[Listed], str | None]:
        if not self.cloud.has_bucket:
            raise AnswerError(404)
        with self.cloud.lock:
            listed: dict[str, Listed] = {}
            for key, (_, info) in self.cloud.objects.items():
                if key.startswith(prefix):
                    deeper = key[len(prefix) :].partition("/")
                    folded = delimiter and deeper[1]
                    name = f"{prefix}{deeper[0]}/" if folded else key
                    listed[name] = Prefix(name) if folded else info
        names = sorted(name for name in listed if name >= start and (after is None or name > after))
        page = names[: self.cloud.page]
        return [listed[name] for name in page], page[-1] if len(names) > len(page) else None

    def delete(self, keys: Sequence[str]) -> None:
        self.cloud.deleted_at_once.append(len(keys))
        if self.cloud.is_busy:
            raise AnswerError(503)
        with self.cloud.lock:
            for key in keys:
                self.cloud.objects.pop(key, None)

    def delete_version(self, key: str, version: Version) -> None:
        with self.cloud.lock:
            if key not in self.cloud.objects:
                raise AnswerError(404)
            if self.cloud.objects[key][1].version != version:
                raise AnswerError(412)
            del self.cloud.objects[key]


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def objects(cloud: Cloud) -> CloudObjects:
    return cloud.open()


class TestCloudObjects(ObjectTierTests):
    @pytest.fixture
    def objects(self, cloud: Cloud) -> CloudObjects:
        return cloud.open()


class TestCloudObjectsThatIgnoreRangesAndPins(ObjectTierTests):
    @pytest.fixture
    def objects(self, cloud: Cloud) -> CloudObjects:
        cloud.heeds_ranges = cloud.heeds_pins = False
        cloud.piece_bytes = 65_536
        return cloud.open()


def _ranges(content: bytes, spans: Sequence[tuple[int, int]]) -> tuple[list[Range], list[bytes]]:
    return (
        [(start, memoryview(bytearray(end - start))) for start, end in spans],
        [content[start:end] for start, end in spans],
    )


# Ranges


@pytest.mark.parametrize(
    ("spans", "requests"),
    [
        ([(0, 10)], [(0, 10)]),
        ([(0, 10), (10, 30)], [(0, 30)]),
        ([(10, 30), (0, 10)], [(0, 30)]),
        ([(0, 10), (500, 600)], [(0, 600)]),
        ([(0, 100), (50, 60), (90, 110)], [(0, 110)]),
        ([(0, 100), (0, 100)], [(0, 100)]),
        ([(5, 5), (0, 10), (7_000_000, 7_000_000)], [(0, 10)]),
        ([(0, 10), (10 + GAP_BYTES_MAX, 1_090_000)], [(0, 1_090_000)]),
        ([(0, 10), (11 + GAP_BYTES_MAX, 1_090_000)], [(0, 10), (11 + GAP_BYTES_MAX, 1_090_000)]),
        ([(0, 80_000), (0, 10), (80_000 + GAP_BYTES_MAX, 1_150_000)], [(0, 1_150_000)]),
        (
            [(3_000_000, 3_000_001), (0, 1), (1_500_000, 1_500_001)],
            [(0, 1), (1_500_000, 1_500_001), (3_000_000, 3_000_001)],
        ),
    ],
)
@pytest.mark.parametrize("heeds_ranges", [True, False])
def test_ranges_are_gathered_into_few_requests(
    cloud: Cloud,
    objects: CloudObjects,
    spans: list[tuple[int, int]],
    requests: list[tuple[int, int]],
    heeds_ranges: bool,
) -> None:
    content = Random(3).randbytes(4_000_000)
    info = objects.put("a", [content])
    cloud.heeds_ranges = heeds_ranges
    ranges, wanted = _ranges(content, spans)
    assert objects.get("a", ranges) == info
    assert [bytes(out) for _, out in ranges] == wanted
    assert sorted(cloud.fetched) == requests


@pytest.mark.parametrize("seed", range(6))
def test_ranges_of_every_kind_fill_their_buffers(cloud: Cloud, objects: CloudObjects, seed: int) -> None:
    random = Random(seed)
    content = random.randbytes(5_000_000)
    objects.put("a", [content])
    cloud.heeds_ranges = bool(seed % 3)
    cloud.piece_bytes = random.choice([10_009, 65_536, 1 << 20])
    spans = []
    for _ in range(random.randrange(1, 40)):
        start = random.randrange(len(content))
        spans.append((start, min(len(content), start + random.choice([0, 1, 100, 700_000]))))
    ranges, wanted = _ranges(content, spans)
    objects.get("a", ranges)
    assert [bytes(out) for _, out in ranges] == wanted, f"seed {seed}: {spans}"


def test_no_bytes_are_asked_for_where_none_are_wanted(cloud: Cloud, objects: CloudObjects) -> None:
    info = objects.put("a", [b"content"])
    assert objects.get("a", []) == objects.get("a", [(3, memoryview(b""))]) == info
    with pytest.raises(ConflictError):
        objects.get("a", [], version=Version("another"))
    assert cloud.fetched == []


def test_a_server_that_ignores_pins_is_found_out(cloud: Cloud, objects: CloudObjects) -> None:
    first = objects.put("a", [b"first"])
    objects.put("a", [b"other"])
    cloud.heeds_pins = False
    with pytest.raises(ConflictError, match="at version 1, not at 0"):
        objects.get("a", [(0, memoryview(bytearray(5)))], version=first.version)


@pytest.mark.parametrize("come", [0, 999, 1000])
def test_an_answer_that_breaks_off_is_to_be_asked_for_again(cloud: Cloud, objects: CloudObjects, come: int) -> None:
    objects.put("a", [bytes(5000)])
    cloud.breaks_off_after = come
    used: list[bytes] = []
    for ask in (
        lambda: objects.get("a", [(0, memoryview(bytearray(5000)))]),
        lambda: objects.read("a", 5000),
        lambda: objects.stream("a", 5000, lambda _, take: [used.append(bytes(take(500))) for _ in range(10)]),
    ):
        with pytest.raises(StoreError, match=f"broke off at byte {come} of 5000") as caught:
            ask()
        assert caught.value.transient
    assert len(used) == come // 500
    assert cloud.open_answers == 0


def test_a_stream_that_breaks_off_is_used_again_from_its_beginning(cloud: Cloud, objects: CloudObjects) -> None:
    content = Random(5).randbytes(5000)
    objects.put("a", [content])
    cloud.breaks_off_after = 2600

    def mend() -> None:
        if len(cloud.fetched) == 3:
            cloud.breaks_off_after = None

    cloud.before_fetch = mend
    begun: list[list[bytes]] = []

    def use(_: ObjectInfo, take: Take) -> None:
        begun.append([])
        for _piece in range(5):
            begun[-1].append(bytes(take(1000)))

    RetryingObjects(objects, clock=ManualClock()).stream("a", 5000, use)
    assert b"".join(begun[-1]) == content
    assert [len(pieces) for pieces in begun] == [2, 2, 5]


def test_an_answer_may_be_longer_than_what_was_asked_for(cloud: Cloud, objects: CloudObjects) -> None:
    objects.put("a", [b"0123456789"])
    cloud.heeds_ranges = False
    cloud.breaks_off_after = 7  # behind the wanted bytes
    out = memoryview(bytearray(3))
    objects.get("a", [(4, out)])
    assert out == b"456"


def test_an_answer_that_begins_behind_what_was_asked_for_is_refused(cloud: Cloud, objects: CloudObjects) -> None:
    objects.put("a", [b"0123456789"])
    cloud.begins_late_by = 2
    with pytest.raises(StoreError, match="begins at byte 4, after the requested byte 2"):
        objects.get("a", [(2, memoryview(bytearray(3)))])
    with pytest.raises(StoreError, match="begins at byte 2, after the requested byte 0"):
        objects.stream("a", 5, lambda _, take: take(5))


def test_a_read_with_limit_zero_requests_no_bytes(cloud: Cloud, objects: CloudObjects) -> None:
    info = objects.put("a", [b"content"])
    used: list[ObjectInfo] = []
    objects.stream("a", 0, lambda found, _: used.append(found))
    assert used == [info]
    assert cloud.fetched == []


def test_a_streamed_read_is_one_request(cloud: Cloud, objects: CloudObjects) -> None:
    objects.put("a", [bytes(5_000_000)])
    cloud.piece_bytes = 10_009
    objects.stream("a", 4_000_000, lambda _, take: [take(1_000_000) for _ in range(4)])
    assert cloud.fetched == [(0, 4_000_000)]
    assert cloud.open_answers == 0


def test_an_object_that_changes_between_two_requests_is_to_be_read_again(cloud: Cloud, objects: CloudObjects) -> None:
    objects.put("a", [b"a" * 3_000_000])

    def change() -> None:
        cloud.before_fetch = lambda: None
        cloud.objects["a"] = b"b" * 3_000_000, ObjectInfo("a", 3_000_000, Version("other"))

    # The second of two requests sees another version.
    cloud.before_fetch = lambda: setattr(cloud, "before_fetch", change)
    far = [(0, memoryview(bytearray(10))), (2_000_000, memoryview(bytearray(10)))]
    with pytest.raises(StoreError, match="changed while it was read") as caught:
        objects.get("a", far)
    assert caught.value.transient
    objects.get("a", far)
    assert {bytes(out) for _, out in far} == {b"b" * 10}


def test_one_failed_request_of_several_is_raised(cloud: Cloud, objects: CloudObjects) -> None:
    objects.put("a", [bytes(10_000_000)])
    cloud.piece_bytes = 100
    failing = iter([False, True, False])

    def fail_once() -> None:
        if next(failing):
            raise AnswerError(503)

    cloud.before_fetch = fail_once
    with pytest.raises(StoreError) as caught:
        objects.get("a", [(at, memoryview(bytearray(1000))) for at in (0, 3_000_000, 6_000_000)])
    assert caught.value.transient
    assert cloud.open_answers == 0


def test_a_read_is_bounded_before_its_bytes_arrive(cloud: Cloud, objects: CloudObjects) -> None:
    objects.put("a", [bytes(1_000_000)])
    with pytest.raises(CorruptionError, match="over the limit of 999999"):
        objects.read("a", 999_999)
    assert cloud.open_answers == 0


# Errors


def test_a_bucket_that_is_not_there_is_no_object_that_is_not_there(cloud: Cloud, objects: CloudObjects) -> None:
    cloud.has_bucket = False
    for mode in (CREATE, None):
        with pytest.raises(StoreError, match="create the bucket first") as caught:
            objects.put("a", [b"content"], **({"mode": mode} if mode else {}))
        assert not caught.value.transient
    with pytest.raises(StoreError, match="create the bucket first"):
        list(objects.list(""))


# Other behaviour


def test_a_put_passes_buffers_without_a_copy(cloud: Cloud, objects: CloudObjects) -> None:
    whole, lent = b"content", bytearray(b"content")
    objects.put("a", [whole, b"", lent])
    assert [piece.obj for piece in cloud.bodies[0]] == [whole, lent]
    assert cloud.bodies[0][1].obj is lent


def test_a_deletion_that_is_refused_for_now_may_be_sent_again(cloud: Cloud, objects: CloudObjects) -> None:
    cloud.is_busy = True
    with pytest.raises(StoreError) as caught:
        objects.delete(["a"])
    assert caught.value.transient


def test_deletions_are_sent_in_the_lots_that_the_cloud_takes(cloud: Cloud, objects: CloudObjects) -> None:
    objects.delete(f"{number}" for number in [*range(250), *range(250)])
    assert cloud.deleted_at_once == [100, 100, 50]


class Lent(bytearray):
    """A buffer that can be weakly referenced, so that a test sees when it is freed."""


@pytest.mark.parametrize("verb", ["put", "get", "stream"])
def test_an_error_releases_lent_buffers(cloud: Cloud, objects: CloudObjects, verb: str) -> None:
    lent = Lent(8)
    alive = weakref.ref(lent)
    cloud.has_bucket = False
    gc.collect()
    gc.disable()
    try:
        with pytest.raises((StoreError, NotFoundError)):
            if verb == "put":
                objects.put("a", [lent])
            elif verb == "get":
                objects.get("a", [(0, memoryview(lent))])
            else:
                objects.stream("a", 8, lambda _, take, lent=lent: lent.extend(take(8)))  # type: ignore[misc]
        del lent
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "path", ["AKIAKEY:s3cr3t@bucket/base", "AKIAKEY:s3c/r3t@bucket/base", "AKIAKEY:/s3cr3t@bucket"]
)
def test_a_url_with_credentials_is_refused_without_a_word_of_them(cloud: Cloud, path: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        open_cloud(cloud.session(), Client, path, scheme="cloud", checksums=())
    assert str(caught.value).startswith("cloud:// does not accept credentials in its URL: give them as options")


@pytest.mark.parametrize("path", ["bucket/run/a:b@c", "bucket/a:b/c@d", "us@er/base", "arn:aws:s3:::bucket/base"])
def test_a_key_that_looks_like_credentials_is_accepted(cloud: Cloud, path: str) -> None:
    objects = open_cloud(cloud.session(), Client, path, scheme="cloud", checksums=())
    assert f"cloud://{path}" in repr(objects)
