"""A lookup of a pending file returns the drafts of its path, and drops or hides none."""

import pytest

from tierfs.errors import StoreError
from tierfs.host.pending.levels import Level
from tierfs.host.slab.segment import Segment
from tierfs.store.write.writer import Writer


def put(host, path, data):
    writer = Writer(host.store, path, level=Level.STAGED)
    writer.write(data)
    writer.commit()


def pending(host, path):
    found = host.tiers.drafts.pending(path)
    return None if found is None else found.draft.length


def test_a_draft_that_was_unreadable_once_is_found_later(make_host, monkeypatch):
    host = make_host()
    with host.held():
        put(host, "a", b"x" * 10)
        assert pending(host, "a") == 10
        put(host, "a", b"x" * 20)
        put(host, "b", b"x" * 30)
        with monkeypatch.context() as broken:

            def fail(*_):
                raise StoreError("the file cannot be read just now", tier="ram")

            broken.setattr(Segment, "read", fail)
            with pytest.raises(StoreError, match="just now"):
                pending(host, "b")
        assert pending(host, "b") == 30
        assert pending(host, "a") == 20


def test_the_newest_of_several_drafts_of_a_path_counts(make_host):
    host = make_host()
    with host.held():
        for length in range(1, 6):
            put(host, "a", b"x" * length)
            put(host, f"dir/{length}", b"y")
            assert pending(host, "a") == length
        assert set(host.tiers.drafts.pending_below("dir")) == {f"dir/{length}" for length in range(1, 6)}
        assert host.tiers.drafts.pending_below("di") == {}
        assert set(host.tiers.drafts.pending_below("")) == {"a", *(f"dir/{length}" for length in range(1, 6))}


def test_a_save_looks_at_no_draft_of_another_path(make_host, monkeypatch):
    host = make_host(nvme=0)
    with host.held():
        for number in range(50):
            put(host, f"f{number}", b"z")
        assert pending(host, "f0") == 1
        decoded = host.tiers.drafts._decoded
        looked, real = [], decoded.in_slot

        def in_slot(slot):
            looked.append(slot)
            return real(slot)

        monkeypatch.setattr(decoded, "in_slot", in_slot)
        assert pending(host, "f3") == 1
        assert pending(host, "none") is None
    assert len(looked) == 1
