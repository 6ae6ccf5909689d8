"""Scrubbing finds, heals and records damage, and resumes where it stopped."""

import json
import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from support.damaging import content, make_store, reopened
from support.nvme_tools import file_named
from support.saving import Training
from support.tiered import MIB, Host

from tierfs.clock import ManualClock
from tierfs.digest import DigestKind
from tierfs.errors import CapacityError, ReadOnlyError, StoreError
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.host.pending.levels import Level
from tierfs.objects import MemoryObjects
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import delete, load, save, verify, wait
from tierfs.store.maintenance.repair_chunks import Healer
from tierfs.store.maintenance.scrub import ScrubOptions, read_scrub_record, scrub
from tierfs.store.maintenance.scrub_local import scrub_local
from tierfs.store.maintenance.scrub_piece import scrub_piece
from tierfs.testing.faults import flip_bit, remove, truncate

ALONE = ScrubOptions(concurrency=1)


class SlowObjects(WrappedObjects):
    """Record each read of a chunk, and let it take a second."""

    def __init__(self, inner, clock):
        super().__init__(inner)
        self._clock = clock
        self.reads = []

    def get(self, key, ranges, *, version=None):
        if key.startswith(keys.CHUNKS):
            self._clock.sleep(1)
            self.reads.append(key)
        return super().get(key, ranges, version=version)


def slow(store):
    return reopened(store, objects=SlowObjects(store.objects, store.clock))


def chunk_keys(store):
    return sorted(item.key for item in store.objects.list(keys.CHUNKS))


def in_the_envelope(store, key):
    flip_bit(store.objects, key, 8 * 30 + 1)


def in_a_block(store, key):
    flip_bit(store.objects, key, 8 * (store.objects.head(key).size - 5))


def test_a_sound_store_is_verified_once_around():
    store = make_store("auto")
    for number in range(20):
        save(store, f"f{number}", content(number))
    report = scrub(store)
    assert (report.chunks, report.prefixes_done, report.damage, report.is_sound) == (20, 256, [], True)
    assert report.bytes == sum(item.size for item in store.objects.list(keys.CHUNKS))
    json.dumps(report.as_dict())


def test_runs_go_on_where_the_last_one_ended_the_least_recently_verified_first():
    store = slow(make_store("auto"))
    for number in range(30):
        save(store, f"f{number}", content(number))
    store.objects.reads.clear()
    rounds = []
    for _ in range(18):
        before = len(store.objects.reads)
        scrub(store, ScrubOptions(max_seconds=5, concurrency=1))
        rounds.append(len(store.objects.reads) - before)
    assert all(0 < count <= 7 for count in rounds), rounds
    reads = store.objects.reads
    assert sorted(reads[:30]) == chunk_keys(store), "each is read once before one is read again"
    assert reads[30:60] == reads[:30]


def test_chunks_verified_in_the_future_are_verified_again():
    store = make_store("auto")
    save(store, "a", b"a" * 200_000)
    options = ScrubOptions(min_age_s=86400)
    store.clock.sleep(10 * 365 * 86400)  # until the clock is set right
    assert scrub(store, options).chunks == 1
    assert scrub(store, options).chunks == 0
    store.clock.sleep(-10 * 365 * 86400)
    assert scrub(store, options).chunks == 1
    assert scrub(store, options).chunks == 0


def test_a_killed_scrub_keeps_its_progress():
    store = slow(make_store("auto"))
    for number in range(30):
        save(store, f"f{number}", content(number))
    store.objects.reads.clear()

    def killed(piece):
        if len(store.objects.reads) >= 20:
            raise KeyboardInterrupt
        return scrub_piece(store, piece)

    with pytest.raises(KeyboardInterrupt):
        scrub(store, ALONE, run_piece=killed)
    scrub(store, ScrubOptions(max_seconds=9, concurrency=1))
    assert len(set(store.objects.reads)) >= 28


def test_a_bandwidth_is_kept():
    store = make_store("auto")
    for number in range(10):
        save(store, f"f{number}", content(number, 100_000))
    before = store.clock.monotonic()
    report = scrub(store, ScrubOptions(bandwidth=50_000, concurrency=1))
    assert store.clock.monotonic() - before == pytest.approx(report.bytes / 50_000)


@pytest.mark.parametrize(("damage", "codecs"), [(in_the_envelope, "off"), (in_a_block, "all")])
def test_an_object_is_healed_from_a_replica(damage, codecs):
    store, replica = make_store(codecs), make_store(codecs)
    data = Training().file()
    for target in (store, replica):
        save(target, "a", data)
    keys_of = chunk_keys(store)
    before = {key: store.objects.read(key, 64 << 20)[0] for key in keys_of}
    for key in keys_of:
        damage(store, key)
    report = scrub(store, ALONE, replicas=[replica])
    assert len(report.damage) == len(keys_of)
    assert report.is_sound
    assert {key: store.objects.read(key, 64 << 20)[0] for key in keys_of} == before
    assert load(store, "a") == data


def test_damage_that_nothing_heals_is_named_until_it_is_gone():
    store = make_store("auto")
    save(store, "a", content(1))
    save(store, "b", content(2))
    key = chunk_keys(store)[0]
    in_a_block(store, key)
    report = scrub(store, ALONE)
    assert [(each.key, each.healed) for each in report.damage] == [(key, "")]
    later = scrub(store, ScrubOptions(max_seconds=0))
    assert (list(later.known), later.is_sound) == ([key], False)
    assert read_scrub_record(store).last["damaged"] == 1
    remove(store.objects, key)
    for path in ("a", "b"):
        delete(store, path)
    assert scrub(store, ALONE).is_sound


@pytest.mark.parametrize("damage", ["block", "envelope", "cut"])
def test_damage_is_logged_once_with_the_name_of_the_object(caplog, damage):
    store = make_store()
    save(store, "a", content(0))
    (key,) = chunk_keys(store)
    if damage == "cut":
        truncate(store.objects, key, 100)
    else:
        flip_bit(store.objects, key, 8 * 30 + 1 if damage == "envelope" else 8 * 2000)
    assert len(scrub(reopened(store), ScrubOptions(heal=False, concurrency=1)).damage) == 1
    (logged,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert logged.count(key) == 1
    assert logged.startswith(f"again/{key}")


@pytest.mark.parametrize("options", [ALONE, ScrubOptions(max_seconds=0), ScrubOptions(dry_run=True)])
def test_a_missing_chunk_and_an_unreadable_record_are_no_sound_store(options):
    store = make_store("auto")
    for number in range(3):
        save(store, f"f{number}", content(number))
    assert scrub(store, options).is_sound
    remove(store.objects, chunk_keys(store)[0])
    report = scrub(store, options)
    assert (report.missing, report.is_sound) == (1, False)
    assert scrub(store, replace(options, look_age_s=None)).missing == (0 if options.dry_run else 1), "it is noted"
    flip_bit(store.objects, keys.record_key("f0"), 8 * 30)
    store.records.clear()
    report = scrub(store, options)
    assert ([each.path for each in report.unreadable], report.is_sound) == (["f0"], False)


def test_a_scrub_without_healing_changes_nothing():
    store = make_store("auto")
    save(store, "a", content(1))
    (key,) = chunk_keys(store)
    in_the_envelope(store, key)
    version = store.objects.head(key).version
    assert not scrub(store, ScrubOptions(heal=False, concurrency=1)).is_sound
    assert store.objects.head(key).version == version


class RefusingObjects(WrappedObjects):
    """Refuses every put while ``error`` is set."""

    error = None

    def put(self, key, data, **options):
        if self.error is not None:
            raise self.error
        return super().put(key, data, **options)


@pytest.mark.parametrize("error", [CapacityError("the disk is full"), ReadOnlyError("read-only")])
def test_a_store_that_takes_no_put_is_still_verified(error):
    sound = make_store("off")
    store = reopened(sound, objects=RefusingObjects(sound.objects))
    replica = make_store("off")
    for each in (store, replica):
        save(each, "a", content(1))
    (key,) = chunk_keys(store)
    in_a_block(store, key)
    store.objects.error = error
    report = scrub(store, replicas=[replica])
    assert [(each.key, each.healed) for each in report.damage] == [(key, "")]
    store.objects.error = None
    assert [each.key for each in scrub(store, replicas=[replica]).damage if each.healed] == [key]


def test_another_object_of_the_same_content_heals():
    store = make_store("off")
    save(store, "a", content(1))
    (key,) = chunk_keys(store)
    data = store.objects.read(key, 1 << 20)[0]
    in_a_block(store, key)
    store.objects.put(key[:-1] + "1", [data])
    report = scrub(store, ALONE)
    assert report.damage[0].healed.endswith(".1")
    assert load(store, "a") == content(1)


def test_a_missing_object_is_made_again_under_its_name():
    store, replica = make_store("auto"), make_store("auto")
    for target in (store, replica):
        save(target, "a", content(1))
    (key,) = chunk_keys(store)
    size = store.objects.head(key).size
    remove(store.objects, key)
    name = keys.parse_chunk_key(key, DigestKind.XXH3_128)
    assert Healer(store).heal(name, size, len(content(1))) == ""
    assert Healer(store, [replica]).heal(name, size) == replica.url
    assert verify(store).damage == []


def test_pieces_run_on_any_executor():
    store = make_store("auto")
    for number in range(40):
        save(store, f"f{number}", content(number))
    key = chunk_keys(store)[7]
    in_a_block(store, key)
    with ThreadPoolExecutor(3) as executor:
        report = scrub(store, ALONE, executor=executor, workers=3, run_piece=partial(scrub_piece, store))
    assert (report.chunks, report.prefixes_done, [each.key for each in report.damage]) == (40, 256, [key])


def test_a_piece_that_fails_ends_the_run_and_what_is_done_is_noted():
    store = make_store("auto")
    for number in range(40):
        save(store, f"f{number}", content(number))

    def failing(piece):
        if piece.prefix == "80":
            raise StoreError("gone", transient=True)
        return scrub_piece(store, piece)

    with ThreadPoolExecutor(1) as executor, pytest.raises(StoreError):
        scrub(store, ALONE, executor=executor, run_piece=failing)
    done = read_scrub_record(store).prefixes
    assert "7f" in done
    assert "80" not in done


def test_a_damaged_scrub_record_is_made_anew():
    store = make_store("auto")
    save(store, "a", content(1))
    scrub(store, ALONE)
    flip_bit(store.objects, keys.SCRUB, 200)
    assert scrub(store, ALONE).prefixes_done == 256
    assert read_scrub_record(store).last["chunks"] == 1


@pytest.fixture
def host(tmp_path):
    objects = MemoryObjects(f"/scrub-{uuid.uuid4().hex}")
    descriptor = Descriptor(uuid.uuid4().hex, 0, DigestKind.XXH3_128, objects.capabilities)
    objects.put(keys.DESCRIPTOR, [descriptor.encode()])
    host = Host(tmp_path, objects, descriptor, ram=64 * MIB, nvme=64 * MIB, ack=Level.LOCAL)
    yield host
    host.close()


@pytest.mark.parametrize("is_here", [True, False], ids=["here", "on another host"])
def test_an_object_is_healed_from_the_nearest_tier(host, is_here):
    data = random.Random(1).randbytes(3 * MIB)
    save(host.store, "a", data)
    wait(host.store, "a", Level.OBJECT)
    sources = host.tiers.sources
    if not is_here:
        sources.tiers[:] = [replace(sources.tier("ram"), name="peer", is_here=False)]
    for key in chunk_keys(host.store):
        in_a_block(host.store, key)
    report = scrub(host.store, ALONE)
    assert {each.healed for each in report.damage} == {"the ram tier" if is_here else "the peer tier"}
    assert report.is_sound
    assert load(host.plain(), "a") == data


def test_a_healed_object_is_used_again_by_the_process_that_found_it_damaged(host):
    save(host.store, "a", random.Random(1).randbytes(3 * MIB))
    wait(host.store, "a", Level.OBJECT)
    (key,) = chunk_keys(host.store)
    name = keys.parse_chunk_key(key, DigestKind.XXH3_128)
    in_a_block(host.store, key)
    host.store.report_damage(name)
    assert scrub(host.store, ALONE).is_sound
    assert not host.store.lease_cache.is_unusable(name)


def test_a_damaged_copy_in_the_nvme_tier_is_found_and_put_aside(host):
    data = random.Random(2).randbytes(3 * MIB)
    save(host.store, "a", data)
    wait(host.store, "a", Level.OBJECT)
    sound = scrub_local(host.store, "nvme")
    assert (sound.chunks, sound.damage, sound.is_whole_round) == (1, [], True)
    (name, _), *_ = host.tiers.nvme.chunks()
    with file_named(host.tiers.nvme, name).open("r+b") as file:
        file.seek(8192 + 1000)
        file.write(b"damage")
    report = scrub_local(host.store, "nvme")
    assert [(each.digest, each.elsewhere) for each in report.damage] == [(name[1:].hex(), True)]
    assert report.is_sound
    assert scrub_local(host.store, "nvme").damage == [], "it is not there any more"
    assert load(host.store, "a") == data


def test_a_round_over_a_local_tier_goes_on_where_it_ended(host):
    for number in range(5):
        save(host.store, f"f{number}", random.Random(number).randbytes(MIB + number))
    wait(host.store, "", Level.OBJECT)
    host.store.clock = ManualClock()
    seen = []
    for _ in range(3):
        report = scrub_local(host.store, "ram", max_seconds=1.5, progress=lambda _: host.store.clock.sleep(1))
        seen.append(report.chunks)
    assert seen == [2, 2, 2]
