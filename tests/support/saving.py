"""The steps of a flusher, one by one and without threads, and files that are worth encoding."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections import Counter

import numpy as np

from tierfs import digest
from tierfs.clock import ManualClock
from tierfs.codec import Codec
from tierfs.digest import DigestKind
from tierfs.flusher.publish import StorePublisher
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.format.header import Kind
from tierfs.format.lease import Condemned
from tierfs.format.manifest import Manifest, Row, content_digest
from tierfs.host.pending.record import Draft, ObservedBase
from tierfs.store import Store
from tierfs.store.encode.pipeline import Codecs, blocks_of
from tierfs.store.encode.tensors import ChunkContext
from tierfs.store.read.lookup import read_envelope
from tierfs.store.tree.records import observe
from tierfs.store.write.sink import Cutter

XXH3 = DigestKind.XXH3_128
WIDTHS = {"F32": 4, "BF16": 2, "U8": 1}


def safetensors(tensors, metadata=None):
    """Return a safetensors file. ``tensors`` maps each name to dtype and bytes."""
    head, at = {}, 0
    if metadata is not None:
        head["__metadata__"] = metadata
    for name, (dtype, data) in tensors.items():
        head[name] = {"dtype": dtype, "shape": [len(data) // WIDTHS[dtype]], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([struct.pack("<Q", len(text)), text, *(data for _, data in tensors.values())])


def bfloat16(numbers):
    """Return float32 numbers as bfloat16, rounded to nearest like an optimizer's working copy."""
    bits = numbers.view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


class Training:
    """Weights that change a little with each step."""

    def __init__(self, count=1 << 19, seed=0):
        self.random = np.random.default_rng(seed)
        self.master = (self.random.standard_normal(count) * 0.02).astype("<f4")

    def step(self, size=1e-6):
        noise = self.random.standard_normal(self.master.size) * size
        self.master = (self.master * (1 + noise)).astype("<f4")
        return self

    def file(self, metadata=None):
        """Return a file of the weights alone."""
        return safetensors({"master": ("F32", self.master.tobytes())}, metadata)

    def pair(self):
        """Return a file of the weights and their working copy."""
        tensors = {"master": ("F32", self.master.tobytes()), "weight": ("BF16", bfloat16(self.master))}
        return safetensors(tensors)


def descriptor_for(objects, **fields):
    return Descriptor("0" * 32, 0, XXH3, objects.capabilities, lease_s=60, grace_s=3600, **fields)


class Flushing:
    """One flusher: a publisher, and the chunks on its host.

    Attributes:
        local: The raw chunks on this host, by digest.
        store: The store as the publisher sees it.
    """

    def __init__(self, objects, *, clock=None, codecs="all", **fields):
        self.objects, self.clock, self.codecs = objects, clock or ManualClock(), codecs
        self.descriptor = descriptor_for(objects, **fields)
        objects.put(keys.DESCRIPTOR, [self.descriptor.encode()])
        self.local = {}
        self.reads, self.plans = 0, {}
        self.restart()

    def restart(self):
        """Drop everything except the local tiers."""
        self.store = Store(
            self.objects, self.descriptor, url="store", clock=self.clock, codecs=Codecs.parse(self.codecs)
        )
        self.publisher = StorePublisher(lambda: self.store)

    def peek(self, row, start, out):
        """Read as `ChunkSources.peek`: this object serves as the sources of its publisher."""
        self.reads += 1
        raw = self.local.get(row.name.digest)
        if raw is not None:
            out[:] = raw[start : start + len(out)]
        return raw is not None

    def read_whole(self, row, out):
        if not self.peek(row, 0, out):
            return None
        digests, name = digest.digests_of(XXH3, out)
        return digests if name == row.name.digest else None

    def draft(self, path, data, metadata=None):
        """Return the draft of a closed file, with its chunks in the local tiers."""
        cutter, view = Cutter(at_start=True), memoryview(data)
        ends = [0, *cutter.ends(view), len(data)]
        rows = []
        for begin, end in itertools.pairwise(dict.fromkeys(ends)):
            raw = bytes(view[begin:end])
            name = digest.combine(XXH3, len(raw), [digest.hash_bytes(XXH3, b) for b in blocks_of(memoryview(raw))])
            self.local[name] = raw
            rows.append(Row(keys.ChunkName(name), len(raw), 0))
        there = observe(self.store, path)
        whole = content_digest(XXH3, len(data), [row.name.digest for row in rows])
        record = Manifest(
            Kind.FILE, os.urandom(16), len(data), 0, 0, XXH3, whole, rows=tuple(rows), metadata=metadata or {}
        )
        return Draft(path, record, ObservedBase(there.version))

    def upload(self, draft):
        """Plan a draft and put its chunks. Return their rows."""
        plan = self.plans[draft.write_id] = self.publisher.plan(draft, self)
        contexts = list(plan.contexts)
        contexts += [ChunkContext()] * (len(draft.record.rows) - len(contexts))
        rows = [None] * len(contexts)
        for index in sorted(range(len(contexts)), key=lambda index: bool(contexts[index].sources)):
            rows[index] = self.put(self.local[draft.record.rows[index].name.digest], contexts[index], rows)
        return rows

    def put(self, raw, context, rows=()):
        view = memoryview(bytearray(raw))
        digests, _ = digest.digests_of(XXH3, view)
        return self.publisher.put_chunk(view, digests, context, rows=rows, local=self)[0]

    def publish(self, draft, rows):
        plan = self.plans.get(draft.write_id) or self.publisher.plan(draft, self)
        self.publisher.publish(draft, plan, rows, self)
        return observe(self.store, draft.path).manifest.rows

    def save(self, path, data, metadata=None):
        """Draft, upload and publish a file. Return its rows."""
        draft = self.draft(path, data, metadata)
        return self.publish(draft, self.upload(draft))

    def codecs_of(self, rows):
        """Count the blocks of these chunks by codec."""
        tables = [read_envelope(self.store, row, "file").blocks for row in rows]
        return Counter(Codec(block.codec).name for blocks in tables for block in blocks)

    def reasons_of(self, rows):
        tables = [read_envelope(self.store, row, "file").blocks for row in rows]
        return Counter(block.reason for blocks in tables for block in blocks)

    def bare(self):
        """Return the store as another host without local data sees it."""
        return Store(self.objects, self.descriptor, url="store", clock=self.clock)


def condemn(objects, *names, epoch=1):
    objects.put(keys.condemned_key(epoch), [Condemned(epoch, 0, XXH3, frozenset(names)).encode()])


def remove(objects, *names):
    objects.delete([keys.chunk_key(name) for name in names])
