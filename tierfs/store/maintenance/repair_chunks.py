"""Restore a damaged or missing chunk object under the same key and with the same length.

Every manifest that names the chunk is then valid again, unchanged. The bytes come from
this host's local tiers, from another object with the same content, or from another store.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from tierfs import digest
from tierfs.buffers import buffers
from tierfs.codec import Codec, encode_block
from tierfs.digest import BLOCK_BYTES, local_name
from tierfs.errors import AlreadyExistsError, ConflictError, CorruptionError, FormatError, NotFoundError
from tierfs.format import keys
from tierfs.format.envelope import ENVELOPE_BYTES_MAX, BaseRange, Block, Envelope
from tierfs.format.keys import NO_RECIPE, ChunkName
from tierfs.format.manifest import Row
from tierfs.host.chunk_sources import ChunkRequest
from tierfs.objects.checksums import put_checked
from tierfs.objects.protocol import CREATE, Update, Version
from tierfs.store.encode.pipeline import blocks_of
from tierfs.store.maintenance.examine import OBJECT_BYTES_MAX, bad_blocks, block_places, examine
from tierfs.store.read.fetch import fetch
from tierfs.store.read.lookup import DAMAGED, check_envelope, inspect, names_beside
from tierfs.store.store import Store

_CODECS = frozenset(Codec)
_logger = logging.getLogger("tierfs.scrub")


class Healer:
    """Heals chunk objects of one store.

    Args:
        store: The store, with the local tiers that this host has for it.
        replicas: Other stores that may hold the same content.
        dry_run: Whether to put nothing, and only report what would be healed.
    """

    def __init__(self, store: Store, replicas: Sequence[Store] = (), *, dry_run: bool = False) -> None:
        self._store = store
        self._bare = store.without_local_tiers()
        self._replicas = [replica.without_local_tiers() for replica in replicas]
        self._listed: dict[Store, tuple[bytes, dict[bytes, list[ChunkName]]]] = {}
        self._kind = store.descriptor.digest_kind
        self._dry_run = dry_run

    def heal(self, name: ChunkName, size: int, raw_length: int = 0) -> str:
        """Make a chunk object sound again.

        Args:
            size: The bytes that it must have, because manifests name its size.
            raw_length: Bytes of the chunk; 0 if not known.

        Returns:
            The source of the bytes; empty if the object cannot be healed in its place.

        Raises:
            StoreError, ReadOnlyError, CapacityError: An object tier failed.
        """
        data, version, envelope = self._read(self._bare, name, size)
        for replica in self._replicas:
            copy, _, its_envelope = self._read(replica, name, size)
            is_sound = its_envelope is not None and not self._bad_blocks(replica, copy, its_envelope)
            if is_sound and self._put(name, [copy], version):
                return replica.url
        if envelope is not None:
            raw_length = envelope.raw_length
        if not raw_length:
            return ""
        with buffers().lend(raw_length) as raw:
            source = self.find_raw(name, raw)
            if not source:
                return ""
            payload = self._mended(data, envelope, raw) if envelope is not None else None
            if payload is None and name.recipe == NO_RECIPE:
                payload = self._encoded_anew(name, size, raw)
            return source if payload is not None and self._put(name, payload, version) else ""

    def bases_of(self, name: ChunkName, size: int) -> Sequence[BaseRange]:
        """Return the ranges that a chunk object is encoded against, from its envelope here or in a replica.

        Args:
            size: The bytes that it must have.

        Returns:
            Nothing if no envelope can be read.

        Raises:
            StoreError, ReadOnlyError: An object tier failed.
        """
        for store in (self._bare, *self._replicas) if name.recipe != NO_RECIPE else ():
            _, _, envelope = self._read(store, name, size)
            if envelope is not None:
                return envelope.bases
        return ()

    def find_raw(self, name: ChunkName, out: memoryview) -> str:
        """Fill ``out`` with a chunk's bytes from any source but the object of this name.

        Returns:
            The source; empty if none has the bytes.
        """
        tiers = self._store.tiers
        if tiers is not None:
            found = tiers.sources.read(ChunkRequest(local_name(self._kind, name.digest), len(out)), [(0, out)])
            if found is not None:
                return f"the {found[0]} tier"
        for store in (self._bare, *self._replicas):
            for other in self._names_of(store, name.digest):
                if store is self._bare and other == name:
                    continue
                row = inspect(store, other, len(out))
                if row is None or row is DAMAGED:
                    continue
                with contextlib.suppress(CorruptionError, FormatError):
                    fetch(store, row, [(0, out)], store.where(keys.chunk_key(other)))
                    return store.where(keys.chunk_key(other))
        return ""

    def _names_of(self, store: Store, content: bytes) -> Sequence[ChunkName]:
        """Return the names of all chunk objects of a store with this content's digest.

        The listing of the last prefix is kept, so lookups in the order of keys list each prefix once.
        """
        first, names = self._listed.get(store, (b"", {}))
        if first != content[:1]:
            names = defaultdict(list)
            for name in names_beside(store, content):
                names[name.digest].append(name)
            self._listed[store] = content[:1], names
        return names.get(content, ())

    def _read(self, store: Store, name: ChunkName, size: int) -> tuple[bytes, Version | None, Envelope | None]:
        """Read the object of this name: its bytes, version and envelope. It has no content if it has not this size."""
        key = keys.chunk_key(name)
        try:
            data, info = store.objects.read(key, OBJECT_BYTES_MAX)
        except NotFoundError:
            return b"", None, None
        except CorruptionError:
            return b"", store.objects.head(key).version, None
        if len(data) != size:
            return b"", info.version, None
        where = store.where(key)
        with contextlib.suppress(CorruptionError, FormatError):
            envelope = Envelope.decode(data[:ENVELOPE_BYTES_MAX], where, stored_length=size)
            check_envelope(envelope, name, where)
            return data, info.version, envelope
        return data, info.version, None

    def _bad_blocks(self, store: Store, data: bytes, envelope: Envelope) -> list[int]:
        """Return the indexes of the blocks that do not match their digests."""
        bad = bad_blocks(envelope, memoryview(data), partial(_reference, store, envelope), "")
        return [index for index, _ in bad]

    def _mended(self, found: bytes, envelope: Envelope, raw: memoryview) -> list[bytes] | None:
        """Return the object with its bad blocks encoded again; ``None`` if one of them cannot get its old length."""
        data, places = bytearray(found), list(block_places(envelope))
        for index in self._bad_blocks(self._bare, found, envelope):
            begin, end = places[index]
            block = raw[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
            try:
                base = _reference(self._bare, envelope, index)
            except (CorruptionError, FormatError):
                return None
            encoded = _encoded_like(envelope.blocks[index], block, base)
            if encoded is None:
                return None
            data[begin:end] = encoded
        return [bytes(data)]

    def _encoded_anew(self, name: ChunkName, size: int, raw: memoryview) -> list[bytes] | None:
        """Encode raw bytes into an object of this size, for an object whose envelope is lost.

        Returns:
            The object in pieces; ``None`` if no coding gives this size.
        """
        digests, _ = digest.digests_of(self._kind, raw)
        for coding in (coding for codec in Codec if not codec.base_factor for coding in codec.codings):
            pieces, table = [], []
            for block, its_digest in zip(blocks_of(raw), digests, strict=True):
                out = memoryview(bytearray(len(block)))
                codec, length = encode_block(block, coding, None, out)
                pieces.append(bytes(block if codec is Codec.STORE else out[:length]))
                table.append(Block(its_digest, codec, length))
            envelope = Envelope(self._kind, name.digest, len(raw), tuple(table))
            if envelope.stored_length == size:
                return [envelope.encode(), *pieces]
        return None

    def _put(self, name: ChunkName, payload: list[bytes], version: Version | None) -> bool:
        """Replace the object that was read. Return whether a sound object is there, or would be in a dry run."""
        if self._dry_run:
            return True
        store, key = self._bare, keys.chunk_key(name)
        with contextlib.suppress(AlreadyExistsError, ConflictError):  # another process changed it meanwhile
            put_checked(store.objects, key, payload, mode=CREATE if version is None else Update(version))
        found = examine(store, name, sum(map(len, payload)))
        if found is None or not found.is_sound:
            return False
        store.lease_cache.clear_damaged(name)
        store.lease_cache.add_verified(name, is_whole=True)
        _logger.warning("%s is sound again", store.where(key))
        return True


def _reference(store: Store, envelope: Envelope, index: int) -> memoryview | None:
    """Read the bytes that a block is encoded against; ``None`` if it has no base."""
    codec = envelope.blocks[index].codec
    if codec not in _CODECS:
        raise FormatError(f"{store.url}: unknown codec {codec}: use a newer tierfs")
    factor = Codec(codec).base_factor
    if not factor:
        return None
    begin = index * BLOCK_BYTES * factor
    out = memoryview(bytearray(min(BLOCK_BYTES, envelope.raw_length - index * BLOCK_BYTES) * factor))
    at = 0
    for base in envelope.bases:
        low, high = max(begin, at), min(begin + len(out), at + base.length)
        if low < high:
            row = Row(base.name, base.raw_length, base.stored_length)
            where = store.where(keys.chunk_key(base.name))
            fetch(store, row, [(base.offset + low - at, out[low - begin : high - begin])], where)
        at += base.length
    return out


def _encoded_like(block: Block, raw: memoryview, base: memoryview | None) -> bytes | None:
    """Encode a block with the same codec to the same length; ``None`` if that is not possible."""
    if block.codec == Codec.STORE:
        return bytes(raw) if len(raw) == block.encoded_length else None
    out = memoryview(bytearray(len(raw)))
    for coding in Codec(block.codec).codings:
        codec, length = encode_block(raw, coding, base, out)
        if (codec, length) == (block.codec, block.encoded_length):
            return bytes(out[:length])
    return None
