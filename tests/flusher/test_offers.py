"""Several ways to the object tier as one."""

from types import SimpleNamespace

import pytest

from tierfs.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
    StoreNotFoundError,
)
from tierfs.flusher.offers import OFFERS_MAX, Offers
from tierfs.flusher.upload import Uploader
from tierfs.host.pending.publisher import NO_HINT


class Way:
    """What every request ends with, if it is an error; and how many there were."""

    def __init__(self, error=None):
        self.error, self.count, self.asked = error, 0, 0

    def find_chunk(self, row):
        self.count += 1
        if self.error is not None:
            raise self.error
        return row

    def put_chunk(self, length, fill, hint, rows, *, read, pace):
        self.asked += 1
        return self.find_chunk(length) if fill(memoryview(bytearray(length))) else None


@pytest.fixture
def ways():
    return {}


@pytest.fixture
def offers(ways):
    return Offers(lambda options: ways.setdefault(options["key"], Way()))


def expired():
    return StoreError("the credentials have expired", refused=True)


def test_what_works_stays_whatever_else_is_offered(offers, ways):
    assert offers.add([{"key": "a"}])
    assert offers.add([{"key": "b"}])
    assert not offers.add([{"key": "a"}])
    assert offers.find_chunk("row") == "row"
    assert (ways["a"].count, ways["b"].count) == (1, 0)


def test_what_was_refused_makes_way_for_what_works(offers, ways):
    offers.add([{"key": "a"}])
    offers.add([{"key": "b"}])
    ways["a"].error = ReadOnlyError("access was denied", refused=True)
    for _ in range(3):
        assert offers.find_chunk("row") == "row"
    assert (ways["a"].count, ways["b"].count) == (1, 3)


def test_the_newest_is_tried_first_and_the_first_refusal_is_told_where_none_works(offers, ways):
    ways.update({key: Way(StoreError(f"{key} has expired", refused=True)) for key in "abc"})
    for key in "abc":
        offers.add([{"key": key}])
    with pytest.raises(StoreError, match="a has expired"):
        offers.find_chunk("row")
    ways["c"].error = None
    offers.find_chunk("row")
    assert (ways["a"].count, ways["b"].count, ways["c"].count) == (2, 1, 2)


@pytest.mark.parametrize(
    "error",
    [
        StoreError("503", transient=True),
        ConflictError("theirs stands"),
        StoreError("the disk", tier="nvme"),
        ReadOnlyError("a policy holds the object"),
        StoreError("the object is archived"),
    ],
    ids=["transient", "conflict", "local", "immutable", "archived"],
)
def test_nothing_else_is_tried_where_credentials_do_not_matter(offers, ways, error):
    offers.add([{"key": "a"}])
    offers.add([{"key": "b"}])
    ways["a"].error = error
    with pytest.raises(type(error)):
        offers.find_chunk("row")
    assert ways["b"].count == 0


@pytest.mark.parametrize("error", [InvalidInputError("no such option"), StoreNotFoundError("no store is there")])
def test_options_that_open_nothing_make_way_for_those_that_do(offers, ways, error):
    ways["a"] = Way(error)
    offers.add([{"key": "a"}, {"key": "b"}])
    assert offers.find_chunk("row") == "row"


@pytest.mark.parametrize("kind", [AlreadyExistsError, ConflictError, CorruptionError, NotFoundError])
def test_an_answer_that_the_next_one_gets_is_told(offers, ways, kind):
    ways.update(a=Way(expired()), b=Way(kind("what it says")))
    offers.add([{"key": "a"}, {"key": "b"}])
    for _ in range(2):
        with pytest.raises(kind):
            offers.find_chunk("row")
    assert (ways["a"].count, ways["b"].count) == (1, 2)


def test_that_the_next_one_may_work_later_is_told_where_no_other_works_now(offers, ways):
    ways.update(a=Way(expired()), b=Way(StoreError("503", transient=True)), c=Way(expired()))
    offers.add([{"key": key} for key in "abc"])
    with pytest.raises(StoreError, match="503"):
        offers.find_chunk("row")
    ways["c"].error = None
    assert offers.find_chunk("row") == "row"


def test_that_a_chunk_is_gone_says_nothing_of_a_way(offers, ways):
    ways.update(a=Way(expired()), b=Way())
    offers.add([{"key": "a"}, {"key": "b"}])
    found = iter([True, False])
    assert put(offers, lambda out: next(found)) is None
    assert offers._offers[0].publisher is ways["a"]
    assert put(offers, lambda out: True) == 9
    assert offers._offers[0].publisher is ways["b"]


@pytest.mark.parametrize("error", [InvalidInputError("odd"), CorruptionError("cut short", tier="ram")])
def test_what_cannot_be_read_on_this_host_is_put_no_other_way(offers, ways, error):
    offers.add([{"key": "a"}, {"key": "b"}])

    def read(start, out):
        raise error

    uploader = SimpleNamespace(_state=SimpleNamespace(fault=lambda _: None), _pace=None)
    with pytest.raises(type(error)) as raised:
        Uploader._put(uploader, offers, 9, read, NO_HINT, (), lambda *_: False)
    assert raised.value is error
    assert (ways["a"].asked, ways["b"].asked) == (1, 0)
    assert offers._offers[0].publisher is ways["a"]


def put(offers, fill):
    return offers.put_chunk(9, fill, NO_HINT, (), read=lambda *_: False, pace=lambda _: None)


def test_no_more_than_a_few_are_kept_and_the_one_that_works_is_among_them(offers, ways):
    offers.add([{"key": "first"}])
    for number in range(3 * OFFERS_MAX):
        offers.add([{"key": number}])
    ways["first"].error = expired()
    offers.find_chunk("row")
    assert sum(way.count for way in ways.values()) == 2
    assert ways[3 * OFFERS_MAX - 1].count == 1
    for way in ways.values():
        way.error = expired()
    with pytest.raises(StoreError):
        offers.find_chunk("row")
    assert sum(way.count for way in ways.values()) == 2 + OFFERS_MAX


def test_sets_that_are_offered_in_turns_are_new_once(offers, ways):
    keys = range(OFFERS_MAX + 2)
    assert all(offers.add([{"key": key}]) for key in keys)
    assert not any(offers.add([{"key": key}]) for _ in range(3) for key in keys)
    ways[0].error = expired()
    for key in keys[1:]:
        ways[key].error = expired()
    offers.add([{"key": 1}])
    ways[1].error = None
    assert offers.find_chunk("row") == "row"  # what comes again is tried all the same
    assert offers.add([{"key": "new"}, {"key": 1}])
