"""Chunks on their way to the object tier, encoded: what the one who stores them and the one who encodes them agree on."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeAlias

from tierfs.buffers import fresh
from tierfs.codec import Codec, Coding, Reason, encode_blocks
from tierfs.codec.workers import Job, Worker, encode_workers
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES, Buffer
from tierfs.format.envelope import Base
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row

__all__ = ["Encoded", "EncodedBlock", "Plan", "Sending", "Watch", "blocks_of", "encode_chunk", "scratch"]

_ALL = frozenset(Codec)


class EncodedBlock(NamedTuple):
    """One block as it is to be stored; its bytes may lie in scratch memory of this thread."""

    codec: Codec
    reason: Reason
    data: Buffer


class Encoded(NamedTuple):
    """A chunk as it is to be stored.

    Attributes:
        blocks: In order.
        bases: What they are encoded against.
        needs: All chunk objects that are needed for that, those that the bases are encoded against included.
    """

    blocks: list[EncodedBlock]
    bases: tuple[Base, ...] = ()
    needs: tuple[ChunkName, ...] = ()


class Sending(Protocol):
    """One chunk on its way, with all that is known of it."""

    def encode(self, raw: memoryview, digest: bytes) -> Encoded:
        """Encode it; ``digest`` is its own. The result counts until this thread encodes the next one."""

    def putting(self, row: Row) -> AbstractContextManager[None]:
        """What sends a chunk goes in here."""


class Plan(NamedTuple):
    """How a block is to be encoded.

    Attributes:
        coding: What to try.
        reason: Why.
        base: Against what, if that is known: as long as the block is, or twice.
        part_of: Of what it is a part; only blocks of the same are alike enough to be encoded together.
    """

    coding: Coding
    reason: Reason
    base: memoryview | None = None
    part_of: object = None


Watch = Callable[[Codec, int, bool], AbstractContextManager[object]]
"""Gives what encoding goes on in, by the codec that is asked for, the number of raw bytes, and whether a process encodes them that others do not wait for."""


def _unwatched(codec: Codec, count: int, is_elsewhere: bool) -> AbstractContextManager[object]:  # noqa: ARG001 - a `Watch`
    return contextlib.nullcontext()


def encode_chunk(
    raw: memoryview, plans: Iterable[Plan], allowed: Container[Codec] = _ALL, watch: Watch = _unwatched
) -> list[EncodedBlock]:
    """Encode a chunk's blocks into scratch memory of this thread.

    Args:
        raw: The chunk.
        plans: What to try, for each block. Each is asked for when the blocks before it are encoded, but for up to three that
            might be encoded together with it, and what is encoded meanwhile: the bases of eight count at the same time.
        allowed: What may be made of a block; where another codec was found to be better than the one asked for, or that will
            not do, STORE.
        watch: Learns what is encoded, and how long that takes.
    """
    out = scratch("out", CHUNK_BYTES)
    blocks: list[EncodedBlock] = []
    groups = _together(zip(plans, zip(blocks_of(raw), blocks_of(out), strict=False), strict=True))
    with contextlib.ExitStack() as lent:
        for group, found in _encoded(groups, lambda: _worker(len(raw), lent), watch):
            for (codec, length), (plan, (block, place)) in zip(found, group, strict=True):
                if codec is Codec.STORE or codec not in allowed:
                    blocks.append(EncodedBlock(Codec.STORE, plan.reason, block))
                else:
                    blocks.append(EncodedBlock(codec, plan.reason, place[:length]))
    return blocks


def _worker(size: int, lent: contextlib.ExitStack) -> Worker | None:
    """A process that encodes a chunk; of a small one it would take as long to tell it."""
    return lent.enter_context(encode_workers().lend(size)) if size >= BLOCK_BYTES else None


_Group: TypeAlias = list[tuple[Plan, tuple[memoryview, memoryview]]]
"""Blocks that are to be encoded in the same way, each with where to."""


def _encoded(
    groups: Iterable[_Group], get_worker: Callable[[], Worker | None], watch: Watch
) -> Iterator[tuple[_Group, list[tuple[Codec, int]]]]:
    """Groups with what came of them: by a process that encodes, where there is one, which has its next job when it is done with the last."""
    worker: Worker | None = None
    is_asked = False
    begun: deque[tuple[_Group, Job, bool]] = deque()

    def finish() -> tuple[_Group, list[tuple[Codec, int]]]:
        group, job, is_begun = begun.popleft()
        with watch(job.coding.codec, sum(map(len, job.raws)), is_begun):
            found = worker.finish() if worker is not None and is_begun else None
            return group, encode_blocks(job.raws, job.coding, job.bases, job.outs) if found is None else found

    for group in groups:
        coding = group[0][0].coding
        bases = [plan.base for plan, _ in group] if coding.codec.base_factor else [None] * len(group)
        job = Job([raw for _, (raw, _) in group], coding, bases, [place for _, (_, place) in group])
        is_work = coding.codec is not Codec.STORE
        if is_work and not is_asked:
            worker, is_asked = get_worker(), True
        begun.append((group, job, is_work and worker is not None and worker.begin(job)))
        if len(begun) > (worker is not None):
            yield finish()
    while begun:
        yield finish()


def _together(planned: Iterable[tuple[Plan, tuple[memoryview, memoryview]]]) -> Iterator[_Group]:
    """Blocks that are to be encoded in the same way, as many as are best encoded together."""
    group: _Group = []
    alike: tuple[Coding, object, int] | None = None
    for plan, (block, place) in planned:
        if group and (plan.coding, plan.part_of, len(block)) != alike:
            yield group
            group = []
        alike = plan.coding, plan.part_of, len(block)
        group.append((plan, (block, place)))
        if len(group) >= plan.coding.together:
            yield group
            group = []
    if group:
        yield group


def blocks_of(raw: memoryview, factor: int = 1) -> Iterator[memoryview]:
    """The blocks of a chunk; or, of what is longer than a chunk by a factor, what belongs to each of its blocks."""
    size = factor * BLOCK_BYTES
    return (raw[at : at + size] for at in range(0, len(raw), size))


def scratch(name: str, count: int) -> memoryview:
    """Memory of this thread, for one use at a time under each name."""
    found: memoryview | None = getattr(_local, name, None)
    if found is None:
        found = fresh(count)
        setattr(_local, name, found)
    return found


_local = threading.local()
