"""Choose how each chunk is encoded for the object tier.

The encoder chooses once per tensor, on a sample of its first chunk, and remembers the choice from save to save. Under
pressure it sends a chunk raw: docs/decisions/0055-raw-under-pressure.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tierfs._fork import PerProcess
from tierfs.buffers import block_buffers, buffers
from tierfs.codec import Codec, Reason
from tierfs.codec.choice import DELTA_WORTH, Choice, choose, sample_of
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import TierfsError
from tierfs.format.envelope import block_count
from tierfs.format.manifest import Row
from tierfs.store.encode.codecs import Codecs
from tierfs.store.encode.contexts import ChunkContext, Tensor
from tierfs.store.encode.deriving import Deriver, SourcePiece, with_bases
from tierfs.store.encode.pipeline import BlockPlan, Encoded, EncodedBlock, blocks_of, encode_chunk
from tierfs.threads import Processors

if TYPE_CHECKING:
    from tierfs.store.chunks import BaseReader

REPROBE_SAVES = 16
CHOICES_MAX = 100_000
GROUPS_MAX = 10_000
# The share of its own size that a base has to save to be fetched from the object tier for encoding.
FETCH_WORTH = 0.5
# The same for an object tier on this host, which is read as fast as any other tier.
FETCH_NEAR_WORTH = 0.05
# A quarter of the uploading threads, of which there are about as many as processors, may fetch bases at a time.
PROCESSORS_A_FETCH = 4
# The weight of the newest tensor in the typical saving.
NEWEST = 0.1
# After this many bases that were not fetched, the typical saving is measured again.
PASSED_MAX = 32
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


class _Asked(NamedTuple):
    """A chunk to encode.

    Attributes:
        raw: The chunk.
        into: Memory for the encoded blocks.
        tensors: The tensor of each block.
        known: The remembered choice for each tensor; ``None`` if the choice is still to be made.
    """

    raw: memoryview
    into: memoryview
    tensors: Sequence[Tensor]
    known: Mapping[Tensor, Choice | None]


class _Typical:
    """The share of the raw size that a base typically saves for one kind of tensor.

    See `Choice.saved`. ``saved`` is ``None`` if it has to be measured.
    """

    def __init__(self) -> None:
        self.saved: float | None = None
        self._passed = 0

    def pass_by(self) -> None:
        """Note that a base was not fetched."""
        self._passed += 1
        if self._passed >= PASSED_MAX:
            self.saved, self._passed = None, 0

    def add(self, choice: Choice) -> None:
        if choice.delta_ratio is not None:
            self.saved = choice.saved if self.saved is None else self.saved + (choice.saved - self.saved) * NEWEST


class _Attempt(NamedTuple):
    """An encoded chunk, and the choices that were made for it."""

    blocks: list[EncodedBlock]
    found: list[tuple[Tensor, Choice]]

    @property
    def needs_base(self) -> bool:
        """Whether a block is encoded against the base."""
        return any(block.codec.base_factor for block in self.blocks)


class Encoder:
    """Encodes the chunks of a store, and remembers what it found out about tensors. Safe for use by many threads.

    Args:
        codecs: The codecs that may be used.
        is_near: Whether the object tier is on this host, so that a base is cheap to fetch.
    """

    def __init__(self, codecs: Codecs, *, is_near: bool) -> None:
        self.codecs = codecs
        self._is_near = is_near
        self._lock = threading.Lock()
        self._choices: dict[str, _Known] = {}
        self._typical: dict[tuple[str, int], _Typical] = {}  # by kind and width of elements
        self._saves: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._encoding = self._sending = 0  # chunks in flight
        self._processors = len(os.sched_getaffinity(0))
        self._deriver, self._deriving = Deriver(codecs), threading.Lock()
        self._fetching = threading.Semaphore(max(len(os.sched_getaffinity(0)) // PROCESSORS_A_FETCH, 1))

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

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Count a chunk as being sent while the ``with`` block runs."""
        with self._lock:
            self._sending += 1
        try:
            yield
        finally:
            with self._lock:
                self._sending -= 1

    @contextlib.contextmanager
    def _one_more(self) -> Iterator[bool]:
        """Yield whether to encode a chunk, or send it raw under pressure."""
        with self._lock:
            is_encoded = self.codecs.always or self._sending >= self._processors or self._encoding < self._processors
            self._encoding += is_encoded
        try:
            yield is_encoded
        finally:
            with self._lock:
                self._encoding -= is_encoded

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
        bases: BaseReader,
    ) -> Encoded:
        """Encode a chunk in the way that makes it smallest; under pressure, leave it raw.

        Args:
            raw: The chunk. Borrowed; blocks that are stored raw lie in it afterwards.
            context: Facts about the chunk.
            sources: The sources that the context names, as they are stored.
            into: See `tierfs.store.encode.pipeline.encode_chunk`.
            bases: Reads the context's base and the sources.
        """
        if not {Codec.DPLANE, Codec.SPARSE} & self.codecs.allowed:
            context = replace(context, base=None)  # no allowed codec would use it
        with self._one_more() as is_encoded:
            encoded = None if is_encoded else Encoded([_raw_block(block) for block in blocks_of(raw)])
            if encoded is None and sources and self.derives:
                with self._deriving, _encoders().turn():  # other threads send while this one waits for its turn
                    encoded = self._deriver.encode(raw, sources, bases, into)
            if encoded is None:
                encoded = self._encode_chosen(raw, context, into, bases)
        with self._lock:
            self._counts["raw_bytes"] += len(raw)
            for block in encoded.blocks:
                self._counts["encoded_bytes"] += len(block.data)
                self._counts[f"{block.codec.name.lower()}_blocks"] += 1
                self._counts[f"{block.reason.name.lower()}_blocks"] += 1
        return encoded

    def _encode_chosen(self, raw: memoryview, context: ChunkContext, into: memoryview, bases: BaseReader) -> Encoded:
        tensors = [*context.tensors, *[Tensor()] * (block_count(len(raw)) - len(context.tensors))]
        known = {tensor: self._known(tensor, context) for tensor in tensors}
        asked = _Asked(raw, into, tensors, known)
        row, attempt = context.base, None
        if row is not None and any(choice is None or choice.delta is not None for choice in known.values()):
            attempt = self._try_local(asked, row, bases)
            if attempt is None:
                attempt = self._try_fetched(asked, row, bases)
        if attempt is None:
            with _encoders().turn():
                attempt = self._try(asked, None)
        blocks = attempt.blocks
        self._learn(attempt, tensors, context.save, raw)
        if row is None or not attempt.needs_base:
            return Encoded(blocks)
        return with_bases(blocks, (SourcePiece(row, 0, len(raw)),))

    def _try_local(self, asked: _Asked, row: Row, bases: BaseReader) -> _Attempt | None:
        """Run `_try` against a base on this host; return ``None`` if the base is absent or damaged."""
        with _encoders().turn(), buffers().lend(row.raw_length) as memory:
            return self._try(asked, memory) if bases.read_base(row, memory) else None

    def _try_fetched(self, asked: _Asked, row: Row, bases: BaseReader) -> _Attempt | None:
        """Run `_try` against a base in the object tier; return ``None`` if it is not worth fetching or unreadable.

        If the object tier is behind a network, few threads do this at a time. Each uses the memory of one more chunk
        while it waits, and the first thread's findings may save the others a fetch.
        """
        fetching, encoding = (
            (_encoders().turn(), contextlib.nullcontext()) if self._is_near else (self._fetching, _encoders().turn())
        )
        with fetching, buffers().lend(row.raw_length) as memory:
            if not self._is_worth_fetching(row, asked) or not self._fetch(row, memory, bases):
                return None
            with encoding:
                return self._try(asked, memory)

    def _try(self, asked: _Asked, base: memoryview | None) -> _Attempt:
        """Encode block by block, each against the base's block where that is worth it.

        Args:
            asked: The chunk.
            base: The bytes to encode against, if any. They are verified: a delta against wrong bytes cannot be decoded.
        """
        choices = dict(asked.known)
        found: list[tuple[Tensor, Choice]] = []
        plans: list[BlockPlan] = []
        for number, (block, tensor) in enumerate(zip(blocks_of(asked.raw), asked.tensors, strict=True)):
            against = None if base is None else base[number * BLOCK_BYTES :][: len(block)]
            choice = choices[tensor]
            if choice is None:
                choice = self._choose(block, tensor, against)
                found.append((tensor, choice))
                choices[tensor] = choice if tensor.name else None
            plans.append(_plan(choice, against)._replace(part_of=tensor))
        return _Attempt(encode_chunk(asked.raw, plans, asked.into, self.codecs.allowed), found)

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

    def _learn(self, attempt: _Attempt, tensors: Sequence[Tensor], save: int, raw: memoryview) -> None:
        """Remember the choices, and the tensors whose differences were too large although the sample's were small."""
        sizes: dict[Tensor, tuple[int, int]] = {}  # bytes of the delta blocks: encoded, raw
        for tensor, block, source in zip(tensors, attempt.blocks, blocks_of(raw), strict=True):
            if tensor.name and block.reason is Reason.DELTA:
                encoded, count = sizes.get(tensor, (0, 0))
                sizes[tensor] = encoded + len(block.data), count + len(source)
        with self._lock:
            for tensor, choice in attempt.found:
                self._typical.setdefault((tensor.kind, tensor.width), _Typical()).add(choice)
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

    def _is_worth_fetching(self, row: Row, asked: _Asked) -> bool:
        """Return whether to fetch a base from the object tier."""
        if self.codecs.always:
            return True
        tensors, known = asked.tensors, asked.known
        worth = FETCH_NEAR_WORTH if self._is_near else FETCH_WORTH
        savings = [self._saved(tensor, known[tensor]) for tensor in tensors]
        expected = [saved for saved in savings if saved is not None]
        blocks = block_count(row.raw_length)
        if len(expected) < len(savings) or sum(expected) / blocks * row.raw_length >= worth * row.stored_length:
            return True
        with self._lock:
            for key in {(tensor.kind, tensor.width) for tensor in tensors if not tensor.name}:
                self._typical[key].pass_by()
        return False

    def _saved(self, tensor: Tensor, choice: Choice | None) -> float | None:
        """Return the share of the raw size that a base is expected to save; ``None`` if that has to be measured.

        Nothing is remembered of tensors without a name. For these, the typical saving of their kind counts.
        """
        if choice is not None or tensor.name:
            return None if choice is None else choice.saved
        with self._lock:
            typical = self._typical.get((tensor.kind, tensor.width))
        return None if typical is None else typical.saved

    def _fetch(self, row: Row, out: memoryview, bases: BaseReader) -> bool:
        """Fetch a base. Return whether it could be read."""
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


def _raw_block(block: memoryview) -> EncodedBlock:
    return EncodedBlock(Codec.STORE, Reason.LINK_IS_FASTER, block)
