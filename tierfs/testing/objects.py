"""The conformance suite of object tiers: the behaviour that every backend and every wrapper must have.

Subclass it with a name that pytest collects and give it one fixture::

    class TestMyObjects(ObjectTierTests):
        @pytest.fixture def objects(self, tmp_path):
            return MyObjects(tmp_path)

If a tier's capabilities lack a promise, the tests check the rest of that promise. No test uses a key both for an object
and as a "directory" of other objects, because files cannot be both.
"""

# The names of the tests describe them. The tests compare with plain numbers.
# ruff: noqa: PLR2004

from __future__ import annotations

import itertools
import string
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import TypeVar

import pytest

from tierfs import digest
from tierfs.digest import Buffer
from tierfs.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    StoreError,
    TierfsError,
)
from tierfs.objects.checksums import computable, compute
from tierfs.objects.protocol import (
    CREATE,
    OVERWRITE,
    Checksum,
    Listed,
    ObjectInfo,
    ObjectTier,
    Prefix,
    PutMode,
    Take,
    Update,
    Version,
)

Answer = TypeVar("Answer")

RACERS = 12
MANY = 1_050  # more than a page of S3's listings, and more than the limit of S3's batched deletions


class ObjectTierTests:
    """Subclass this and give it the fixture ``objects``.

    Attributes:
        versions_name_contents: Set this if a version is a digest of the content, as S3's ETags are. Writing identical
            bytes again then gives the same version.
    """

    versions_name_contents = False

    @pytest.fixture
    def objects(self) -> ObjectTier:
        """Return an empty object tier."""
        raise NotImplementedError("give the suite an empty object tier")

    def test_a_tier_names_its_place_and_its_layers(self, objects: ObjectTier) -> None:
        assert objects.places()
        assert objects.places() == objects.places()
        assert "Objects(" in repr(objects)
        assert objects.capabilities == objects.capabilities

    # Put

    @pytest.mark.parametrize("mode", [OVERWRITE, CREATE], ids=["overwrite", "create"])
    def test_an_object_is_read_back_as_put(self, objects: ObjectTier, mode: PutMode) -> None:
        info = objects.put("run/a", [b"content"], mode=mode)
        assert (info.key, info.size) == ("run/a", 7)
        assert objects.head("run/a") == info
        assert objects.read("run/a", 100) == (b"content", info)

    def test_buffers_of_every_kind_are_joined_and_copied(self, objects: ObjectTier) -> None:
        lent = bytearray(b"two")
        pieces: list[Buffer] = [b"one", lent, memoryview(b"-three-")[1:-1], memoryview(lent), b""]
        assert objects.put("a", pieces).size == 14
        lent[:] = b"new"
        assert _content(objects, "a") == b"onetwothreetwo"
        many = [bytes([number % 251]) * (number % 7) for number in range(3000)]
        objects.put("b", many)
        assert _content(objects, "b") == b"".join(many)

    @pytest.mark.parametrize("pieces", [[], [b""], [b"", memoryview(b"")]], ids=["none", "one", "two"])
    def test_an_object_may_be_empty(self, objects: ObjectTier, pieces: list[bytes]) -> None:
        assert objects.put("empty", pieces).size == 0
        assert objects.read("empty", 0)[0] == b""
        assert objects.get("empty", []).size == 0
        assert [listed.key for listed in objects.list("")] == ["empty"]

    def test_a_large_object_comes_back_whole(self, objects: ObjectTier) -> None:
        piece = Random(20).randbytes(5 << 20)
        assert objects.put("large", [piece, memoryview(piece), piece, piece]).size == 20 << 20
        out = bytearray(20 << 20)
        objects.get("large", [(0, memoryview(out))])
        assert digest.checksum(out) == digest.checksum(piece, piece, piece, piece)

    def test_an_overwrite_replaces_the_object(self, objects: ObjectTier) -> None:
        first = objects.put("a", [b"a long content"])
        second = objects.put("a", [b"short"])
        assert second.version != first.version
        assert objects.read("a", 100) == (b"short", second)

    def test_a_create_fails_while_an_object_exists(self, objects: ObjectTier) -> None:
        info = objects.put("run/a", [b"old"])
        with pytest.raises(AlreadyExistsError):
            objects.put("run/a", [b"new"], mode=CREATE)
        assert objects.read("run/a", 100) == (b"old", info)
        objects.delete(["run/a"])
        objects.put("run/a", [b"new"], mode=CREATE)
        assert _content(objects, "run/a") == b"new"

    def test_an_update_replaces_only_the_version_it_names(self, objects: ObjectTier) -> None:
        first = objects.put("a", [b"first"])
        second = objects.put("a", [b"second"], mode=Update(first.version))
        assert objects.read("a", 100) == (b"second", second)
        with pytest.raises(ConflictError):
            objects.put("a", [b"third"], mode=Update(first.version))
        assert objects.read("a", 100) == (b"second", second)
        objects.delete(["a"])
        with pytest.raises(ConflictError):
            objects.put("a", [b"third"], mode=Update(second.version))
        with pytest.raises(NotFoundError):
            objects.head("a")
        objects.put("a", [b"again, and longer"])
        with pytest.raises(ConflictError):
            objects.put("a", [b"third"], mode=Update(second.version))

    def test_one_of_many_concurrent_creates_wins(self, objects: ObjectTier) -> None:
        outcomes = _together(lambda racer: objects.put("run/a", [b"%02d" % racer], mode=CREATE))
        self._check_race(objects, "run/a", outcomes, AlreadyExistsError, objects.capabilities.conditional_create)

    def test_one_of_many_concurrent_updates_wins(self, objects: ObjectTier) -> None:
        update = Update(objects.put("run/a", [b"??"]).version)
        outcomes = _together(lambda racer: objects.put("run/a", [b"%02d" % racer], mode=update))
        self._check_race(objects, "run/a", outcomes, ConflictError, objects.capabilities.conditional_update)

    def _check_race(
        self,
        objects: ObjectTier,
        key: str,
        outcomes: Sequence[ObjectInfo | TierfsError],
        refusal: type[TierfsError],
        promised: bool,
    ) -> None:
        winners = {b"%02d" % racer for racer, outcome in enumerate(outcomes) if isinstance(outcome, ObjectInfo)}
        refused = [outcome for outcome in outcomes if isinstance(outcome, refusal)]
        assert len(winners) + len(refused) == RACERS, outcomes
        if promised:
            assert len(winners) == 1, outcomes
        assert _content(objects, key) in winners

    def test_writers_that_reload_and_retry_lose_no_update(self, objects: ObjectTier) -> None:
        objects.put("counter", [b"0"])

        def count(_: int) -> int:
            for attempt in itertools.count():
                content, info = objects.read("counter", 100)
                try:
                    objects.put("counter", [b"%d" % (int(content) + 1)], mode=Update(info.version))
                except ConflictError:
                    continue
                return attempt
            raise AssertionError

        if not objects.capabilities.conditional_update:
            assert count(0) == 0  # the tier promises this for one writer at a time only
            assert _content(objects, "counter") == b"1"
            return
        outcomes = _together(count)
        assert all(isinstance(outcome, int) for outcome in outcomes), outcomes
        assert _content(objects, "counter") == b"%d" % RACERS

    def test_every_put_makes_a_version_of_its_own(self, objects: ObjectTier) -> None:
        same = not self.versions_name_contents
        contents = [b"the same bytes" if same else b"other bytes %2d" % number for number in range(100)]
        versions = [objects.put("a", [content]).version for content in contents]
        assert len(set(versions)) == 100

    # Checksums

    def test_a_right_checksum_is_accepted(self, objects: ObjectTier) -> None:
        pieces: list[Buffer] = [b"so", bytearray(b"me"), memoryview(b"thi"), memoryview(bytearray(b"ng")), b""]
        for name in filter(computable, objects.capabilities.checksums):
            objects.put(name, pieces, checksum=compute(name, pieces))
            assert _content(objects, name) == b"something"

    def test_wrong_and_unknown_checksums_are_refused(self, objects: ObjectTier) -> None:
        for algorithm in objects.capabilities.checksums:
            right = compute(algorithm, [b"something"])
            wrong = Checksum(algorithm, bytes(len(right.value)))
            for mode in (OVERWRITE, CREATE):
                with pytest.raises(StoreError):
                    objects.put("a", [b"something"], mode=mode, checksum=wrong)
        with pytest.raises(NotFoundError):
            objects.head("a")
        with pytest.raises(InvalidInputError):
            objects.put("a", [b"something"], checksum=Checksum("sum-of-digits", b"4"))
        with pytest.raises(NotFoundError):
            objects.head("a")

    # Get, read, head

    def test_ranges_fill_their_buffers_in_any_order(self, objects: ObjectTier) -> None:
        content = bytes(range(256)) * 40
        info = objects.put("run/a", [content])
        spans = [(9000, 1240), (0, 1), (5000, 100), (0, 10240), (5050, 200), (10239, 1)]
        outs = [bytearray(length) for _, length in spans]
        assert objects.get("run/a", [(at, memoryview(out)) for (at, _), out in zip(spans, outs, strict=True)]) == info
        for (start, length), out in zip(spans, outs, strict=True):
            assert out == content[start : start + length]
        part = memoryview(bytearray(b".........."))
        objects.get("run/a", [(48, part[1:3]), (50, part[5:8])])
        assert bytes(part) == b".01..234.."

    @pytest.mark.parametrize(("start", "length"), [(0, 11), (10, 1), (5, 6), (1000, 1)])
    def test_a_range_past_the_end_is_corruption(self, objects: ObjectTier, start: int, length: int) -> None:
        objects.put("a", [b"0123456789"])
        with pytest.raises(CorruptionError):
            objects.get("a", [(0, memoryview(bytearray(2))), (start, memoryview(bytearray(length)))])

    def test_a_get_reads_only_the_version_it_names(self, objects: ObjectTier) -> None:
        first = objects.put("a", [b"first"])
        out = bytearray(5)
        assert objects.get("a", [(0, memoryview(out))], version=first.version) == first
        assert out == b"first"
        objects.put("a", [b"other"])
        with pytest.raises(ConflictError):
            objects.get("a", [(0, memoryview(out))], version=first.version)

    @pytest.mark.parametrize("length", [0, 1, 1 << 20, (2 << 20) + 5])
    def test_a_stream_gives_an_object_piece_by_piece(self, objects: ObjectTier, length: int) -> None:
        content = Random(21).randbytes((2 << 20) + 5)
        info = objects.put("run/a", [content])
        pieces: list[bytes] = []

        def use(found: ObjectInfo, take: Take) -> None:
            assert (found, threading.get_ident()) == (info, here)
            del pieces[:]
            left = length
            while left:
                pieces.append(bytes(take(min(left, (1 << 20) if len(pieces) % 2 else 1000))))
                left -= len(pieces[-1])

        here = threading.get_ident()
        objects.stream("run/a", length, use)
        assert b"".join(pieces) == content[:length]

    def test_a_stream_may_be_left_and_may_not_pass_the_end(self, objects: ObjectTier) -> None:
        content, used = bytes(2 << 20), list[ObjectInfo]()
        objects.put("a", [content])
        for count in (0, 1, 1000):
            objects.stream("a", len(content), lambda _, take, count=count: take(count))  # type: ignore[misc]
        with pytest.raises(CorruptionError):
            objects.stream("a", len(content) + 1, lambda info, _: used.append(info))
        assert not used
        failure = CorruptionError("not what was expected")

        def use(_: ObjectInfo, take: Take) -> None:
            take(1000)
            raise failure

        for _ in range(3):
            with pytest.raises(CorruptionError) as caught:
                objects.stream("a", len(content), use)
            assert caught.value is failure
        assert _content(objects, "a") == content

    def test_concurrent_streams_are_independent(self, objects: ObjectTier) -> None:
        contents = [Random(racer).randbytes(1 << 18) for racer in range(RACERS)]
        for racer, content in enumerate(contents):
            objects.put(f"run/{racer}", [content])

        def read(racer: int) -> bytes:
            pieces: list[bytes] = []

            def use(_: ObjectInfo, take: Take) -> None:
                pieces[:] = [bytes(take(1 << 14)) for _ in range(16)]

            objects.stream(f"run/{racer}", 1 << 18, use)
            return b"".join(pieces)

        assert _together(read) == contents

    def test_a_read_refuses_an_object_over_the_limit(self, objects: ObjectTier) -> None:
        objects.put("a", [b"12345"])
        assert objects.read("a", 5)[0] == b"12345"
        with pytest.raises(CorruptionError):
            objects.read("a", 4)

    @pytest.mark.parametrize("key", ["absent", "run/absent", "absent/run/a", "run", "run/a/below"])
    def test_a_missing_object_is_not_found(self, objects: ObjectTier, key: str) -> None:
        objects.put("run/a", [b"something"])
        for ask in (
            lambda: objects.head(key),
            lambda: objects.read(key, 100),
            lambda: objects.get(key, [(0, memoryview(bytearray(1)))]),
            lambda: objects.stream(key, 1, lambda _, take: take(1)),
            lambda: objects.delete_version(key, Version("1")),
        ):
            with pytest.raises(NotFoundError):
                ask()

    # List

    @pytest.mark.parametrize("delimiter", [False, True])
    def test_an_empty_prefix_lists_nothing(self, objects: ObjectTier, delimiter: bool) -> None:
        assert list(objects.list("", delimiter=delimiter)) == []
        objects.put("run/a", [b"something"])
        for prefix in ("absent/", "run/absent/", "run/a/", "ru/"):
            assert list(objects.list(prefix, delimiter=delimiter)) == []

    def test_a_listing_describes_every_object_as_head_does(self, objects: ObjectTier) -> None:
        keys = ["a", "run/b", "run/deep/er/c", "run/deep/d", "running/e"]
        for number, key in enumerate(keys):
            objects.put(key, [b"x" * number])
        listed = sorted(_identity(entry) for entry in objects.list(""))
        assert listed == sorted(_identity(objects.head(key)) for key in keys)
        assert sorted(entry.key for entry in objects.list("run/")) == ["run/b", "run/deep/d", "run/deep/er/c"]

    def test_a_listing_with_delimiter_folds_what_lies_deeper(self, objects: ObjectTier) -> None:
        for key in ("run/b", "run/c/d", "run/c/e/f", "run/g/h", "running/i"):
            objects.put(key, [b"something"])
        listed = list(objects.list("run/", delimiter=True))
        assert {entry for entry in listed if isinstance(entry, Prefix)} == {Prefix("run/c/"), Prefix("run/g/")}
        assert [_identity(entry) for entry in listed if entry.key == "run/b"] == [_identity(objects.head("run/b"))]
        assert len(listed) == 3
        assert {Prefix("run/"), Prefix("running/")} <= set(objects.list("", delimiter=True))

    def test_a_prefix_is_not_confused_with_names_that_begin_like_it(self, objects: ObjectTier) -> None:
        # In byte order "a!", "a-" and "a." stand before "a/", and "a0" and "aa" behind it.
        for key in ("x/a!", "x/a-", "x/a.", "x/a/b", "x/a/b!", "x/a0", "x/aa"):
            objects.put(key, [b"something"])
        assert sorted(entry.key for entry in objects.list("x/a/")) == ["x/a/b", "x/a/b!"]
        folded = sorted(entry.key for entry in objects.list("x/", delimiter=True))
        assert folded == ["x/a!", "x/a-", "x/a.", "x/a/", "x/a0", "x/aa"]

    def test_odd_characters_come_back_as_they_are(self, objects: ObjectTier) -> None:
        odd = [f"run/{mark}name{mark}" for mark in "-_.=+,@!"]
        keys = [*odd, *(f"{key}.d/{mark}" for key, mark in zip(odd, "-_@=+,x!", strict=True))]
        keys += [f"run/{string.ascii_letters}{string.digits}", "run/a..b", "run/..c", "run/.d", "run/e."]
        for key in keys:
            objects.put(key, [key.encode()])
        assert sorted(entry.key for entry in objects.list("")) == sorted(keys)
        assert [_content(objects, key).decode() for key in keys] == keys
        objects.delete(keys)
        assert list(objects.list("")) == []

    def test_components_may_be_251_bytes_long(self, objects: ObjectTier) -> None:
        key = "/".join(letter * 251 for letter in "abc")
        objects.put(key, [b"something"], mode=CREATE)
        objects.put(key, [b"something else"], mode=Update(objects.head(key).version))
        assert [entry.key for entry in objects.list("")] == [key]
        assert [entry.key for entry in objects.list("a" * 251 + "/", delimiter=True)] == [key[: 2 * 252]]

    def test_more_objects_than_a_page_holds_are_listed_and_deleted(self, objects: ObjectTier) -> None:
        keys = [f"chunks/{number % 16:x}/{number:04}" for number in range(MANY)]
        with ThreadPoolExecutor(RACERS) as pool:
            list(pool.map(lambda key: objects.put(key, [b""]), keys))
        assert sorted(entry.key for entry in objects.list("chunks/")) == sorted(keys)
        assert len(list(objects.list("chunks/", delimiter=True))) == 16
        assert len(list(objects.list("chunks/7/", delimiter=True))) == len(keys[7::16])
        objects.delete(iter(keys))
        assert list(objects.list("chunks/")) == []

    @pytest.mark.parametrize(
        ("after", "found"),
        [
            ("x/", ["x/a/b!", "x/a/d!", "x/a!", "x/c/e!", "x/f!"]),
            ("x/a/d!", ["x/c/e!", "x/f!"]),
            ("x/a!", ["x/a/b!", "x/a/d!", "x/c/e!", "x/f!"]),
            ("x/b!", ["x/c/e!", "x/f!"]),
            ("x/f!", []),
        ],
    )
    def test_the_objects_after_a_key_are_listed(self, objects: ObjectTier, after: str, found: list[str]) -> None:
        for key in ("w/z", "x/a!", "x/a/b!", "x/a/d!", "x/c/e!", "x/f!", "y/a"):
            objects.put(key, [b"1"])
        assert sorted(item.key for item in objects.list_after("x/", after)) == sorted(found)

    def test_a_listing_shows_every_change_acknowledged_before(self, objects: ObjectTier) -> None:
        for number in range(20):
            list(objects.list("run/"))  # so that a tier that caches listings has an old one
            objects.put(f"run/{number}", [b"something"])
            if objects.capabilities.list_after_write:
                assert len(list(objects.list("run/"))) == number + 1
            assert objects.head(f"run/{number}").size == 9
        for number in range(20):
            objects.delete([f"run/{number}"])
            if objects.capabilities.list_after_write:
                assert len(list(objects.list("run/"))) == 19 - number
            with pytest.raises(NotFoundError):
                objects.head(f"run/{number}")

    def test_listings_show_only_what_was_put(self, objects: ObjectTier) -> None:
        info = objects.put("run/a", [b"first"], mode=CREATE)
        with pytest.raises(AlreadyExistsError):
            objects.put("run/a", [b"second"], mode=CREATE)
        info = objects.put("run/a", [b"third"], mode=Update(info.version))
        objects.put("run/b", [b"fourth"])
        objects.delete(["run/b", "run/c"])
        assert [_identity(entry) for entry in objects.list("")] == [_identity(info)]

    # Delete

    def test_a_delete_removes_its_keys_and_ignores_missing_ones(self, objects: ObjectTier) -> None:
        keys = [f"run/{number}" for number in range(40)]
        for key in (*keys[::2], "kept", "run/kept"):
            objects.put(key, [b"something"])
        objects.delete([*keys, "elsewhere/absent", "kept/below", "run/2"])
        objects.delete([])
        assert {entry.key for entry in objects.list("")} == {"kept", "run/kept"}

    def test_a_version_is_deleted_unless_it_has_changed(self, objects: ObjectTier) -> None:
        first = objects.put("a", [b"first"])
        second = objects.put("a", [b"other"])
        with pytest.raises(ConflictError):
            objects.delete_version("a", first.version)
        assert objects.head("a") == second
        objects.delete_version("a", second.version)
        assert list(objects.list("")) == []

    # Concurrency

    def test_readers_during_overwrites_see_one_content(self, objects: ObjectTier) -> None:
        size = 64 << 10
        objects.put("a", [b"a" * size])
        over = threading.Event()

        def read(reader: int) -> int:
            mixed = 0
            while not over.is_set():
                out = memoryview(bytearray(size))
                try:
                    if reader % 2:
                        content, _ = objects.read("a", size)
                    else:
                        objects.get("a", [(size // 2, out[size // 2 :]), (0, out[: size // 2])])
                        content = bytes(out)
                except StoreError as error:
                    if not (error.transient and objects.capabilities.single_writer):
                        raise
                    continue
                except CorruptionError:
                    if objects.capabilities.atomic_put:
                        raise
                    continue
                mixed += content != content[:1] * size
            return mixed

        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read, reader) for reader in range(3)]
            try:
                for letter in b"bcdefghijklm":
                    objects.put("a", [bytes([letter]) * size])
            finally:
                over.set()
            mixed = sum(reader.result() for reader in readers)
        # A single-writer tier reads its ranges one by one. It checks the version only once, before the first range.
        assert not mixed or objects.capabilities.single_writer
        assert _content(objects, "a") == b"m" * size

    def test_concurrent_writes_are_independent(self, objects: ObjectTier) -> None:
        def write(racer: int) -> list[ObjectInfo]:
            return [objects.put(f"run/{racer}/{number}", [b"%d-%d" % (racer, number)]) for number in range(8)]

        outcomes = _together(write)
        assert all(isinstance(outcome, list) for outcome in outcomes), outcomes
        for racer, number in itertools.product(range(RACERS), range(8)):
            assert _content(objects, f"run/{racer}/{number}") == b"%d-%d" % (racer, number)


def _content(objects: ObjectTier, key: str) -> bytes:
    out = bytearray(objects.head(key).size)
    objects.get(key, [(0, memoryview(out))])
    return bytes(out)


def _identity(listed: Listed) -> tuple[str, int, Version]:
    """Return the fields that head and listings agree on. Either of the two may round the time to the second."""
    assert isinstance(listed, ObjectInfo)
    return listed.key, listed.size, listed.version


def _together(action: Callable[[int], Answer]) -> list[Answer | TierfsError]:
    """Call ``action`` on many threads at once, and return the outcomes."""
    start = threading.Barrier(RACERS, timeout=60)

    def race(racer: int) -> Answer | TierfsError:
        start.wait()
        try:
            return action(racer)
        except TierfsError as error:
            return error

    with ThreadPoolExecutor(RACERS) as pool:
        return list(pool.map(race, range(RACERS)))
