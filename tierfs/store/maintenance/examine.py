"""Read one whole chunk object and verify its digests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tierfs import digest
from tierfs.buffers import buffers
from tierfs.codec import Codec, decode_block
from tierfs.digest import BLOCK_BYTES, CHUNK_BYTES
from tierfs.errors import CorruptionError, FormatError, NotFoundError
from tierfs.format import keys
from tierfs.format.envelope import ENVELOPE_BYTES_MAX, Envelope
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Row
from tierfs.objects.checksums import twice
from tierfs.store.read.fetch import fetch
from tierfs.store.read.lookup import check_envelope
from tierfs.store.store import Store

OBJECT_BYTES_MAX = CHUNK_BYTES + ENVELOPE_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Damage:
    """An object that is damaged, missing or unreadable.

    Attributes:
        path: The file concerned; or the key, if the object belongs to no file.
        key: Key of the object, or of the object that shows the damage.
        kind: Category of the error.
        problem: The problem, in words.
    """

    path: str
    key: str
    kind: str
    problem: str


@dataclass(frozen=True, slots=True)
class Examined:
    """The result of reading a chunk object.

    Attributes:
        raw_length: Bytes of the chunk; 0 if the object does not tell.
        kind: Category of the error; empty if all bytes are right.
        problem: The error in words.
    """

    raw_length: int = 0
    kind: str = ""
    problem: str = ""

    @property
    def is_sound(self) -> bool:
        return not self.kind


def examine(store: Store, name: ChunkName, size: int) -> Examined | None:
    """Read a chunk object, and verify every block of it. Read it again if it is damaged.

    Args:
        store: The store, without its local tiers.
        size: Bytes of the object, as a listing reported.

    Returns:
        ``None`` if the object was deleted meanwhile.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    key = keys.chunk_key(name)
    where = store.where(key)
    raw_length = 0

    def read() -> None:
        nonlocal raw_length
        raw_length = 0
        if not 0 < size <= OBJECT_BYTES_MAX:
            raise CorruptionError(f"{where}: an object of {size} bytes cannot be a chunk", path=key)
        data = memoryview(bytearray(size))
        info = store.objects.get(key, [(0, data)])
        envelope = Envelope.decode(data[:ENVELOPE_BYTES_MAX], where, stored_length=info.size)
        check_envelope(envelope, name, where)
        raw_length = envelope.raw_length
        if envelope.bases:
            with buffers().lend(raw_length) as out:
                fetch(store, Row(name, raw_length, size), [(0, out)], where)
        else:
            for _, error in bad_blocks(envelope, data, lambda _: None, where):
                raise error

    try:
        twice(read)
    except NotFoundError:
        return None
    except (CorruptionError, FormatError) as error:
        return Examined(raw_length, error.kind, str(error))
    return Examined(raw_length)


def lacks_base(store: Store, name: ChunkName, size: int) -> bool:
    """Return whether a base of a chunk object is missing. gc may delete it first where no record names either."""
    head, where = memoryview(bytearray(min(size, ENVELOPE_BYTES_MAX))), store.where(keys.chunk_key(name))
    try:
        info = store.objects.get(keys.chunk_key(name), [(0, head)])
        bases = {base.name for base in Envelope.decode(head, where, stored_length=info.size).bases}
        return any(lacks_base(store, base, store.objects.head(keys.chunk_key(base)).size) for base in bases)
    except NotFoundError:
        return True
    except (CorruptionError, FormatError):
        return False


def block_places(envelope: Envelope) -> Iterator[tuple[int, int]]:
    """Yield the offsets in the object at which each encoded block begins and ends."""
    lengths = (block.encoded_length for block in envelope.blocks)
    return itertools.pairwise(itertools.accumulate(lengths, initial=envelope.header_length))


def bad_blocks(
    envelope: Envelope, stored: memoryview, base: Callable[[int], memoryview | None], where: str
) -> Iterator[tuple[int, CorruptionError | FormatError]]:
    """Decode every block of a chunk object, and yield the index of each bad block with its error.

    Args:
        base: Returns the bytes that a block, by its index, is encoded against; ``None`` if it has no base.
        where: The name of the object in errors.
    """
    with buffers().lend(min(BLOCK_BYTES, envelope.raw_length)) as memory:
        for index, (begin, end) in enumerate(block_places(envelope)):
            block, data = envelope.blocks[index], stored[begin:end]
            out = memory[: envelope.raw_length - index * BLOCK_BYTES]
            try:
                if block.codec == Codec.STORE:
                    out = data
                else:
                    decode_block(block.codec, data, out, base(index), where)
            except (CorruptionError, FormatError) as error:
                yield index, error
                continue
            if digest.hash_bytes(envelope.digest_kind, out) != block.digest:
                problem = f"{where} is damaged: block {index} does not have its digest"
                yield index, CorruptionError(problem, path=where, tier="object", block=index)
