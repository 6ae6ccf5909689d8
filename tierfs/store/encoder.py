"""How chunks are encoded on their way to the object tier.

Decided once per tensor, on a sample of its first chunk, and remembered from save to save; and not at all where encoding takes
longer than it saves on the way.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tierfs import digest
from tierfs.buffers import buffers
from tierfs.clock import Clock
from tierfs.codec import Codec, Coding, Reason
from tierfs.codec.choice import DELTA_WORTH, Choice, choose, sample_of
from tierfs.digest import CHUNK_BYTES, DigestKind
from tierfs.errors import TierfsError
from tierfs.flush.publisher import Hint, ReadRow, Tensor
from tierfs.format.envelope import BASES_MAX, Base, block_count
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row
from tierfs.store.codecs import Codecs
from tierfs.store.encoding import Encoded, EncodedBlock, Plan, blocks_of, encode_blocks, scratch
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
        self._thread = threading.local()  # which codecs it has encoded with, and the last chunk that it read parts of

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
            encoded = self._derive(raw, sources, read)
            self._took(Codec.DERIVE, len(raw), start)
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
        reference = scratch("reference", 2 * CHUNK_BYTES)[: 2 * len(raw)]
        begins = itertools.accumulate((length for _, _, length in sources), initial=0)
        # Each source once: of those that are read as a whole, only the last is kept.
        for at, (row, offset, length) in sorted(zip(begins, sources, strict=False), key=lambda part: part[1].row.name):
            out = reference[at : at + length]
            if length == row.raw_length:
                if not self._read_verified(row, out, read):
                    return None
            else:
                whole = self._read_source(row, read)
                if whole is None:
                    return None
                out[:] = whole[offset : offset + length]
        blocks = encode_blocks(raw, itertools.repeat(_DERIVE), reference, self.codecs.allowed)
        return self._with_bases(blocks, sources) if any(block.codec is Codec.DERIVE for block in blocks) else None

    def _read_source(self, row: Row, read: ReadRow) -> memoryview | None:
        """All bytes of a chunk, verified, if it is on this host.

        This thread keeps those of the last one: small copies that follow each other are derived from parts of the same.
        """
        mine = self._thread.__dict__
        buffer: memoryview | None = mine.get("source")
        if buffer is None:
            buffer = mine["source"] = memoryview(bytearray(CHUNK_BYTES))
        whole = buffer[: row.raw_length]
        if mine.get("source_name") != row.name:
            mine["source_name"] = None
            if not self._read_verified(row, whole, read):
                return None
            mine["source_name"] = row.name
        return whole

    def _encode_chosen(self, raw: memoryview, hint: Hint, read: ReadRow, fetch: FetchRow) -> Encoded:
        tensors = [*hint.tensors, *[Tensor()] * (block_count(len(raw)) - len(hint.tensors))]
        known = {tensor: self._known(tensor, hint) for tensor in tensors}
        # What is not known is found out about where others of its kind pay; else even that is only in the way.
        known = {tensor: choice for tensor, choice in known.items() if choice is not None or self._may_pay(tensor)}
        with contextlib.ExitStack() as lent:
            base = None
            if hint.base is not None and self._may_need(known):
                out = lent.enter_context(buffers().lend(hint.base.raw_length))
                base = out if self._read_base(hint.base, known, out, read, fetch) else None
            blocks = self._encode_with(raw, hint, tensors, known, base)
        if hint.base is None or not any(block.codec.base_factor for block in blocks):
            return Encoded(blocks)
        return self._with_bases(blocks, (Piece(hint.base, 0, len(raw)),))

    def _encode_with(
        self,
        raw: memoryview,
        hint: Hint,
        tensors: Sequence[Tensor],
        known: dict[Tensor, Choice | None],
        base: memoryview | None,
    ) -> list[EncodedBlock]:
        plans, begin = [], 0
        for block, tensor in zip(blocks_of(raw), tensors, strict=True):
            if tensor in known:
                choice = known[tensor]
                if choice is None:
                    choice = self._choose(block, tensor, hint.save, None if base is None else base[begin:])
                    known[tensor] = choice if tensor.name else None
                plans.append(self._plan(choice, has_base=base is not None))
            else:
                plans.append(_LINK_IS_FASTER)
            begin += len(block)
        blocks = self._timed(raw, plans, base)
        self._learn(tensors, hint.save, plans, blocks, raw)
        return blocks

    def _plan(self, choice: Choice, *, has_base: bool) -> Plan:
        coding, ratio = choice.static, choice.static_ratio
        if has_base and choice.delta is not None and choice.delta_ratio is not None:
            coding, ratio, reason = choice.delta, choice.delta_ratio, Reason.DELTA
        elif choice.delta is None and choice.delta_ratio is not None:
            reason = Reason.DELTA_TOO_LARGE
        else:
            reason = Reason.NO_BASE
        return Plan(coding, reason) if self._pays(coding.codec, ratio) else _LINK_IS_FASTER

    def _timed(self, raw: memoryview, plans: Sequence[Plan], base: memoryview | None) -> list[EncodedBlock]:
        start = self._clock.monotonic()
        blocks = encode_blocks(raw, plans, base, self.codecs.allowed)
        codecs = {plan.coding.codec for plan in plans}
        if len(codecs) == 1 and codecs != {Codec.STORE}:  # of a mixture nobody knows what took how long
            self._took(codecs.pop(), len(raw), start)
        return blocks

    def _took(self, codec: Codec, count: int, start: float) -> None:
        """Learn from a chunk of so many bytes, begun at ``start``, unless it is this thread's first, which waits for memory to work in."""
        seconds = self._clock.monotonic() - start
        begun: set[Codec] = self._thread.__dict__.setdefault("codecs", set())
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

    def _choose(self, block: memoryview, tensor: Tensor, save: int, base: memoryview | None) -> Choice:
        """Find out about a tensor from one block of it, and remember it."""
        start, count = sample_of(len(block))
        choice = choose(
            block[start : start + count],
            kind=tensor.kind,
            width=tensor.width,
            base=None if base is None else base[start : start + count],
            allowed=self.codecs.allowed,
            out=scratch("out", CHUNK_BYTES),
        )
        with self._lock:
            self._typical.setdefault((tensor.kind, tensor.width), Typical()).add(choice)
            if tensor.name:
                self._choices.pop(tensor.name, None)
                self._choices[tensor.name] = (save, choice)
                while len(self._choices) > CHOICES_MAX:
                    del self._choices[next(iter(self._choices))]
        return choice

    def _learn(
        self,
        tensors: Sequence[Tensor],
        save: int,
        plans: Sequence[Plan],
        blocks: Sequence[EncodedBlock],
        raw: memoryview,
    ) -> None:
        """Have those tried again whose difference has grown too large: it does, with the distance from the keyframe."""
        for tensor, plan, block, source in zip(tensors, plans, blocks, blocks_of(raw), strict=True):
            if plan.reason is Reason.DELTA:
                with self._lock:
                    _, known = self._choices.get(tensor.name, (0, None))
                    if known is not None and len(block.data) > DELTA_WORTH * known.static_ratio * len(source):
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

    def _read_base(
        self, row: Row, known: Mapping[Tensor, Choice | None], out: memoryview, read: ReadRow, fetch: FetchRow
    ) -> bool:
        """Read a chunk to encode another against: from this host, or fetched if that is worth it."""
        if self._read_verified(row, out, read):
            return True
        choices = list(known.values())
        # What is not known yet has to be found out once. Otherwise it must save enough.
        savings = [
            choice.static_ratio - (choice.delta_ratio or 0) if choice and choice.delta else 0 for choice in choices
        ]
        saved = sum(savings) / len(savings) * row.raw_length
        if not (None in choices or self._is_near or self.codecs.always or saved >= FETCH_WORTH * row.stored_length):
            return False
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

    def _read_verified(self, row: Row, out: memoryview, read: ReadRow) -> bool:
        """Read a whole chunk from this host. Bytes other than a reader will have make a difference that nobody can undo."""
        if not read(row, 0, out):
            return False
        return (
            digest.combine(self._kind, len(out), [digest.hash_bytes(self._kind, block) for block in blocks_of(out)])
            == row.name.digest
        )


def _needs(pieces: Iterable[Piece]) -> tuple[ChunkName, ...]:
    """Every chunk object that it takes to read the pieces."""
    return tuple(dict.fromkeys(name for row, _, _ in pieces for name in (row.name, *row.bases)))
