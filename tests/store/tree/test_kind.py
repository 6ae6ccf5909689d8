"""The kind of a path, with the object tier reachable and unreachable."""

import pytest
from support.tiered import MIB, content

from tierfs.errors import StoreError
from tierfs.host.pending.levels import Level
from tierfs.store import delete, kind_of, make_directory, save, wait


def test_a_path_is_a_file_a_directory_or_nothing(any_host):
    save(any_host.store, "run/a", content(10))
    make_directory(any_host.store, "empty")
    found = [kind_of(any_host.store, path) for path in ("run/a", "run", "", "empty", "run/b", "run/a/b")]
    assert found == ["file", "directory", "directory", "directory", None, None]
    wait(any_host.store, "", Level.OBJECT)
    assert [kind_of(any_host.store, path) for path in ("run/a", "run", "run/b")] == ["file", "directory", None]
    assert any_host.tiers.counters["blind_looks"] == 0


def test_while_the_object_tier_is_away_what_this_host_saw_counts(host, caplog):
    save(host.store, "run/a", content(10))
    save(host.store, "run/gone", content(10))
    wait(host.store, "", Level.OBJECT)
    assert kind_of(host.store, "run/a") == kind_of(host.store, "run/gone") == "file"
    with host.held():
        save(host.store, "new/b", content(MIB))
        save(host.store, "run/gone", b"once more")
        delete(host.store, "run/gone")
        paths = ("run/a", "run/gone", "new/b", "new", "never")
        assert [kind_of(host.store, path) for path in paths] == ["file", None, "file", "directory", None]
    assert host.tiers.counters["blind_looks"] == 3
    assert caplog.text.count("the state that this host saw last is used") == 1


def test_a_save_at_object_fails_while_the_tier_is_away(make_host):
    host = make_host(ack=Level.OBJECT)
    save(host.store, "a", content(10))
    with host.held(), pytest.raises(StoreError):
        kind_of(host.store, "a")
