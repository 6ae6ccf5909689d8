"""How chunks are encoded on their way to the object tier.

Decided once per tensor, on a sample of its first chunk, and remembered from save to save; and not at all where encoding takes
longer than it saves on the way.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tierfs.buffers import buffers, fresh
from tierfs.clock import Clock
from tierfs.codec import Codec, Coding, Reason
from tierfs.codec.choice import DELTA_WORTH, SAMPLE_BYTES, Choice, choose, sample_of
from tierfs.digest import CHUNK_BYTES, DigestKind
from tierfs.errors import TierfsError
from tierfs.flush.publisher import Hint, ReadRow, Tensor
from tierfs.format.envelope import BASES_MAX, Base, block_count
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row
from tierfs.store.bases import AbsentError, LocalBase, read_verified
from tierfs.store.codecs import Codecs
from tierfs.store.encoding import Encoded, EncodedBlock, Plan, blocks_of, encode_chunk, scratch
from tierfs.store.estimates import Speed, Typical

__all__ = ["Encoder", "FetchRow", "Piece"]

REPROBE_SAVES = 16
CHOICES_MAX = 100_000
GROUPS_MAX = 10_000
# So much has to have been sent before speeds count: a few small puts say little.
EVIDENCE_BYTES = 64 << 20
# What a base has to save, of its own size, to be fetched for that from the object tier.
FETCH_WORTH = 0.5
# How much more than it costs encoding has to save: it takes processors from what sends, and from training.
MARGIN = 1.25
_STORE = Coding(Codec.STORE)
_LINK_IS_FASTER = Plan(_STORE, Reason.LINK_IS_FASTER)
_DERIVE = Plan(Coding(Codec.DERIVE, 2), Reason.DERIVED)
_logger = logging.getLogger("tierfs.store")

FetchRow = Callable[[Row, memoryview], None]
"""Copies all bytes of a chunk from the object tier, verified; raises a `TierfsError` if it cannot."""


class Piece(NamedTuple):
    """A part of a chunk.

    Attributes:
        row: The chunk, as it is stored.
        offset: Of the part, in its raw bytes.
        length: Of the part.
    """

    row: Row
    offset: int
    length: int


class _Attempt(NamedTuple):
    """An encoded chunk, and the choices that were made for it."""

    blocks: list[EncodedBlock]
    found: list[tuple[Tensor, Choice]]


class Encoder:
    """What one process knows of a store's tensors, and of speeds. Safe for use by many threads.

    Args:
        kind: The store's digests.
        codecs: Which ones may be used.
        clock: Where time comes from.
        is_near: Whether the object tier is this host's own, so that a base costs little to fetch.
    """

    def __init__(self, kind: DigestKind, codecs: Codecs, clock: Clock, *, is_near: bool) -> None:
        self.codecs = codecs
        self._is_near = is_near
        self._kind = kind
        self._clock = clock
        self._lock = threading.Lock()
        self._choices: dict[str, tuple[int, Choice]] = {}  # with the save that it was made at
        self._typical: dict[tuple[str, int], Typical] = {}  # by kind and width of elements
        self._saves: dict[str, int] = {}
        self._put = Speed()
        self._encode: dict[Codec, Speed] = {}
        self._counts: Counter[str] = Counter()
        self._encoding = 0  # how many threads are at it
        self._begun = threading.local()  # which codecs a thread has encoded with
        # Deriving takes the memory of three chunks, and hardly longer than copying them where they are in memory: it is done by
        # one thread at a time.
        self._deriving = threading.Lock()
        self._reference: memoryview | None = None
        self._source: memoryview | None = None  # the last chunk that parts were read of
        self._source_name: ChunkName | None = None

    def __repr__(self) -> str:
        return f"Encoder({self.codecs}, {self.status()})"

    def status(self) -> dict[str, Any]:
        """What was done so far, for a person to see.

        Returns:
            ``raw_bytes`` and ``encoded_bytes`` of what was sent, ``blocks`` by codec and by reason; seconds that a gigabyte takes
            on one thread to be put, and to be encoded by codec.
        """
        with self._lock:
            return {
                **dict(self._counts),
                "put_s_per_GB": self._put.s_per_byte * 1e9,
                "encode_s_per_GB": {
                    codec.name.lower(): speed.s_per_byte * 1e9 for codec, speed in self._encode.items()
                },
            }

    def count_save(self, group: str) -> int:
        """Begin a file; returns how many of its group were begun before, as far as that is remembered: see `Hint.save`."""
        with self._lock:
            count = self._saves.pop(group, 0)
            self._saves[group] = count + 1
            while len(self._saves) > GROUPS_MAX:
                del self._saves[next(iter(self._saves))]
        return count

    @contextlib.contextmanager
    def putting(self, count: int) -> Iterator[None]:
        """Take the time of what sends so many bytes."""
        start = self._clock.monotonic()
        yield
        with self._lock:
            self._put.add(count, self._clock.monotonic() - start)

    def derives(self, count: int) -> bool:
        """Whether it is of use to know what chunks may be derived from, in so many bytes."""
        return Codec.DERIVE in self.codecs.allowed and self._pays(Codec.DERIVE, 0.0, block_count(count))

    def encode(
        self,
        raw: memoryview,
        hint: Hint,
        sources: Sequence[Piece],
        *,
        read: ReadRow,
        fetch: FetchRow,
    ) -> Encoded:
        """Encode a chunk as it pays best.

        Args:
            raw: The chunk. Borrowed; the result may lie in it.
            hint: What is known of it.
            sources: The hint's sources, as they are stored.
            read: Gets at chunks that lie on this host.
            fetch: Gets at those that do not.
        """
        if not {Codec.DPLANE, Codec.SPARSE} & self.codecs.allowed:
            hint = replace(hint, base=None)  # not to be read for nothing
        encoded = None
        if sources and self.derives(len(raw)):
            start = self._clock.monotonic()
            with self._deriving:  # waiting for it is part of what deriving costs
                encoded = self._derive(raw, sources, read)
            self._took(Codec.DERIVE, len(raw), self._clock.monotonic() - start)
        if encoded is None:
            encoded = self._encode_chosen(raw, hint, read, fetch)
        with self._lock:
            self._counts["raw_bytes"] += len(raw)
            for block in encoded.blocks:
                self._counts["encoded_bytes"] += len(block.data)
                self._counts[f"{block.codec.name.lower()}_blocks"] += 1
                self._counts[f"{block.reason.name.lower()}_blocks"] += 1
        return encoded

    def _derive(self, raw: memoryview, sources: Sequence[Piece], read: ReadRow) -> Encoded | None:
        """Encode as derived from wider elements; ``None`` if it is not, or needs more chunks than a row may name."""
        if len(_needs(sources)) > BASES_MAX:
            return None
        if self._reference is None:
            self._reference = fresh(2 * CHUNK_BYTES)
        reference = self._reference[: 2 * len(raw)]
        begins = itertools.accumulate((length for _, _, length in sources), initial=0)
        # Each source once: of those that are read as a whole, only the last is kept.
        for at, (row, offset, length) in sorted(zip(begins, sources, strict=False), key=lambda part: part[1].row.name):
            out = reference[at : at + length]
            if length == row.raw_length:
                if not read_verified(self._kind, row, out, read):
                    return None
            else:
                whole = self._read_source(row, read)
                if whole is None:
                    return None
                out[:] = whole[offset : offset + length]
        plans = (_DERIVE._replace(base=base) for base in blocks_of(reference, 2))
        blocks = encode_chunk(raw, plans, self.codecs.allowed)
        return self._with_bases(blocks, sources) if any(block.codec is Codec.DERIVE for block in blocks) else None

    def _read_source(self, row: Row, read: ReadRow) -> memoryview | None:
        """All bytes of a chunk, verified, if it is on this host.

        Those of the last one are kept: small copies that follow each other are derived from parts of the same.
        """
        if self._source is None:
            self._source = fresh(CHUNK_BYTES)
        whole = self._source[: row.raw_length]
        if self._source_name != row.name:
            self._source_name = None
            if not read_verified(self._kind, row, whole, read):
                return None
            self._source_name = row.name
        return whole

    def _encode_chosen(self, raw: memoryview, hint: Hint, read: ReadRow, fetch: FetchRow) -> Encoded:
        tensors = [*hint.tensors, *[Tensor()] * (block_count(len(raw)) - len(hint.tensors))]
        known = {tensor: self._known(tensor, hint) for tensor in tensors}
        # What is not known is found out about where others of its kind pay; else even that is only in the way.
        known = {tensor: choice for tensor, choice in known.items() if choice is not None or self._may_pay(tensor)}
        row, attempt = hint.base, None
        if row is not None and self._may_need(known):
            local = LocalBase(self._kind, row, read)
            with contextlib.suppress(AbsentError):
                attempt = self._try(raw, tensors, known, local)
            if attempt is not None and not local.is_sound():
                attempt = None
            if attempt is None and self._is_worth_fetching(row, known):
                with buffers().lend(row.raw_length) as base:
                    if self._fetch(row, base, fetch):
                        attempt = self._try(raw, tensors, known, blocks_of(base))
        if attempt is None:
            attempt = self._try(raw, tensors, known, itertools.repeat(None))
        blocks = attempt.blocks
        self._learn(attempt, tensors, hint.save, raw)
        if row is None or not any(block.codec.base_factor for block in blocks):
            return Encoded(blocks)
        return self._with_bases(blocks, (Piece(row, 0, len(raw)),))

    def _try(
        self,
        raw: memoryview,
        tensors: Sequence[Tensor],
        known: Mapping[Tensor, Choice | None],
        bases: Iterable[memoryview | None],
    ) -> _Attempt:
        """Encode block by block, each against its base, if it has one.

        Args:
            raw: The chunk.
            tensors: Of each block.
            known: What is to be encoded at all, with the choices that were made; ``None`` for one that is to be made now.
            bases: Of each block. Each counts until the next one is asked for.

        Raises:
            AbsentError: As its bases do.
        """
        choices = dict(known)
        found: list[tuple[Tensor, Choice]] = []
        counts: Counter[Codec] = Counter()
        seconds: dict[Codec, float] = {}
        processors = len(os.sched_getaffinity(0))

        def plans() -> Iterator[Plan]:
            for block, tensor, base in zip(blocks_of(raw), tensors, bases, strict=False):
                plan = _LINK_IS_FASTER
                if tensor in choices:
                    choice = choices[tensor]
                    if choice is None:
                        choice = self._choose(block, tensor, base)
                        found.append((tensor, choice))
                        choices[tensor] = choice if tensor.name else None
                    plan = self._plan(choice, base)
                yield plan._replace(part_of=tensor)

        @contextlib.contextmanager
        def watch(codec: Codec, count: int) -> Iterator[None]:
            start = self._clock.monotonic()
            yield
            counts[codec] += count
            # Threads that begin together, as those of a file do, wait for each other; soon some of them send meanwhile.
            share = min(1.0, processors / self._encoding)
            seconds[codec] = seconds.get(codec, 0.0) + share * (self._clock.monotonic() - start)

        with self._lock:
            self._encoding += 1
        try:
            blocks = encode_chunk(raw, plans(), self.codecs.allowed, watch)
        finally:
            with self._lock:
                self._encoding -= 1
        for codec in seconds.keys() - {Codec.STORE}:
            self._took(codec, counts[codec], seconds[codec])
        return _Attempt(blocks, found)

    def _plan(self, choice: Choice, base: memoryview | None) -> Plan:
        coding, ratio = choice.static, choice.static_ratio
        if base is not None and choice.delta is not None and choice.delta_ratio is not None:
            coding, ratio, reason = choice.delta, choice.delta_ratio, Reason.DELTA
        elif choice.delta is None and choice.delta_ratio is not None:
            reason = Reason.DELTA_TOO_LARGE
        else:
            reason = Reason.NO_BASE
        return Plan(coding, reason, base) if self._pays(coding.codec, ratio) else _LINK_IS_FASTER

    def _took(self, codec: Codec, count: int, seconds: float) -> None:
        """Learn from what was encoded, unless it is this thread's first, which waits for memory to work in."""
        begun: set[Codec] = self._begun.__dict__.setdefault("codecs", set())
        if codec in begun:
            with self._lock:
                self._encode.setdefault(codec, Speed()).add(count, seconds)
        begun.add(codec)

    def _with_bases(self, blocks: list[EncodedBlock], pieces: Sequence[Piece]) -> Encoded:
        bases = tuple(
            Base(row.name, row.raw_length, row.stored_length, offset, length) for row, offset, length in pieces
        )
        return Encoded(blocks, bases, _needs(pieces))

    def _known(self, tensor: Tensor, hint: Hint) -> Choice | None:
        """What is remembered of a tensor, if it counts still."""
        with self._lock:
            save, known = self._choices.get(tensor.name, (0, None))
        if (
            known is None
            or not 0 <= hint.save - save < REPROBE_SAVES
            or (known.delta_ratio is None and hint.base is not None)
        ):
            return None
        return known

    def _choose(self, block: memoryview, tensor: Tensor, base: memoryview | None) -> Choice:
        """Find out about a tensor from one block of it."""
        start, count = sample_of(len(block))
        return choose(
            block[start : start + count],
            kind=tensor.kind,
            width=tensor.width,
            base=None if base is None else base[start : start + count],
            allowed=self.codecs.allowed,
            out=scratch("sample", SAMPLE_BYTES),
        )

    def _learn(self, attempt: _Attempt, tensors: Sequence[Tensor], save: int, raw: memoryview) -> None:
        """Remember what was chosen.

        Those whose difference has grown too large are tried again with the next save: it grows with the distance from the keyframe.
        """
        with self._lock:
            for tensor, choice in attempt.found:
                self._typical.setdefault((tensor.kind, tensor.width), Typical()).add(choice)
                if tensor.name:
                    self._choices.pop(tensor.name, None)
                    self._choices[tensor.name] = (save, choice)
            while len(self._choices) > CHOICES_MAX:
                del self._choices[next(iter(self._choices))]
            for tensor, block, source in zip(tensors, attempt.blocks, blocks_of(raw), strict=True):
                _, known = self._choices.get(tensor.name, (0, None))
                if (
                    block.reason is Reason.DELTA
                    and known is not None
                    and len(block.data) > DELTA_WORTH * known.static_ratio * len(source)
                ):
                    self._choices[tensor.name] = (save - REPROBE_SAVES + 1, known)

    def _may_pay(self, tensor: Tensor) -> bool:
        """Whether encoding would pay, were this tensor like most of its kind."""
        with self._lock:
            typical = self._typical.get((tensor.kind, tensor.width))
        return typical is None or self._pays(typical.codec, typical.ratio)

    def _pays_as_delta(self, choice: Choice) -> bool:
        return (
            choice.delta is not None
            and choice.delta_ratio is not None
            and self._pays(choice.delta.codec, choice.delta_ratio)
        )

    def _pays(self, codec: Codec, ratio: float, blocks: int = 1) -> bool:
        """Whether encoding takes less time than it saves in sending, on a thread that does one after the other.

        Asked of so many blocks at once.
        """
        with self._lock:
            encode = self._encode.get(codec)
            if self.codecs.always or encode is None or self._put.count < EVIDENCE_BYTES:
                return True
            pays = MARGIN * encode.s_per_byte < (1 - ratio) * self._put.s_per_byte
            if not pays:
                encode.forget(blocks)  # it is measured no more, and may have been slow for a while only
            return pays

    def _may_need(self, known: Mapping[Tensor, Choice | None]) -> bool:
        """Whether anything may come of a base."""
        return any(choice is None or self._pays_as_delta(choice) for choice in known.values())

    def _is_worth_fetching(self, row: Row, known: Mapping[Tensor, Choice | None]) -> bool:
        """Whether a base that is not on this host is to be had from the object tier."""
        choices = list(known.values())
        # What is not known yet has to be found out once. Otherwise it must save enough.
        savings = [
            choice.static_ratio - (choice.delta_ratio or 0) if choice and choice.delta else 0 for choice in choices
        ]
        saved = sum(savings) / len(savings) * row.raw_length
        return None in choices or self._is_near or self.codecs.always or saved >= FETCH_WORTH * row.stored_length

    def _fetch(self, row: Row, out: memoryview, fetch: FetchRow) -> bool:
        """Fetch a base; ``False`` if it cannot be read."""
        try:
            fetch(row, out)
        except TierfsError as error:
            with self._lock:
                self._counts["unreadable_bases"] += 1
            _logger.info(
                "a chunk is encoded by itself, because what it was to be encoded against cannot be read: %s", error
            )
            return False
        with self._lock:
            self._counts["fetched_base_bytes"] += len(out)
        return True


def _needs(pieces: Iterable[Piece]) -> tuple[ChunkName, ...]:
    """Every chunk object that it takes to read the pieces."""
    return tuple(dict.fromkeys(name for row, _, _ in pieces for name in (row.name, *row.bases)))
