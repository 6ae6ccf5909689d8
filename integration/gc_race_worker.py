"""One process of `test_gc_race`: it rewrites files with known chunks, deletes and renames, or collects garbage."""

from __future__ import annotations

import random
import sys
import time

import tierfs
from tierfs.errors import ConflictError, NotFoundError, StoreError
from tierfs.store import copy, delete, find, rename, save
from tierfs.store.maintenance.gc import GcOptions, collect
from tierfs.store.tree.references import write_references

CONTENTS = 10
PATHS = [*(f"d{number % 3}/f{number}" for number in range(20)), *(f"d{number}/.metadata" for number in range(3))]


def content(number: int) -> bytes:
    """Return the same bytes each time, so that every writer finds chunks of other writers."""
    return random.Random(number).randbytes(70_000 + 1000 * number)


def write(store, draw: random.Random) -> None:
    if draw.random() < 0.3:
        copy(store, draw.choice(PATHS), draw.choice(PATHS))
    else:
        path = draw.choice(PATHS)
        save(store, path, content(draw.randrange(CONTENTS)))
        if path.endswith(".metadata"):
            write_references(store, path.rpartition("/")[0])


def remove(store, draw: random.Random) -> None:
    if draw.random() < 0.5:
        rename(store, draw.choice(PATHS), draw.choice(PATHS))
        return
    for entry in find(store, f"d{draw.randrange(3)}", detail=False):
        if not entry.is_directory:
            delete(store, entry.path)


def gc(store, draw: random.Random) -> None:
    report = collect(store, GcOptions(concurrency=draw.choice([1, 4])))
    assert not report.is_blocked, report.unreadable
    print("deleted", report.deleted.count, "condemned", report.condemned.count)
    time.sleep(0.2)


def main() -> None:
    url, role, seed, seconds = sys.argv[1:]
    store = tierfs.init(url)
    draw = random.Random(int(seed))
    does = {"write": write, "remove": remove, "gc": gc}[role]
    ends = time.monotonic() + float(seconds)
    done = refused = 0
    while time.monotonic() < ends:
        try:
            does(store, draw)
            done += 1
        except (ConflictError, NotFoundError):
            refused += 1
        except StoreError as error:
            if "was collected" not in str(error) and "was paused" not in str(error):
                raise
            refused += 1
        if role != "gc":
            time.sleep(draw.choice([0, 0.01, 3]) if draw.random() < 0.05 else 0.01)
    print(f"{role}: {done} done, {refused} refused")


if __name__ == "__main__":
    main()
