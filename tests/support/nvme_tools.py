"""Shared parts of the tests of the nvme tier: chunks that verify themselves, crashes at any step, checks after them."""

import hashlib

from tierfs.clock import ManualClock
from tierfs.host.events import no_faults
from tierfs.host.nvme.batch import EncodedDraft
from tierfs.host.nvme.tier import NvmeTier

CHUNK = 150_000
BUDGET = 2 << 20


class Crash(BaseException):
    """A crash. A BaseException, so that no handler of errors runs after it."""


class Steps:
    """Count the ordered steps and crash at one of them. A crashed process takes no further step."""

    def __init__(self, crash_at=None):
        self.points = []
        self.crash_at = crash_at

    def __call__(self, point):
        self.points.append(point)
        if self.crash_at is not None and len(self.points) > self.crash_at:
            raise Crash(point)


def content_of(number, length=CHUNK):
    """Return a chunk's name and its bytes, which no other chunk has."""
    seed = hashlib.sha256(str(number).encode()).digest()
    data = (seed * (length // 32 + 1))[:length]
    return name_of(data), data


def name_of(data):
    return b"\1" + hashlib.blake2b(data, digest_size=16).digest()


def meta_of(data):
    return hashlib.sha256(data).digest()


def open_tier(directory, *, budget=BUDGET, faults=no_faults, clock=None):
    return NvmeTier(directory, budget_bytes=budget, clock=clock or ManualClock(), faults=faults)


def write(tier, *numbers, length=CHUNK, keep=True):
    names = []
    for number in numbers:
        name, data = content_of(number, length)
        tier.write(name, meta_of(data), memoryview(data), keep=keep)
        names.append(name)
    return names


def draft(path, names, data=None):
    write_id = hashlib.md5(path.encode()).digest()
    return EncodedDraft(write_id, path, data or f"manifest of {path}".encode(), names)


def save(tier, path, *numbers):
    """Commit one file as a flusher does. Return its seq."""
    return tier.commit([draft(path, write(tier, *numbers))])[0]


def read(source, number, length=CHUNK):
    """Return the chunk's bytes, or None if the chunk is absent. Fail if the bytes are wrong."""
    name, data = content_of(number, length)
    out = bytearray(length)
    meta = source.read(name, 0, memoryview(out))
    if meta is None:
        return None
    assert meta == meta_of(data)
    assert out == data
    return bytes(out)


def chunk_file(directory, number, length=CHUNK):
    return directory / "nvme" / "chunks" / content_of(number, length)[0].hex()


def batches(directory):
    """Return the files of the batches, oldest first."""
    return sorted(each for each in (directory / "nvme" / "drafts").iterdir() if "-" in each.name)


def paths(tier):
    return [stored.path for stored in tier.drafts()]


def file_named(reader, name):
    """Return the path of a chunk's file in the tier of an `NvmeReader`."""
    return next(reader.directory.rglob(name.hex()))
