"""A save that cannot look at its path is based on the version that this host saw last."""

import dataclasses

import pytest

from tierfs.errors import ConflictError, NotFoundError
from tierfs.format.keys import record_key
from tierfs.host.pending.levels import Level
from tierfs.store import delete, load, rename, save, stat, status, wait
from tierfs.store.commit import Commits
from tierfs.store.tree.host_records import RECORD_BYTES_MAX

ROOT = "run/.metadata"


@pytest.fixture
def make_far(make_host):
    """A function that makes a host whose object tier is elsewhere."""

    def make(name="here"):
        host = make_host(name)
        host.close()
        endpoint = dataclasses.replace(host.descriptor.endpoint, host_local=False)
        host.descriptor = dataclasses.replace(host.descriptor, endpoint=endpoint)
        host.open()
        return host

    return make


def save_while_away(host, *changes):
    with host.held():
        for change in changes:
            change(host.store)
    wait(host.store, "", Level.OBJECT)
    assert status(host.store)["conflicts"] == []


def put(data, path=ROOT):
    return lambda store: save(store, path, data)


def look(store):
    with pytest.raises(NotFoundError):
        stat(store, ROOT)


CHANGES = {
    "save": [put(b"mine")],
    "chain": [put(b"older"), lambda store: delete(store, ROOT), put(b"old"), put(b"mine")],
    "rename": [put(b"mine", "run/new"), lambda store: rename(store, "run/new", ROOT)],
}


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("look", [look, lambda store: Commits(store).begin(ROOT, "ab")], ids=["stat", "begin"])
def test_a_look_that_finds_nothing_forgets_the_version(make_far, objects, look, change, is_restarted):
    here, there = make_far("here"), make_far("there")
    save(here.store, ROOT, b"old")
    wait(here.store, "", Level.OBJECT)
    assert load(here.store, ROOT) == b"old"
    here.store.host_records.flush()
    delete(there.store, ROOT)
    objects.delete([record_key(ROOT)])  # as gc does
    look(here.store)
    if is_restarted:  # without the writes at exit, as after a kill
        here.close()
        here.open()
    save_while_away(here, *CHANGES[change])
    assert load(there.store, ROOT) == b"mine"


@pytest.mark.parametrize("content", [b"", b"x" * RECORD_BYTES_MAX], ids=["small", "too long to keep"])
@pytest.mark.parametrize("change", ["published by the flusher", "changed by another process", "deleted by it"])
def test_the_newest_version_of_any_process_is_the_base(make_far, change, content):
    here = make_far()
    save(here.store, ROOT, content)
    wait(here.store, "", Level.OBJECT)
    if change != "published by the flusher":
        assert load(here.store, ROOT) == content
        other = here.plain()
        save(other, ROOT, content + b"2") if "changed" in change else delete(other, ROOT)
        other.host_records.flush()  # as at its exit
    save_while_away(here, put(b"mine"))
    assert load(here.plain(), ROOT) == b"mine"


@pytest.mark.parametrize("is_restarted", [False, True])
def test_another_version_found_replaces_the_version_known_before(make_far, is_restarted):
    here, there = make_far("here"), make_far("there")
    save(here.store, ROOT, b"old")
    wait(here.store, "", Level.OBJECT)
    save(there.store, ROOT, b"theirs")
    wait(there.store, "", Level.OBJECT)
    assert load(here.plain() if is_restarted else here.store, ROOT) == b"theirs"
    if is_restarted:
        here.close()
        here.open()
    save_while_away(here, put(b"mine"))
    assert load(there.store, ROOT) == b"mine"


def test_a_change_by_another_host_after_the_look_is_kept(make_far):
    here, there = make_far("here"), make_far("there")
    look(here.store)
    with here.held():
        save(here.store, ROOT, b"mine")
        save(there.store, ROOT, b"theirs")
        wait(there.store, "", Level.OBJECT)
    with pytest.raises(ConflictError):
        wait(here.store, "", Level.OBJECT)
    assert load(there.store, ROOT) == b"theirs"
