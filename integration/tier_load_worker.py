"""One process of `test_tier_load`: a writer, or a reader that knows at each moment what it must find at least.

Usage: python tier_load_worker.py SPEC ROLE NUMBER, where SPEC is a JSON file. The processes share a table, a file of
u64. For each writer and name it has the last record begun, the last one committed, and the last removal begun. A
reader must see the record that was committed before its read began, or a newer one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import logging
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback

import describing
import fsspec

from tierfs.errors import CapacityError, ConflictError, TierfsError

NAMES = ("a", "b", "c", "log")
BEGUN, COMMITTED, REMOVED = range(3)
RACES = 2
LOG_RECORDS_MAX = 6


class Table:
    """The progress of all writers, in a file that all processes map."""

    def __init__(self, path, writers):
        self._columns = len(NAMES) * 3
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), max(writers, 1) * self._columns * 8)

    def _at(self, writer, name, what):
        return (writer * self._columns + NAMES.index(name) * 3 + what) * 8

    def get(self, writer, name, what):
        return struct.unpack_from("<Q", self._map, self._at(writer, name, what))[0]

    def set(self, writer, name, what, value):
        struct.pack_into("<Q", self._map, self._at(writer, name, what), value)

    @classmethod
    def make(cls, path, writers):
        with open(path, "wb") as file:
            file.truncate(writers * len(NAMES) * 3 * 8)


class Process:
    def __init__(self, spec, role, number):
        self.spec, self.number = spec, number
        self.noise = random.Random(f"{spec['seed']} {role} {number}")
        self.fs, self.root = fsspec.url_to_fs(spec["url"], **spec["options"])
        self.table = Table(spec["table"], spec["writers"])
        self.counts = dict.fromkeys(("writes", "reads", "absent", "conflicts", "evicted", "prefetched"), 0)
        self.ends = spec["ends"]

    def path(self, name, writer=None):
        return f"{self.root}/w{self.number if writer is None else writer}/{name}"

    def run(self, steps):
        while time.time() < self.ends:
            self.noise.choice(steps)()
        return {"counts": self.counts, **self.result()}

    def result(self):
        return {}

    def evict(self, path):
        with contextlib.suppress(FileNotFoundError):
            self.counts["evicted"] += self.fs.evict(path, self.noise.choice(["ram", "nvme"]))

    def prefetch(self, path):
        with contextlib.suppress(FileNotFoundError, CapacityError):
            self.counts["prefetched"] += self.fs.prefetch(path, self.noise.choice(["ram", "nvme"]))


class Writer(Process):
    def __init__(self, spec, number):
        super().__init__(spec, "writer", number)
        self.name = f"w{number}"
        self.last = 0
        self.log = []
        self.increments = 0
        self.races = {}

    def steps(self):
        often = [self.write] * 6 + [self.replace] * 2 + [self.append] * 2
        return [*often, self.remove, self.count, self.race, self.copy, self.move_caches, self.read_back]

    def result(self):
        state = {name: self.table.get(self.number, name, COMMITTED) for name in NAMES}
        removed = {name: self.table.get(self.number, name, REMOVED) for name in NAMES}
        return {"last": state, "removed": removed, "log": self.log, "increments": self.increments, "races": self.races}

    def size(self):
        if self.noise.random() < 0.1:
            return self.noise.randrange(100, 60_000)
        return int(2 ** self.noise.uniform(16, 23))

    def record(self):
        self.last += 1
        return self.last, describing.encode(self.name, self.last, self.size())

    def put(self, path, content):
        ack = self.noise.choice(["staged"] * 6 + ["local"] * 3 + ["object"])
        with self.fs.open(path, "wb", ack=ack) as file:
            cut = self.noise.randrange(len(content))
            file.write(content[:cut])
            file.write(content[cut:])

    @contextlib.contextmanager
    def changing(self, name, number):
        self.table.set(self.number, name, BEGUN, number)
        yield
        self.table.set(self.number, name, COMMITTED, number)
        self.counts["writes"] += 1

    def write(self):
        name = self.noise.choice(NAMES[:3])
        number, content = self.record()
        with self.changing(name, number):
            self.put(self.path(name), content)

    def replace(self):
        """Write a temporary file and rename it, as DCP does with its metadata."""
        name = self.noise.choice(NAMES[:3])
        number, content = self.record()
        with self.changing(name, number):
            self.put(self.path(f"{name}.tmp"), content)
            self.fs.mv(self.path(f"{name}.tmp"), self.path(name))

    def append(self):
        number, content = self.record()
        with self.changing("log", number):
            if len(self.log) >= LOG_RECORDS_MAX:
                self.log = []
                self.put(self.path("log"), content)
            else:
                with self.fs.open(self.path("log"), "ab", ack="staged") as file:
                    file.write(content)
            self.log.append(number)

    def remove(self):
        name = self.noise.choice(NAMES[:3])
        self.last += 1
        if self.table.get(self.number, name, COMMITTED) > self.table.get(self.number, name, REMOVED):
            self.table.set(self.number, name, REMOVED, self.last)
            with self.changing(name, self.last):
                self.fs.rm_file(self.path(name))

    def copy(self):
        """Copy a file. Nothing reads the copies, which share chunks with files that are soon overwritten."""
        name = self.noise.choice(NAMES[:3])
        if self.table.get(self.number, name, COMMITTED) > self.table.get(self.number, name, REMOVED):
            self.fs.cp_file(self.path(name), self.path(f"copy-of-{name}"))

    def move_caches(self):
        path = self.path(self.noise.choice(NAMES))
        self.noise.choice([self.evict, self.prefetch])(path)

    def read_back(self):
        name = self.noise.choice(NAMES[:3])
        last = self.table.get(self.number, name, COMMITTED)
        if last > self.table.get(self.number, name, REMOVED):
            (record,) = describing.decode(self.fs.cat_file(self.path(name)))
            assert (record.writer, record.number) == (self.name, last), f"{record} for {self.name} {last}"
            self.counts["reads"] += 1

    def count(self):
        """Increment a number that all writers share. Each starts from a value that another writer left pending."""
        path = f"{self.root}/shared/number"
        with open(self.spec["table"] + ".lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                text = self.fs.cat_file(path)
            except FileNotFoundError:
                text = b"0"
            with self.fs.open(path, "wb", ack=self.noise.choice(["staged", "local"])) as file:
                file.write(b"%d" % (int(text) + 1))
            self.increments += 1

    def race(self):
        """Append to a list of all writers without coordination. An acknowledged entry must be in it at the end."""
        if not self.spec["races"]:
            return
        race = self.noise.randrange(RACES)
        path = f"{self.root}/race{race}/list"
        mine = f"{self.name}.{len(self.races.get(str(race), [])) + self.counts['conflicts']}"
        try:
            with self.fs.open(path, "wb", ack="object") as file:
                # Read after the open: the write depends on the content at that time.
                try:
                    before = self.fs.cat_file(path)
                except FileNotFoundError:
                    before = b""
                file.write(before + mine.encode() + b" ")
        except ConflictError:
            self.counts["conflicts"] += 1
            from tierfs.store import discard_conflict

            store, relative = self.fs._locate(path)
            discard_conflict(store, relative)
        else:
            self.races.setdefault(str(race), []).append(mine)


class Reader(Process):
    def __init__(self, spec, number):
        super().__init__(spec, "reader", number)
        self.seen = {}

    def steps(self):
        return [self.read] * 8 + [self.read_a_part] * 3 + [self.move_caches, self.look]

    def _pick(self):
        writer, name = self.noise.randrange(self.spec["writers"]), self.noise.choice(NAMES)
        return writer, name, self.table.get(writer, name, COMMITTED)

    def _absent(self, writer, name, least):
        removed = self.table.get(writer, name, REMOVED)
        assert not least or removed >= least, f"w{writer}/{name} {least} is gone, last removed was {removed}"
        self.counts["absent"] += 1

    def _note(self, writer, name, least, number):
        seen = max(self.seen.get((writer, name), 0), least)
        assert number >= seen, f"w{writer}/{name}: {number} after {seen} ({least} was committed)"
        assert number <= self.table.get(writer, name, BEGUN)
        self.seen[writer, name] = number
        self.counts["reads"] += 1

    def read(self):
        writer, name, least = self._pick()
        try:
            content = self.fs.cat_file(self.path(name, writer))
        except FileNotFoundError:
            self._absent(writer, name, least)
            return
        records = describing.decode(content)
        assert {record.writer for record in records} == {f"w{writer}"}, records
        numbers = [record.number for record in records]
        assert numbers == sorted(set(numbers))
        assert name == "log" or len(records) == 1, records
        self._note(writer, name, least, numbers[-1])

    def read_a_part(self):
        writer, name, _ = self._pick()
        try:
            with self.fs.open(self.path(name, writer), "rb") as file:
                size = file.seek(0, 2)
                start = self.noise.randrange(size)
                end = self.noise.randrange(start, size + 1)
                file.seek(start)
                part = file.read(end - start)
                file.seek(0)
                whole = file.read()
        except FileNotFoundError:
            return
        describing.decode(whole)
        assert part == whole[start:end], f"w{writer}/{name}: bytes {start} to {end}"

    def look(self):
        writer = self.noise.randrange(self.spec["writers"])
        before = {name: self.table.get(writer, name, COMMITTED) for name in NAMES}
        try:
            listed = {path.rpartition("/")[2] for path in self.fs.ls(f"{self.root}/w{writer}", detail=False)}
        except FileNotFoundError:
            listed = set()
        for name, least in before.items():
            if name not in listed:
                self._absent(writer, name, least)

    def move_caches(self):
        writer, name, _ = self._pick()
        self.noise.choice([self.evict, self.prefetch])(self.path(name, writer))


def main():
    # The test sends the signal when a process hangs.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    role, number = sys.argv[2], int(sys.argv[3])
    worker = (Writer if role == "writer" else Reader)(spec, number)
    try:
        result = worker.run(worker.steps())
    except BaseException as error:
        result = {"failed": traceback.format_exc(), "counts": worker.counts, "kind": type(error).__name__}
        if isinstance(error, TierfsError):
            with contextlib.suppress(Exception):
                result["status"] = worker.fs.status(worker.root)
    with open(f"{spec['results']}/{role}{number}.part", "w") as file:
        json.dump(result, file)
    os.replace(file.name, f"{spec['results']}/{role}{number}.json")


if __name__ == "__main__":
    main()
