"""Transactions: no file is published before the end; then every file is, in order."""

from __future__ import annotations

import fsspec
import pytest

from tierfs.errors import AlreadyExistsError, ConflictError, InvalidInputError
from tierfs.store import Writer


@pytest.fixture
def published(monkeypatch) -> list[str]:
    """Paths in the order in which they are published."""
    order: list[str] = []
    commit = Writer.commit

    def note(writer):
        manifest = commit(writer)
        order.append(writer.path)
        return manifest

    monkeypatch.setattr(Writer, "commit", note)
    return order


def test_a_transaction_publishes_all_in_order_at_its_end(place, published):
    with place.fs.transaction:
        for name in ("c", "a", "b"):
            with place.fs.open(place / name, "wb") as file:
                file.write(name.encode())
        assert place.names() == []
        assert published == []
    assert published == ["c", "a", "b"]
    assert place.fs.cat([place / "a", place / "b", place / "c"]) == {place / name: name.encode() for name in "abc"}


@pytest.mark.parametrize("size", [10, 20 << 20])
def test_an_exception_discards_everything(place, random_bytes, size):
    place.fs.pipe(place / "a", b"old")
    with pytest.raises(KeyError), place.fs.transaction:
        with place.fs.open(place / "a", "wb") as file:
            file.write(random_bytes(size, 1))
        place.fs.pipe_file(place / "b", b"new")
        raise KeyError("boom")
    assert place.names() == ["a"]
    assert place.fs.cat(place / "a") == b"old"
    place.fs.pipe(place / "a", b"new")
    assert place.fs.cat(place / "a") == b"new"


def test_pipe_put_text_and_compressed_files_take_part(place, tmp_path):
    (tmp_path / "local").write_bytes(b"put")
    with place.fs.transaction:
        place.fs.pipe(place / "piped", b"pipe")
        place.fs.pipe({place / "many/1": b"1", place / "many/2": b"2"})
        place.fs.put_file(str(tmp_path / "local"), place / "put")
        place.fs.write_text(place / "text", "text")
        with place.fs.open(place / "gz", "wb", compression="gzip") as file:
            file.write(b"gz")
        place.fs.touch(place / "touched")
        assert place.names() == []
    assert place.names() == ["gz", "many/1", "many/2", "piped", "put", "text", "touched"]
    assert place.fs.cat(place / "text") == b"text"
    with place.fs.open(place / "gz", compression="gzip") as file:
        assert file.read() == b"gz"


def test_a_handled_exception_discards_its_file_alone(place):
    with place.fs.transaction:
        place.fs.pipe(place / "a", b"whole")
        with pytest.raises(KeyError), place.fs.open(place / "b", "wb") as file:
            file.write(b"half")
            raise KeyError("boom")
    assert place.names() == ["a"]


def test_the_last_write_of_a_transaction_is_published(place, published):
    place.fs.pipe(place / "a", b"old")
    published.clear()
    with place.fs.transaction:
        place.fs.pipe(place / "a", b"first")
        place.fs.pipe(place / "a", b"second")
        assert place.fs.cat(place / "a") == b"old"
    assert place.fs.cat(place / "a") == b"second"
    assert published == ["a"]


def test_a_second_write_that_fails_leaves_the_first(place):
    with place.fs.transaction:
        place.fs.pipe(place / "a", b"first")
        with pytest.raises(KeyError), place.fs.open(place / "a", "wb") as file:
            file.write(b"half")
            raise KeyError("boom")
    assert place.fs.cat(place / "a") == b"first"


def test_an_exclusive_create_sees_what_the_transaction_wrote(place):
    with place.fs.transaction:
        place.fs.pipe_file(place / "a", b"first", mode="create")
        with pytest.raises(AlreadyExistsError):
            place.fs.pipe_file(place / "a", b"second", mode="create")
    assert place.fs.cat(place / "a") == b"first"


def test_an_append_to_a_file_of_the_transaction_is_refused(place):
    with place.fs.transaction:
        place.fs.pipe(place / "a", b"first")
        with pytest.raises(InvalidInputError, match="transaction"):
            place.fs.open(place / "a", "ab")
    assert place.fs.cat(place / "a") == b"first"


@pytest.mark.parametrize("mode", ["wb", "w"])
def test_an_unclosed_file_fails_the_transaction(place, mode):
    with pytest.raises(InvalidInputError, match="not closed"), place.fs.transaction:
        place.fs.pipe(place / "a", b"whole")
        file = place.fs.open(place / "b", mode)
        file.write("half" if mode == "w" else b"half")
    assert place.names() == []
    place.fs.pipe(place / "c", b"x")
    assert place.names() == ["c"]


def test_a_conflict_discards_the_files_after_it(place):
    url_fs = fsspec.filesystem("tierfs", target_protocol=place.protocol)
    with pytest.raises(ConflictError), place.fs.transaction:
        for name in ("a", "b", "c"):
            place.fs.pipe(place / name, b"ours")
        url_fs.pipe(place / "b", b"theirs")
    assert place.fs.cat([place / "a", place / "b"]) == {place / "a": b"ours", place / "b": b"theirs"}
    assert place.names() == ["a", "b"]
    place.fs.pipe(place / "d", b"x")
    assert place.names() == ["a", "b", "d"]


def test_another_instance_is_not_part_of_the_transaction(place):
    other = fsspec.filesystem("tierfs", target_protocol=place.protocol)
    with place.fs.transaction:
        other.pipe(place / "a", b"x")
        assert place.names() == ["a"]
