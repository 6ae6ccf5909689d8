"""Among the ways to the object tier that clients hand over, the flusher picks a working one."""

import pytest

from tierfs.errors import ConflictError, InvalidInputError, ReadOnlyError, StoreError, StoreNotFoundError
from tierfs.flusher.access import Access, Way


class Publisher:
    """Raise one error at every request, or none. Count the requests."""

    def __init__(self, error=None):
        self.error, self.count = error, 0

    def find_chunk(self, row):
        self.count += 1
        if self.error is not None:
            raise self.error
        return row


class Clients:
    """Clients that hand over one key each, and the publisher that each key leads to."""

    def __init__(self):
        self.publishers = {}
        self.access = Access(lambda way: self.publishers.setdefault(way.options["key"], Publisher()))

    def fail(self, key, error):
        self.publishers.setdefault(key, Publisher()).error = error

    def hand_over(self, key, *, writes=False):
        return self.access.hand_over(Way("s3://bucket", {"key": key}, writes))

    def ask(self):
        return self.access.call(lambda publisher: publisher.find_chunk("row"))

    def counts(self):
        return {key: publisher.count for key, publisher in self.publishers.items()}


@pytest.fixture
def clients():
    return Clients()


def expired():
    return StoreError("the credentials have expired", refused=True)


def test_no_request_is_sent_before_a_client_gives_the_url(clients):
    with pytest.raises(StoreError) as waits:
        clients.ask()
    assert waits.value.transient
    assert not clients.access.is_known


def test_working_credentials_stay_in_use(clients):
    assert clients.hand_over("a", writes=True)
    assert not clients.hand_over("b", writes=True)
    assert not clients.hand_over("c")
    assert clients.ask() == "row"
    assert clients.counts() == {"a": 1}


def test_a_writer_takes_the_place_of_who_only_reads(clients):
    clients.hand_over("reader")
    clients.ask()
    assert clients.hand_over("writer", writes=True)
    clients.ask()
    assert clients.counts() == {"reader": 1, "writer": 1}


@pytest.mark.parametrize(
    "error",
    [
        expired(),
        ReadOnlyError("access was denied", refused=True),
        InvalidInputError("no such option"),
        StoreNotFoundError("no store is there"),
    ],
    ids=["expired", "denied", "bad option", "moved"],
)
def test_the_newest_writers_is_tried_where_it_is_refused(clients, error):
    clients.fail("a", error)
    for key in "abc":
        clients.hand_over(key, writes=True)
    clients.hand_over("reader")
    assert clients.ask() == "row"
    assert clients.counts() == {"a": 1, "c": 1}


@pytest.mark.parametrize(
    "error",
    [
        StoreError("503", transient=True),
        ConflictError("theirs stands"),
        StoreError("the disk", tier="nvme"),
        ReadOnlyError("a policy holds the object"),
    ],
    ids=["transient", "conflict", "local", "immutable"],
)
def test_another_is_not_tried_where_it_would_change_nothing(clients, error):
    clients.fail("a", error)
    clients.hand_over("a", writes=True)
    clients.hand_over("b", writes=True)
    with pytest.raises(type(error)):
        clients.ask()
    assert clients.counts() == {"a": 1}


def test_the_same_options_change_nothing(clients):
    clients.fail("a", expired())
    clients.hand_over("a")
    with pytest.raises(StoreError):
        clients.ask()
    assert not clients.hand_over("a", writes=True)


def test_recovered_credentials_are_not_replaced_by_a_reader(clients):
    clients.fail("a", expired())
    clients.hand_over("a", writes=True)
    with pytest.raises(StoreError):
        clients.ask()
    clients.fail("a", None)
    clients.ask()
    assert not clients.hand_over("reader")
