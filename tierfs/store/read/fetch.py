"""Read verified bytes of one chunk from the nearest tier that has them, and decode them against its bases.

FORMAT.md, "Reading a file" and "Chunk envelope".
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

from tierfs import digest
from tierfs.buffers import buffers
from tierfs.codec import Codec, decode_block
from tierfs.digest import BLOCK_BYTES, local_name
from tierfs.errors import CorruptionError, FormatError, NotFoundError, StoreError
from tierfs.format import keys
from tierfs.format.envelope import (
    ANY_SHARE,
    ENVELOPE_BYTES_MAX,
    EXACT_SHARE,
    WHOLE_SHARE,
    BlockTargets,
    Envelope,
    Part,
    block_count,
    envelope_bytes,
    runs_of,
)
from tierfs.format.header import HEADER_BYTES, peek_kind
from tierfs.format.keys import NO_RECIPE
from tierfs.format.manifest import Row
from tierfs.host.chunk_sources import ChunkRequest
from tierfs.objects.checksums import twice
from tierfs.objects.protocol import ObjectInfo, Take
from tierfs.store.read.lookup import check_head, find_chunk
from tierfs.store.store import Store
from tierfs.threads import processors


def fetch(store: Store, row: Row, parts: Sequence[Part], where: str, *, exact: bool = False) -> None:
    """Copy verified parts of one chunk into memory, from the nearest tier that has them.

    After a first mismatch the chunk is read again, because a bit may have flipped in transfer. A second mismatch is an
    error.

    Args:
        parts: The wanted parts, by offsets in the raw chunk, with the memory to fill.
        where: The chunk's file, for errors.
        exact: Whether the caller wants nothing else of the chunk. If so, the whole chunk is fetched only if nearly all
            of it is wanted.

    Raises:
        CorruptionError: The object, or a base of it, is missing, truncated or damaged. The content of the memory is
            undefined.
        FormatError: A newer tierfs wrote the object.
        StoreError, ReadOnlyError: The object tier failed.
    """
    _fetch_nearest(store, row, parts, where, share=EXACT_SHARE if exact else WHOLE_SHARE, depth=0)


def bad_parts(
    read: Callable[[int, memoryview], object], length: int
) -> list[tuple[int, int, CorruptionError | FormatError]]:
    """Read a chunk that cannot be read whole block by block.

    Args:
        read: Fills memory with the bytes of the chunk from an offset on.
        length: Bytes of the chunk.

    Returns:
        Offset, length and error of each run of blocks that cannot be read.
    """
    found: list[tuple[int, int, CorruptionError | FormatError]] = []
    for at in range(0, length, BLOCK_BYTES):
        out = memoryview(bytearray(min(BLOCK_BYTES, length - at)))
        try:
            read(at, out)
        except (CorruptionError, FormatError) as error:
            if found and sum(found[-1][:2]) == at:
                start, size, first = found.pop()
                found.append((start, size + len(out), first))
            else:
                found.append((at, len(out), error))
    return found


def _fetch_nearest(store: Store, row: Row, parts: Sequence[Part], where: str, *, share: float, depth: int) -> None:
    if store.tiers is None:
        _fetch_stored(store, row, parts, where, depth)
        return
    name = local_name(store.descriptor.digest_kind, row.name.digest)
    counters, remote, sources = store.tiers.counters, store.tiers.remote, store.tiers.sources
    chunk = ChunkRequest(name, row.raw_length, row)
    if sources.read(chunk, parts, is_here=True) is not None:
        return

    def fetch_parts(wanted: Sequence[Part]) -> Sequence[bytes]:
        held = sources.read(chunk, wanted, is_here=False)
        if held is not None:
            return held[1]
        try:
            digests = _fetch_stored(store, row, wanted, where, depth)
        except CorruptionError as error:
            silent = remote.silent(name) if remote is not None and not row.stored_length else ""
            if not silent:
                raise
            why = f"{where} is held by hosts that do not answer ({silent}): try again when one does"
            raise StoreError(why, transient=True, path=where, tier="peer") from error
        counters["object_read_bytes"] += sum(len(out) for _, out in wanted)
        return digests

    # The key of the object, not of the content: an object may be encoded against another with the same content, and
    # each must be fetched on its own.
    flight = keys.chunk_key(row.name).encode() + row.stored_length.to_bytes(4, "little")
    store.tiers.cache.read_through(chunk, parts, fetch_parts, flight=flight, share=share)


def _fetch_stored(store: Store, row: Row, parts: Sequence[Part], where: str, depth: int) -> Sequence[bytes]:
    if not row.stored_length:
        row = find_chunk(store, row, where)  # the row of a draft that was opened before it was published
    try:
        digests = twice(lambda: _fetch_once(store, row, parts, where, depth))
    except CorruptionError:
        store.report_damage(row.name)
        raise
    store.lease_cache.add_verified(row.name, is_whole=len(digests) == block_count(row.raw_length))
    return digests


def _fetch_once(store: Store, row: Row, parts: Sequence[Part], where: str, depth: int) -> Sequence[bytes]:
    key = keys.chunk_key(row.name)
    place = f"{where}: chunk {key} in the object tier"
    try:
        return fetch_object(store, row, parts, place, depth=depth)
    except NotFoundError:
        raise CorruptionError(
            f"{place} is missing: restore it from another copy of the store, or delete the file; `tierfs verify` lists "
            "what else is damaged",
            path=where,
            tier="object",
        ) from None
    except CorruptionError as error:
        if str(error).startswith(place):
            raise
        # An error of the object tier itself, such as a truncated object, names the key alone.
        raise CorruptionError(f"{place}: {error}", path=where, tier="object") from error


def fetch_object(store: Store, row: Row, parts: Sequence[Part], place: str, *, depth: int = 0) -> Sequence[bytes]:
    """Copy verified parts of one chunk from its object into memory. Does not retry, and skips the local tiers.

    Args:
        parts: The wanted parts, by offsets in the raw chunk, with the memory to fill.
        place: Name of the object in errors.
        depth: Number of chunks above this one in the chain of bases. 0 for the chunk that the caller wants.

    Returns:
        The digests of the blocks that hold the parts.

    Raises:
        NotFoundError: The object does not exist. Otherwise as `fetch`.
    """
    with contextlib.ExitStack() as lent:
        return _ObjectRead(
            store, row, parts, place, depth, lambda length: lent.enter_context(buffers().lend(length))
        ).run()


class _ObjectRead:
    """One read of a chunk object: see `fetch_object`. ``lend`` lends memory for the duration of the read."""

    def __init__(
        self, store: Store, row: Row, parts: Sequence[Part], place: str, depth: int, lend: Callable[[int], memoryview]
    ) -> None:
        self._store = store
        self._row = row
        self._place = place
        self._depth = depth
        self._lend = lend
        self._kind = store.descriptor.digest_kind
        self._key = keys.chunk_key(row.name)
        self._targets = BlockTargets(row.raw_length, parts, lend)

    def run(self) -> Sequence[bytes]:
        row, blocks = self._row, block_count(self._row.raw_length)
        is_standalone = row.name.recipe == NO_RECIPE
        wants_most = 2 * len(self._targets.blocks) > blocks
        head_bytes = envelope_bytes(self._kind, blocks)
        if is_standalone and row.stored_length == head_bytes + row.raw_length:
            envelope = self._receive_raw(head_bytes)
        elif is_standalone and wants_most and self._store.objects.streams:
            envelope = self._receive_streamed()
        else:
            envelope = self._receive_encoded(row.stored_length if wants_most else ENVELOPE_BYTES_MAX)
        with processors().turn():
            self._targets.finish()
        return [envelope.blocks[index].digest for index in self._targets.blocks]

    def _receive_raw(self, head_bytes: int) -> Envelope:
        """Read an uncompressed object. The place of every block is known, so whole blocks go straight to the caller."""
        targets = self._targets
        head = memoryview(bytearray(head_bytes))
        pieces = [(head_bytes + index * BLOCK_BYTES, targets.view(index)) for index in targets.blocks]
        info = self._store.objects.get(self._key, [(0, head), *pieces])
        envelope = check_head(head, self._row, info.size, self._place)
        with processors().turn():
            for index in targets.blocks:
                self._verify(envelope, index)
        return envelope

    def _receive_streamed(self) -> Envelope:
        """Decode one block while the next arrives. Memory holds one encoded block, which stays in the CPU cache."""
        row, place = self._row, self._place
        envelopes: list[Envelope] = []

        def use(info: ObjectInfo, take: Take) -> None:
            head = bytes(take(min(HEADER_BYTES, row.stored_length)))
            _, length = peek_kind(head, place)
            if HEADER_BYTES < length <= min(row.stored_length, ENVELOPE_BYTES_MAX):
                head += take(length - HEADER_BYTES)
            envelope = check_head(head, row, info.size, place)
            for index, block in enumerate(envelope.blocks):
                encoded = take(block.encoded_length)
                if index in self._targets:
                    with processors().turn():
                        self._decode(envelope, index, encoded, None)
            envelopes.append(envelope)

        self._store.objects.stream(self._key, row.stored_length, use)
        return envelopes[-1]

    def _receive_encoded(self, length: int) -> Envelope:
        """Read all wanted blocks and their bases into memory, then decode.

        The first request reads ``length`` bytes, because another request costs more than some unneeded bytes.
        """
        targets = self._targets
        stored = self._lend(min(self._row.stored_length, length))
        info = self._store.objects.get(self._key, [(0, stored)])
        envelope = check_head(stored, self._row, info.size, self._place)
        found = self._encoded_blocks(envelope, stored, info)
        bases = self._bases(envelope)

        def decode(index: int) -> None:
            self._decode(envelope, index, found[index], bases.get(index))  # the decoder refuses a missing base

        with processors().turn():
            # Copying raw blocks takes less time than starting a thread.
            if sum(envelope.blocks[index].codec != Codec.STORE for index in targets.blocks) > 1:
                processors().share_out(decode, targets.blocks)
            else:
                for index in targets.blocks:
                    decode(index)
        return envelope

    def _encoded_blocks(self, envelope: Envelope, stored: memoryview, info: ObjectInfo) -> dict[int, memoryview]:
        """Return the wanted blocks as stored. Blocks that did not come with the envelope are fetched."""
        blocks = self._targets.blocks
        lengths = (block.encoded_length for block in envelope.blocks)
        ends = list(itertools.accumulate(lengths, initial=envelope.header_length))
        if ends[blocks[-1] + 1] <= len(stored):
            return {index: stored[ends[index] : ends[index + 1]] for index in blocks}
        memory = self._lend(sum(envelope.blocks[index].encoded_length for index in blocks))
        found = {}
        for index in blocks:
            length = envelope.blocks[index].encoded_length
            found[index], memory = memory[:length], memory[length:]
        self._store.objects.get(self._key, [(ends[index], found[index]) for index in blocks], version=info.version)
        return found

    def _bases(self, envelope: Envelope) -> dict[int, memoryview]:
        """Fetch what the wanted blocks are encoded against, by their numbers."""
        wanted, place = self._targets.blocks, self._place
        factor = sum(base.length for base in envelope.bases) // envelope.raw_length
        codecs = {codec for codec in Codec if codec.base_factor == factor != 0}
        blocks = [index for index in wanted if envelope.blocks[index].codec in codecs]
        if not blocks:
            return {}
        chain_max = self._store.descriptor.chain_max
        if self._depth > chain_max:
            raise FormatError(
                f"{place}: needs a chain of more than {chain_max + 1} chunks, each encoded against the next", path=place
            )
        size, length = BLOCK_BYTES * factor, envelope.raw_length * factor
        runs = [(run.start * size, min(run.stop * size, length)) for run in runs_of(blocks)]
        start = runs[0][0]
        memory = self._lend(runs[-1][1] - start)
        # All wanted parts of one base in one call, because a request costs more than a part.
        parts: dict[Row, list[Part]] = {}
        at = 0
        for base in envelope.bases:
            row = Row(base.name, base.raw_length, base.stored_length)
            for begin, end in runs:
                low, high = max(begin, at), min(end, at + base.length)
                if low < high:
                    parts.setdefault(row, []).append((base.offset + low - at, memory[low - start : high - start]))
            at += base.length
        # A reader of a whole chunk probably reads the neighbouring chunks next, which need the rest of the same bases.
        share = EXACT_SHARE if len(wanted) < len(envelope.blocks) else ANY_SHARE
        where = f"{place}, which is encoded against"
        try:
            for row, pieces in parts.items():
                _fetch_nearest(self._store, row, pieces, where, share=share, depth=self._depth + 1)
        except CorruptionError as error:
            error.block = None  # it is the number of a block of the base
            raise
        return {index: memory[index * size - start :][:size] for index in blocks}

    def _decode(self, envelope: Envelope, index: int, encoded: memoryview, base: memoryview | None) -> None:
        """Decode a block into its target, and verify it."""
        decode_block(envelope.blocks[index].codec, encoded, self._targets.view(index), base, self._place)
        self._verify(envelope, index)

    def _verify(self, envelope: Envelope, index: int) -> None:
        if digest.hash_bytes(self._kind, self._targets.view(index)) != envelope.blocks[index].digest:
            raise CorruptionError(
                f"{self._place} is damaged: block {index} does not have its digest",
                path=self._place,
                tier="object",
                block=index,
            )
