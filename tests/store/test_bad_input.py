"""An invalid input or object raises an error that names it and the next step. No published file is lost."""

import multiprocessing
import os
import tempfile
import uuid

import pytest
from support.waiting import HANG_S

import tierfs
from tierfs.digest import DigestKind
from tierfs.errors import (
    CapacityError,
    CorruptionError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
)
from tierfs.format import keys
from tierfs.objects import MemoryObjects
from tierfs.session import open_store, parse_url
from tierfs.store import Store, delete, load, save, verify
from tierfs.store.create import create_store
from tierfs.store.tree.records import observe
from tierfs.testing import Fault, FaultyObjects, flip_bit, remove, swap, truncate

ONE = os.urandom(3_000_000)
TWO = os.urandom(200_000)
SMALL = b"small file"


@pytest.fixture
def tier():
    objects = MemoryObjects(f"/bad-{uuid.uuid4().hex}")
    yield objects
    objects.delete([info.key for info in objects.list("")])


@pytest.fixture
def store(tier):
    descriptor, _ = create_store(tier, "memory://bad", random_bytes=bytes(16))
    store = Store(tier, descriptor, url="memory://bad")
    save(store, "run/one.bin", ONE)
    save(store, "run/two.bin", TWO)
    save(store, "run/small.txt", SMALL)
    return store


def fresh(store):
    return Store(store.objects, store.descriptor, url=store.url)


def chunk_of(store, path):
    return keys.chunk_key(observe(store, path).manifest.rows[0].name)


def expect_damage(store, path, key, kind=CorruptionError):
    """Check that reading names the damage, `verify` finds it alone, and every other file is intact."""
    reader = fresh(store)
    with pytest.raises(kind) as raised:
        load(reader, path)
    assert key in str(raised.value)
    assert store.url in str(raised.value)
    assert [(damage.path, damage.key) for damage in verify(fresh(store)).damage] == [(path, key)]
    for other, content in {"run/one.bin": ONE, "run/two.bin": TWO, "run/small.txt": SMALL}.items():
        if other != path:
            assert load(reader, other) == content


DAMAGES = {
    **{f"bit {bit}": lambda tier, key, bit=bit: flip_bit(tier, key, bit) for bit in (3, 8 * 20, 8 * 50, 8 * 90)},
    "last bit": lambda tier, key: flip_bit(tier, key, 8 * tier.head(key).size - 1),
    "cut short": lambda tier, key: truncate(tier, key, tier.head(key).size // 2),
    "emptied": lambda tier, key: truncate(tier, key, 0),
    "removed": remove,
}


@pytest.mark.parametrize("what", ["chunk", "record"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(store, tier, damage, what):
    key = chunk_of(store, "run/one.bin") if what == "chunk" else keys.record_key("run/one.bin")
    DAMAGES[damage](tier, key)
    if what == "record" and damage == "removed":
        with pytest.raises(NotFoundError, match=r"run/one.bin"):
            load(fresh(store), "run/one.bin")
    else:
        expect_damage(store, "run/one.bin", key)


def test_swapped_chunks_and_records(store, tier):
    one, two = chunk_of(store, "run/one.bin"), chunk_of(store, "run/two.bin")
    swap(tier, one, two)
    assert {damage.key for damage in verify(fresh(store)).damage} == {one, two}
    for path in ("run/one.bin", "run/two.bin"):
        with pytest.raises(CorruptionError):
            load(fresh(store), path)
    assert load(fresh(store), "run/small.txt") == SMALL
    swap(tier, one, two)
    one, two = keys.record_key("run/one.bin"), keys.record_key("run/two.bin")
    swap(tier, one, two)
    assert {damage.key for damage in verify(fresh(store)).damage} == {one, two}
    with pytest.raises(CorruptionError, match=r"another path"):
        load(fresh(store), "run/one.bin")


@pytest.mark.parametrize("bit", [None, 8 * 10, 8 * 100, 8 * 400])
def test_a_damaged_or_newer_descriptor_is_never_replaced(store, tier, bit):
    data, _ = tier.read(keys.DESCRIPTOR, 1 << 16)
    if bit is None:
        tier.put(keys.DESCRIPTOR, [data.replace(b'"format": 1', b'"format": 2')])
    else:
        flip_bit(tier, keys.DESCRIPTOR, bit)
    damaged = tier.read(keys.DESCRIPTOR, 1 << 16)[0]
    reason = r"store format 2.*use a newer tierfs" if bit is None else "store"
    for opened in (lambda url: open_store(parse_url(url)), tierfs.init):
        with pytest.raises((CorruptionError, FormatError), match=reason):
            opened(f"memory:/{tier.root}")
    assert tier.read(keys.DESCRIPTOR, 1 << 16)[0] == damaged


def test_an_object_that_belongs_nowhere_is_found_by_verify(store, tier):
    tier.put(f"{keys.CHUNKS}zz/rubbish", [b"rubbish"])
    tier.put(f"{keys.TREE}rubbish", [b"rubbish"])
    assert {damage.key for damage in verify(fresh(store)).damage} == {f"{keys.CHUNKS}zz/rubbish", f"{keys.TREE}rubbish"}


def test_an_init_with_another_digest_is_refused(tmp_path):
    tierfs.init(f"file://{tmp_path}")
    with pytest.raises(InvalidInputError, match="xxh3-128"):
        tierfs.init(f"file://{tmp_path}", digest="blake3")
    with pytest.raises(InvalidInputError, match="unknown digest"):
        tierfs.init(f"file://{tmp_path}", digest="md5")


def test_a_store_with_blake3_digests_works(tmp_path):
    pytest.importorskip("blake3")
    store = tierfs.init(f"file://{tmp_path}", digest="blake3")
    save(store, "a", ONE)
    assert load(fresh(store), "a") == ONE
    assert store.descriptor.digest_kind is DigestKind.BLAKE3


FAULTS = {Fault.FULL: CapacityError, Fault.DENIED: ReadOnlyError, Fault.REFUSED: StoreError, Fault.TORN: StoreError}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", ["/chunks/", "/tree/"])
def test_an_object_tier_that_fails_in_the_middle_of_a_save(store, tier, fault, place):
    faulty = FaultyObjects(tier, seed=1)
    writing = Store(faulty, store.descriptor, url=store.url)
    writing.lease_cache.ensure()
    faulty.inject(fault, method="put", key_part=place)
    with pytest.raises(FAULTS[fault]) as raised:
        save(writing, "run/one.bin", b"new" * 1_000_000)
    assert place in str(raised.value)
    faulty.clear()
    if fault is Fault.TORN and place == "/tree/":
        # This endpoint breaks the promise of atomic puts and loses the old file, but a reader notices.
        with pytest.raises(CorruptionError):
            load(fresh(store), "run/one.bin")
    else:
        assert load(fresh(store), "run/one.bin") == ONE
    save(writing, "run/one.bin", b"new" * 1_000_000)
    assert load(fresh(store), "run/one.bin") == b"new" * 1_000_000
    assert all(damage.path != "run/one.bin" for damage in verify(fresh(store)).damage)


def write_as_nobody(directory):
    """Check the errors that a user without rights gets. Runs in its own process."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    store, _ = open_store(parse_url(f"file://{directory}/store"))
    assert load(store, "a") == ONE
    for content in (b"x", b"x" * 100_000):
        with pytest.raises(ReadOnlyError, match="check the rights"):
            save(store, "a", content)


def test_no_permission_is_said_and_loses_nothing():
    # Runs as another user, since root may do everything.
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        store = tierfs.init(f"file://{directory}/store")
        save(store, "a", ONE)
        assert load(store, "a") == ONE
        folders = [folder for folder, _, _ in os.walk(f"{directory}/store")]
        for folder in folders:
            os.chmod(folder, 0o555)
        process = multiprocessing.get_context("fork").Process(target=write_as_nobody, args=(directory,))
        process.start()
        process.join(HANG_S)
        for folder in folders:
            os.chmod(folder, 0o755)
        assert process.exitcode == 0
        assert load(fresh(store), "a") == ONE


def test_a_damaged_record_can_be_replaced_or_deleted(store, tier, caplog):
    flip_bit(tier, keys.record_key("run/one.bin"), 500)
    flip_bit(tier, keys.record_key("run/two.bin"), 500)
    save(fresh(store), "run/one.bin", ONE)
    delete(fresh(store), "run/two.bin")
    assert caplog.text.count("a damaged record is being replaced") == 2
    assert load(fresh(store), "run/one.bin") == ONE
    assert verify(fresh(store)).damage == []


def test_a_record_of_a_newer_version_is_never_replaced(store, tier):
    key = keys.record_key("run/one.bin")
    data = bytearray(tier.read(key, 1 << 16)[0])
    data[8] = 2
    tier.put(key, [data])
    for change in (lambda: save(fresh(store), "run/one.bin", b"x"), lambda: delete(fresh(store), "run/one.bin")):
        with pytest.raises(FormatError, match="use a newer tierfs"):
            change()
    assert tier.read(key, 1 << 16)[0] == data
