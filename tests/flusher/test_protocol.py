"""Messages and errors between client and flusher, byte by byte."""

import array
import os
import socket
import sys
from pathlib import Path

import pytest
from support.opened import descriptors

from tierfs import errors
from tierfs.errors import FormatError, InvalidInputError, StoreError, TierfsError
from tierfs.host.rpc import protocol as wire


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_a_message_arrives_as_it_was_sent(pair):
    message = {"id": 1, "do": "wait", "arguments": {"path": "a/\udcff/é", "timeout_s": 0.5, "all": [None, True]}}
    wire.send(pair[0], wire.encode(message))
    assert wire.receive(pair[1]) == message


def test_the_end_of_the_connection_is_no_message(pair):
    pair[0].close()
    assert wire.receive(pair[1]) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe garbage",
        b'{"id": 1, "do": "wa',
        b"[1, 2]",
        b'{"id": NaN}',
        b'{"id": ' + b"9" * 5000 + b"}",
        b"[" * 50_000,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_a_message_that_is_no_json_object_is_refused(pair, data):
    if data.startswith(b'{"id": 9') and sys.version_info < (3, 10, 7):
        pytest.skip("this Python reads numbers of any length")
    pair[0].send(data)
    with pytest.raises(FormatError, match="a message is not"):
        wire.receive(pair[1])


def test_descriptors_that_come_with_a_message_are_closed(pair):
    before = descriptors()
    pair[0].sendmsg([b"{}"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 20))])
    assert wire.receive(pair[1]) == {}
    assert descriptors() == before


def test_a_packet_over_the_limit_is_refused_and_the_next_one_read(pair):
    pair[0].send(b'{"a": "' + b"x" * wire.MESSAGE_BYTES_MAX + b'"}')
    wire.send(pair[0], wire.encode({"id": 2}))
    with pytest.raises(FormatError, match="limit of 60000 bytes"):
        wire.receive(pair[1])
    assert wire.receive(pair[1]) == {"id": 2}


@pytest.mark.parametrize("value", ["x" * 60_000, b"bytes", float("nan"), {1: {2}}])
def test_a_message_that_cannot_be_sent_is_an_error(value):
    with pytest.raises(InvalidInputError):
        wire.encode({"value": value})


@pytest.mark.parametrize("name", errors.__all__)
def test_each_kind_of_error_comes_back_as_itself(name):
    kind = getattr(errors, name)
    error = wire.error_from(wire.decode(wire.encode(wire.describe_error(kind("why", path="a/b", tier="nvme")))))
    assert type(error) is (StoreError if kind is TierfsError else kind)
    assert (str(error), error.path, error.tier) == ("why", "a/b", "nvme")


@pytest.mark.parametrize("transient", [True, False])
def test_whether_retrying_helps_comes_back(transient):
    assert wire.error_from(wire.describe_error(StoreError("why", transient=transient))).transient is transient


def test_a_timeout_comes_back_as_the_builtin():
    assert type(wire.error_from(wire.describe_error(TimeoutError("late")))) is TimeoutError


def test_an_error_in_the_flusher_itself_becomes_a_store_error_that_names_it():
    error = wire.error_from(wire.describe_error(KeyError("slot")))
    assert type(error) is StoreError
    assert "KeyError: 'slot'" in str(error)


@pytest.mark.parametrize("described", [{"kind": "from-the-future", "message": "m"}, {"kind": []}, {}])
def test_an_error_of_an_unknown_kind_is_a_store_error(described):
    assert type(wire.error_from(described)) is StoreError


def test_an_answer_without_outcome_is_a_format_error():
    assert type(wire.error_from(None)) is FormatError


def test_an_error_with_long_texts_fits_a_message():
    error = StoreError("\U0001f642" * 50_000, path="\udcff" * 50_000, tier="\udcff" * 1500)
    described = wire.describe_error(error)
    assert len(wire.encode({"id": 10**18, "error": described})) <= wire.MESSAGE_BYTES_MAX
    assert "path" not in described


@pytest.mark.parametrize(
    ("older", "newer"), [("0.1.0", "0.1.1"), ("0.9", "0.10"), ("1.0", "1.0.1"), ("", "0.1"), ("nonsense", "0.0.1")]
)
def test_versions_are_compared_by_their_numbers(older, newer):
    assert wire.version_of(older) < wire.version_of(newer)


@pytest.mark.parametrize(("one", "other"), [("1.0", "1"), ("0.1.0rc1", "0.1.0"), ("0.1.0+local", "0.1"), (None, "x")])
def test_versions_with_the_same_numbers_are_equal(one, other):
    assert wire.version_of(one) == wire.version_of(other)


def test_the_other_end_is_known_by_the_kernel(pair):
    assert wire.credentials_of(pair[0]) == (os.getpid(), os.geteuid())


def test_the_socket_is_for_its_owner_only(tmp_path):
    with wire.listen(tmp_path):
        assert os.stat(tmp_path / wire.SOCKET_NAME).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("length", [106, 107, 108, 109, 250])
def test_paths_around_the_limit_of_an_address_are_reached(length):
    base = Path("/tmp") / f"tierfs-{os.getpid()}"
    directory = base / ("d" * (length - len(str(base / "x" / wire.SOCKET_NAME)) + 1))
    directory.mkdir(parents=True)
    try:
        assert len(str(directory / wire.SOCKET_NAME)) == length
        with wire.listen(directory), wire.connect(directory, 1) as connection:
            assert connection is not None
        wire.unlink(directory)
    finally:
        directory.rmdir()
        base.rmdir()


def test_a_socket_without_a_listener_is_unreachable(tmp_path):
    assert wire.connect(tmp_path, 1) is None
    assert wire.connect(tmp_path / "absent", 1) is None
    wire.listen(tmp_path).close()
    assert wire.connect(tmp_path, 1) is None
    (tmp_path / wire.SOCKET_NAME).unlink()
    (tmp_path / wire.SOCKET_NAME).write_text("a file")
    assert wire.connect(tmp_path, 1) is None


def test_a_socket_left_by_a_dead_flusher_is_replaced(tmp_path):
    wire.listen(tmp_path).close()
    with wire.listen(tmp_path), wire.connect(tmp_path, 1) as connection:
        assert connection is not None
