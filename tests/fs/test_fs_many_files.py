"""Many small files: listed with few requests, and read again only where they changed."""

from __future__ import annotations

from random import Random

import pytest

import tierfs
from tierfs.objects.protocol import Version
from tierfs.store import Store, save, stat
from tierfs.store.store import RecordCache

COUNTS = {"memory": 3_000, "file": 1_500}


@pytest.fixture(scope="module")
def crowded(module_place):
    """A place with many files in one directory, and their content. Shared, since writing them takes a while."""
    place = module_place
    files = {f"{place.root}/many/{number:05}": b"content %d" % number for number in range(COUNTS[place.protocol])}
    place.fs.pipe(files)
    return place, files


def asked(place, call) -> dict[str, int]:
    """Return the number of requests to the object tier during ``call``, by method. Unused methods are left out."""
    before = place.requests()
    call()
    after = place.requests()
    return {method: after[method] - before[method] for method in after if after[method] != before[method]}


def test_many_files_are_written_listed_and_read(crowded):
    place, files = crowded
    assert place.fs.find(place.root) == sorted(files)
    print("seed 3")
    sample = Random(3).sample(sorted(files), 200)
    assert place.fs.cat(sample) == {name: files[name] for name in sample}


def test_a_writer_lists_its_files_without_reading_them(crowded):
    place, files = crowded
    found: list = []
    requests = asked(place, lambda: found.extend(place.fs.ls(place / "many", detail=True)))
    assert {info["name"]: info["size"] for info in found} == {name: len(data) for name, data in files.items()}
    assert set(requests) == {"list"}
    assert requests["list"] <= 2


def test_another_process_reads_each_record_once(crowded):
    place, files = crowded
    place.store.records.clear()  # as in another process
    first = asked(place, lambda: place.fs.ls(place / "many", detail=True))
    assert first["read"] == len(files)
    assert set(first) == {"list", "read"}
    other = tierfs.TierFileSystem(target_protocol=place.protocol, skip_instance_cache=True)
    assert set(asked(place, lambda: other.ls(place / "many", detail=True))) == {"list"}


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (lambda place: place.fs.ls(place / "many", detail=False), 1),
        (lambda place: place.fs.find(place / "many"), 1),
        (lambda place: place.fs.find(place / "many", withdirs=True), 1),
        (lambda place: next(place.fs.walk(place / "many"))[2], 1),
        (lambda place: next(iter(place.fs.walk(place / "many", topdown=False)))[2], 1),
        (lambda place: place.fs.glob(place / "many/*99"), 0.01),
        (lambda place: place.fs.glob(place / "**/*99"), 0.01),
        (lambda place: place.fs.expand_path(place / "many", recursive=True), 1),
        (lambda place: list(place.fs.get_mapper(place / "many")), 1),
    ],
)
def test_names_alone_are_listed_without_reading_any(crowded, call, count):
    place, files = crowded
    place.store.records.clear()
    names: list[str] = []
    requests = asked(place, lambda: names.extend(call(place)))
    assert len(set(names) - {place / "many"}) == len(files) * count
    assert requests.pop("list") <= 6
    # Requests for the directory itself, which might be a file.
    assert sum(requests.values()) <= 4


def test_a_glob_with_details_has_them(crowded):
    place, files = crowded
    found = place.fs.glob(place / "many/*99", detail=True)
    assert {name: info["size"] for name, info in found.items()} == {
        name: len(data) for name, data in files.items() if name.endswith("99")
    }


def test_records_of_100_000_small_files_are_remembered(memory_place):
    memory_place.fs.pipe(memory_place / "a", b"x" * 100)
    manifest = stat(memory_place.store, "a").manifest
    assert manifest is not None
    cache = RecordCache()
    for number in range(100_000):
        cache.remember(f"{number}", Version("1"), manifest, len(manifest.encode("a")))
    assert cache.get("0") == ("1", manifest)


def test_only_what_changed_is_read_again(crowded):
    place, files = crowded
    place.fs.ls(place / "many", detail=True)
    other = Store(place.store.objects, place.store.descriptor, url=place.store.url)  # as in another process
    changed = dict.fromkeys(sorted(files)[:7], b"changed since")
    for name, data in changed.items():
        save(other, name.removeprefix(f"{place.root}/"), data)
    files.update(changed)
    found: list = []
    assert asked(place, lambda: found.extend(place.fs.ls(place / "many", detail=True)))["read"] == 7
    assert {info["name"]: info["size"] for info in found} == {name: len(data) for name, data in files.items()}
