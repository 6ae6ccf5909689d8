"""Choose how each chunk is encoded for the object tier.

The encoder chooses once per tensor, on a sample of its first chunk, and remembers the choice from save to save. Under
pressure it sends a chunk raw: docs/decisions/0066-pressure-is-a-backlog.md.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tierfs._fork import PerProcess
from tierfs.buffers import block_buffers, buffers
from tierfs.clock import Clock, SystemClock
from tierfs.codec import Codec, Reason
from tierfs.codec.choice import DELTA_WORTH, Choice, choose, sample_of
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import TierfsError
from tierfs.format.envelope import block_count
from tierfs.format.manifest import Row
from tierfs.store.encode.pipeline import (
    Bases,
    BlockPlan,
    Codecs,
    Deriver,
    Encoded,
    EncodedBlock,
    Pressure,
    SourcePiece,
    blocks_of,
    encode_chunk,
    with_bases,
)
from tierfs.store.encode.tensors import ChunkContext, Tensor
from tierfs.threads import Processors

REPROBE_SAVES = 16
CHOICES_MAX = 100_000
GROUPS_MAX = 10_000
# Speeds are those of the last 5 to 10 seconds.
SPEED_S = 5.0
_logger = logging.getLogger("tierfs.store")

# As many threads encode at a time as there are processors: each uses memory for a base and a few blocks. These turns
# are not the decoders' turns, because an encoding thread may first have to read a chunk from the object tier.
_encoders = PerProcess(Processors)


class _Known(NamedTuple):
    """The remembered choice for a tensor.

    Attributes:
        save: Number of the save in which the choice was made.
        choice: The choice.
        misses: How many times in a row the differences were too large, in the sample or in the rest.
    """

    save: int
    choice: Choice
    misses: int = 0

    @property
    def is_miss(self) -> bool:
        """Whether differences were tried and were too large."""
        return self.choice.delta is None and self.choice.delta_ratio is not None

    def holds(self, save: int) -> bool:
        """Return whether the choice still counts at this save.

        A miss is tried again with the next save: differences grow with the distance from the keyframe, and
        the next save may have a newer one. Further misses are tried again less and less often, since some tensors never
        have small differences.
        """
        saves = min(2 ** min(self.misses - 1, 30), REPROBE_SAVES) if self.is_miss else REPROBE_SAVES
        return 0 <= save - self.save < saves


class _Speed:
    """Bytes per second that a thread at one stage recently achieved, its wait for a turn included. Not thread-safe."""

    def __init__(self) -> None:
        self._seconds = self._bytes = self._since = 0.0

    def add(self, count: int, seconds: float, now: float) -> None:
        """Add a chunk. Older ones count half as much after each `SPEED_S`."""
        if periods := (now - self._since) // SPEED_S:
            share = 0.5**periods
            self._seconds, self._bytes, self._since = self._seconds * share, self._bytes * share, now
        self._seconds, self._bytes = self._seconds + seconds, self._bytes + count

    def known(self, now: float) -> float | None:
        """Return the speed, or None if nothing passed recently."""
        return self._bytes / self._seconds if self._seconds and now - self._since < 2 * SPEED_S else None


class Encoder:
    """Encodes the chunks of a store, and remembers what it found out about tensors. Safe for use by many threads.

    Args:
        is_near: Whether the object tier is on this host, so that a base is cheap to fetch.
        clock: Measures how long chunks take.
    """

    def __init__(self, codecs: Codecs, *, is_near: bool, clock: Clock | None = None) -> None:
        self.codecs = codecs
        self._is_near = is_near
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._choices: dict[str, _Known] = {}
        self._saves: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._shrinking, self._sending = _Speed(), _Speed()  # bytes that encoding saved, bytes that were sent
        self._deriver, self._deriving = Deriver(codecs), threading.Lock()

    def __repr__(self) -> str:
        return f"Encoder({self.codecs}, {self.status()})"

    def status(self) -> dict[str, Any]:
        """Return counters for a person.

        Returns:
            ``raw_bytes`` and ``encoded_bytes`` of the encoded chunks, and ``blocks`` by codec and by reason.
        """
        with self._lock:
            return dict(self._counts)

    def count_save(self, group: str) -> int:
        """Count a save of this group, and return how many came before: see `ChunkContext.save`.

        Only the newest `GROUPS_MAX` groups are remembered.
        """
        with self._lock:
            count = self._saves.pop(group, 0)
            self._saves[group] = count + 1
            while len(self._saves) > GROUPS_MAX:
                del self._saves[next(iter(self._saves))]
        return count

    def use(self, codecs: Codecs) -> None:
        """Encode with these codecs from now on, and forget the choices among the others."""
        with self._lock:
            if codecs != self.codecs:
                self.codecs, self._deriver = codecs, Deriver(codecs)
                self._choices.clear()

    @contextlib.contextmanager
    def sending(self, count: int) -> Iterator[None]:
        """Measure how long this many bytes take to the object tier: as long as the ``with`` block runs."""
        begun = self._clock.monotonic()
        yield
        now = self._clock.monotonic()
        with self._lock:
            self._sending.add(count, now - begun, now)

    def _is_raw(self, pressure: Pressure) -> bool:
        """Return whether to send a chunk raw."""
        if self.codecs.always or pressure == "none":
            return False
        if pressure == "backlog":
            return True
        now = self._clock.monotonic()
        with self._lock:
            saves, sends = self._shrinking.known(now), self._sending.known(now)
        return saves is not None and sends is not None and sends > saves

    @property
    def derives(self) -> bool:
        """Whether DERIVE is allowed, so that callers look for the sources of chunks."""
        return Codec.DERIVE in self.codecs.allowed

    def encode(
        self,
        raw: memoryview,
        context: ChunkContext,
        sources: Sequence[SourcePiece],
        *,
        into: memoryview,
        bases: Bases,
        pressure: Pressure = "none",
    ) -> Encoded:
        """Encode a chunk in the way that makes it smallest; under pressure, leave it raw.

        Args:
            raw: The chunk. Borrowed; blocks that are stored raw lie in it afterwards.
            context: Facts about the chunk.
            sources: The sources that the context names, as they are stored.
            into: See `tierfs.store.encode.pipeline.encode_chunk`.
            bases: Reads the context's base and the sources.
            pressure: Whether the chunk has to be sent soon.
        """
        if not {Codec.DPLANE, Codec.SPARSE} & self.codecs.allowed:
            context = replace(context, base=None)  # no allowed codec would use it
        is_raw, begun = self._is_raw(pressure), self._clock.monotonic()
        if is_raw:
            encoded = Encoded([EncodedBlock(Codec.STORE, Reason.LINK_IS_FASTER, block) for block in blocks_of(raw)])
        else:
            encoded = self._derive(raw, sources, into, bases) or self._encode_chosen(raw, context, into, bases)
        now = self._clock.monotonic()
        with self._lock:
            if not is_raw:
                self._shrinking.add(len(raw) - sum(len(block.data) for block in encoded.blocks), now - begun, now)
            self._counts["raw_bytes"] += len(raw)
            for block in encoded.blocks:
                self._counts["encoded_bytes"] += len(block.data)
                self._counts[f"{block.codec.name.lower()}_blocks"] += 1
                self._counts[f"{block.reason.name.lower()}_blocks"] += 1
        return encoded

    def _derive(
        self, raw: memoryview, sources: Sequence[SourcePiece], into: memoryview, bases: Bases
    ) -> Encoded | None:
        if not (sources and self.derives):
            return None
        with self._deriving, _encoders().turn():  # other threads send while this one waits for its turn
            return self._deriver.encode(raw, sources, bases, into)

    def _encode_chosen(self, raw: memoryview, context: ChunkContext, into: memoryview, bases: Bases) -> Encoded:
        tensors = [*context.tensors, *[Tensor()] * (block_count(len(raw)) - len(context.tensors))]
        row, done = context.base, None
        with _encoders().turn():
            known = {tensor: self._known(tensor, context) for tensor in tensors}
            if row is not None and any(choice is None or choice.delta is not None for choice in known.values()):
                with buffers().lend(row.raw_length) as memory:
                    if bases.read_base(row, memory) or self._fetch(row, memory, tensors, bases):
                        done = self._try(raw, into, tensors, known, memory)
            blocks, found = done or self._try(raw, into, tensors, known, None)
        self._learn(blocks, found, tensors, context.save, raw)
        if row is None or not any(block.codec.base_factor for block in blocks):
            return Encoded(blocks)
        return with_bases(blocks, (SourcePiece(row, 0, len(raw)),))

    def _try(
        self,
        raw: memoryview,
        into: memoryview,
        tensors: Sequence[Tensor],
        known: Mapping[Tensor, Choice | None],
        base: memoryview | None,
    ) -> tuple[list[EncodedBlock], list[tuple[Tensor, Choice]]]:
        """Encode block by block, each against the base's block where that is worth it.

        Args:
            into: Memory for the encoded blocks.
            known: The remembered choice for each tensor; ``None`` if the choice is still to be made.
            base: The bytes to encode against, if any. They are verified: a delta against wrong bytes cannot be decoded.

        Returns:
            The blocks, and the choices that were made.
        """
        choices = dict(known)
        found: list[tuple[Tensor, Choice]] = []
        plans: list[BlockPlan] = []
        for number, (block, tensor) in enumerate(zip(blocks_of(raw), tensors, strict=True)):
            against = None if base is None else base[number * BLOCK_BYTES :][: len(block)]
            choice = choices[tensor]
            if choice is None:
                choice = self._choose(block, tensor, against)
                found.append((tensor, choice))
                choices[tensor] = choice if tensor.name else None
            plans.append(_plan(choice, against)._replace(part_of=tensor))
        return encode_chunk(raw, plans, into, self.codecs.allowed), found

    def _known(self, tensor: Tensor, context: ChunkContext) -> Choice | None:
        """Return the remembered choice for a tensor, if it still counts."""
        with self._lock:
            known = self._choices.get(tensor.name)
        if known is None or not known.holds(context.save):
            return None
        return None if known.choice.delta_ratio is None and context.base is not None else known.choice

    def _choose(self, block: memoryview, tensor: Tensor, base: memoryview | None) -> Choice:
        """Make the choice for a tensor from one of its blocks and the base's block."""
        start, count = sample_of(len(block))
        with block_buffers().lend(count) as out:
            return choose(
                block[start : start + count],
                kind=tensor.kind,
                width=tensor.width,
                base=None if base is None else base[start : start + count],
                allowed=self.codecs.allowed,
                out=out,
            )

    def _learn(
        self,
        blocks: Sequence[EncodedBlock],
        choices: Sequence[tuple[Tensor, Choice]],
        tensors: Sequence[Tensor],
        save: int,
        raw: memoryview,
    ) -> None:
        """Remember the choices, and the tensors whose differences were too large although the sample's were small."""
        sizes: dict[Tensor, tuple[int, int]] = {}  # bytes of the delta blocks: encoded, raw
        for tensor, block, source in zip(tensors, blocks, blocks_of(raw), strict=True):
            if tensor.name and block.reason is Reason.DELTA:
                encoded, count = sizes.get(tensor, (0, 0))
                sizes[tensor] = encoded + len(block.data), count + len(source)
        with self._lock:
            for tensor, choice in choices:
                if tensor.name:
                    known = self._choices.pop(tensor.name, None)
                    misses = known.misses if known is not None and (known.is_miss or known.holds(save)) else 0
                    found = _Known(save, choice, misses)
                    # Count one miss per save, even if several chunks of the tensor were tried at the same time.
                    is_news = known is None or not known.is_miss or known.save != save
                    self._choices[tensor.name] = (
                        found._replace(misses=misses + 1) if found.is_miss and is_news else found
                    )
            while len(self._choices) > CHOICES_MAX:
                del self._choices[next(iter(self._choices))]
            for tensor, (encoded, count) in sizes.items():
                known = self._choices.get(tensor.name)
                if known is None or known.is_miss:
                    continue
                is_worth_it = encoded <= DELTA_WORTH * known.choice.static_ratio * count
                if known.save != save:  # differences that grew too large were small once, and may be again
                    found_at = known.save if is_worth_it else save - REPROBE_SAVES + 1
                    self._choices[tensor.name] = _Known(found_at, known.choice)
                elif not is_worth_it:  # the sample was unlike the rest of the tensor
                    missed = known.choice._replace(delta=None, delta_ratio=encoded / count)
                    self._choices[tensor.name] = _Known(save, missed, known.misses + 1)

    def _fetch(self, row: Row, out: memoryview, tensors: Sequence[Tensor], bases: Bases) -> bool:
        """Fetch a base from the object tier. Return false if that is not worth it, or the base cannot be read.

        Over a network no base is fetched for a chunk without a named tensor: nothing is remembered of it, so each of
        its saves would fetch one to find out that it saves nothing.
        """
        if not (self.codecs.always or self._is_near or any(tensor.name for tensor in tensors)):
            return False
        try:
            bases.fetch(row, out)
        except TierfsError as error:
            with self._lock:
                self._counts["unreadable_bases"] += 1
            _logger.info("a chunk is encoded without a base, because its base cannot be read: %s", error)
            return False
        with self._lock:
            self._counts["fetched_base_bytes"] += len(out)
        return True


def _plan(choice: Choice, base: memoryview | None) -> BlockPlan:
    if base is not None and choice.delta is not None and choice.delta_ratio is not None:
        return BlockPlan(choice.delta, Reason.DELTA, base)
    is_too_large = choice.delta is None and choice.delta_ratio is not None
    return BlockPlan(choice.static, Reason.DELTA_TOO_LARGE if is_too_large else Reason.NO_BASE)
