"""A crash at every ordered step: before and after each request, and within a put of the directory backend.

Afterwards either the old file or the new one is there, whole, and everything else is unchanged.
"""

import itertools
import os
import uuid

import pytest

from tierfs.clock import ManualClock
from tierfs.errors import NotFoundError
from tierfs.objects import LocalObjects, MemoryObjects
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import Store, WriteMode, Writer, copy, delete, find, load, make_directory, rename, save, stat, verify
from tierfs.store.create import create_store, read_descriptor

OLD = b"old" * 40000
NEW = b"new" * 5_600_000  # two chunks
OTHER = b"other" * 30000


class Crash(BaseException):
    """The process ended at this request."""


class Crashing(WrappedObjects):
    """End the process before or after the n-th request."""

    def __init__(self, inner, step):
        super().__init__(inner)
        self.step = step
        self.calls = itertools.count()

    def call(self, method, *args, **kwargs):
        number = next(self.calls)
        if 2 * number == self.step:
            raise Crash
        try:
            return getattr(self.inner, method)(*args, **kwargs)
        finally:
            if 2 * number + 1 == self.step:
                raise Crash

    def put(self, *args, **kwargs):
        return self.call("put", *args, **kwargs)

    def get(self, *args, **kwargs):
        return self.call("get", *args, **kwargs)

    def stream(self, *args, **kwargs):
        return self.call("stream", *args, **kwargs)

    def read(self, *args, **kwargs):
        return self.call("read", *args, **kwargs)

    def head(self, *args, **kwargs):
        return self.call("head", *args, **kwargs)

    def list(self, *args, **kwargs):
        return self.call("list", *args, **kwargs)

    def delete(self, *args, **kwargs):
        return self.call("delete", *args, **kwargs)

    def delete_version(self, *args, **kwargs):
        return self.call("delete_version", *args, **kwargs)


def open_on(objects):
    return Store(objects, read_descriptor(objects, "store"), url="store", clock=ManualClock())


def prepare(objects):
    create_store(objects, "store", random_bytes=bytes(16))
    store = open_on(objects)
    save(store, "file", OLD)
    save(store, "other", OTHER)


def content(store, path):
    try:
        return load(store, path)
    except NotFoundError:
        return None


def append(store):
    writer = Writer(store, "file", mode=WriteMode.APPEND)
    writer.write(NEW)
    writer.commit()


# Each operation, and the pairs of (file, target) that may be there after a crash.
OPERATIONS = {
    "overwrite": (lambda store: save(store, "file", NEW), {(OLD, None), (NEW, None)}),
    "overwrite with a small file": (lambda store: save(store, "file", b"small"), {(OLD, None), (b"small", None)}),
    "append": (append, {(OLD, None), (OLD + NEW, None)}),
    "create": (lambda store: save(store, "target", NEW, mode=WriteMode.CREATE), {(OLD, None), (OLD, NEW)}),
    "delete": (lambda store: delete(store, "file"), {(OLD, None), (None, None)}),
    "copy": (lambda store: copy(store, "file", "target"), {(OLD, None), (OLD, OLD)}),
    "rename": (lambda store: rename(store, "file", "target"), {(OLD, None), (OLD, OLD), (None, OLD)}),
    "make directory": (lambda store: make_directory(store, "directory"), {(OLD, None)}),
}


def check(objects, allowed):
    store = open_on(objects)
    found = (content(store, "file"), content(store, "target"))
    assert found in allowed
    assert load(store, "other") == OTHER
    assert verify(store).damage == []
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_crash_at_any_request_leaves_the_old_or_the_new_file(name):
    operation, allowed = OPERATIONS[name]
    seen = set()
    for step in itertools.count():
        objects = MemoryObjects(f"/crash-{uuid.uuid4().hex}")
        prepare(objects)
        try:
            operation(open_on(Crashing(objects, step)))
        except Crash:
            seen.add(check(objects, allowed))
            operation_again(objects, name)
        else:
            break
        finally:
            objects.delete([info.key for info in objects.list("")])
    assert step > 2
    assert seen == allowed, "not every outcome was seen"


def operation_again(objects, name):
    """After a crash the same operation succeeds, unless it had already taken effect."""
    store = open_on(objects)
    operation, _ = OPERATIONS[name]
    if name == "overwrite":
        operation(store)
        assert load(store, "file") == NEW
    elif name == "make directory":
        make_directory(store, "directory", exist_ok=True)
        assert stat(store, "directory").is_directory


STEPS = ("writev", "fsync", "utime", "link", "rename", "unlink")


@pytest.mark.parametrize("name", ["overwrite", "create", "delete", "rename"])
def test_a_crash_within_a_put_leaves_whole_objects(name, tmp_path, monkeypatch):
    operation, allowed = OPERATIONS[name]
    for number in itertools.count():
        root = tmp_path / str(number)
        objects = LocalObjects(root)
        prepare(objects)
        store = open_on(objects)
        left = itertools.count(number, -1)
        with monkeypatch.context() as patch:
            for step in STEPS:
                patch.setattr(os, step, crashing(getattr(os, step), left, after=number % 2))
            try:
                operation(store)
            except Crash:
                crashed = True
            else:
                crashed = False
        check(LocalObjects(root), allowed)
        assert not [entry for entry in find(open_on(objects), "") if entry.foreign is not None]
        if not crashed:
            break
    assert number > 5


def crashing(real, left, *, after):
    def wrapper(*args, **kwargs):
        if next(left) // 2 == 0 and not after:
            raise Crash
        result = real(*args, **kwargs)
        if after and next(left) // 2 == 0:
            raise Crash
        return result

    return wrapper


def test_a_store_is_made_once_or_not_at_all_whatever_crashes():
    for step in itertools.count():
        objects = MemoryObjects(f"/crash-{uuid.uuid4().hex}")
        try:
            create_store(Crashing(objects, step), "store", random_bytes=bytes(16))
        except Crash:
            first, _ = create_store(objects, "store", random_bytes=b"1" * 16)
            assert create_store(objects, "store", random_bytes=b"2" * 16) == (first, False)
        else:
            break
    assert step >= 4
