"""Several ways to the object tier as one."""

import pytest

from tierfs.clock import ManualClock
from tierfs.errors import ConflictError, ReadOnlyError, StoreError
from tierfs.flush.offers import OFFERS_MAX, REFUSED_S, Offers


class Way:
    """What every request ends with, if it is an error; and how many there were."""

    def __init__(self, error=None):
        self.error, self.count = error, 0

    def find_chunk(self, row):
        self.count += 1
        if self.error is not None:
            raise self.error
        return row


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def ways():
    return {}


@pytest.fixture
def offers(ways, clock):
    return Offers(lambda options: ways.setdefault(options["key"], Way()), clock)


def expired():
    return StoreError("the credentials have expired")


def test_what_works_stays_whatever_else_is_offered(offers, ways):
    assert offers.add([{"key": "a"}])
    assert offers.add([{"key": "b"}])
    assert not offers.add([{"key": "a"}])
    assert offers.find_chunk("row") == "row"
    assert (ways["a"].count, ways["b"].count) == (1, 0)


def test_what_was_refused_makes_way_for_what_works(offers, ways):
    offers.add([{"key": "a"}])
    offers.add([{"key": "b"}])
    ways["a"].error = ReadOnlyError("access was denied")
    for _ in range(3):
        assert offers.find_chunk("row") == "row"
    assert (ways["a"].count, ways["b"].count) == (1, 3)


def test_the_newest_is_tried_first_and_the_first_refusal_is_told_where_none_works(offers, ways):
    ways.update({key: Way(StoreError(f"{key} has expired")) for key in "abc"})
    for key in "abc":
        offers.add([{"key": key}])
    with pytest.raises(StoreError, match="a has expired"):
        offers.find_chunk("row")
    ways["c"].error = None
    offers.find_chunk("row")
    assert (ways["a"].count, ways["b"].count, ways["c"].count) == (2, 1, 2)


@pytest.mark.parametrize(
    "error",
    [StoreError("503", transient=True), ConflictError("theirs stands"), StoreError("the disk", tier="nvme")],
    ids=["transient", "conflict", "local"],
)
def test_nothing_else_is_tried_where_credentials_do_not_matter(offers, ways, error):
    offers.add([{"key": "a"}])
    offers.add([{"key": "b"}])
    ways["a"].error = error
    with pytest.raises(type(error)):
        offers.find_chunk("row")
    assert ways["b"].count == 0


def test_a_conflict_that_the_next_one_meets_is_told(offers, ways):
    ways.update(a=Way(expired()), b=Way(ConflictError("theirs stands")))
    offers.add([{"key": "a"}, {"key": "b"}])
    with pytest.raises(ConflictError):
        offers.find_chunk("row")


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


def test_all_are_refused_when_that_has_lasted_a_while_with_no_success(offers, ways, clock):
    offers.add([{"key": "a"}])
    ways["a"].error = expired()
    with pytest.raises(StoreError):
        offers.find_chunk("row")
    assert not offers.are_refused()
    clock.sleep(REFUSED_S)
    assert offers.are_refused()
    ways["a"].error = None
    offers.find_chunk("row")
    assert not offers.are_refused()
