"""Flip bits in slots in shared memory and in files of the nvme tier.

The layouts are those of docs/reference/local-tiers.md, read here without tierfs.
"""

import contextlib
import fcntl
import os
import struct

SEALED, CLEAN = 0xE3, 0xFC
CHUNK, DRAFT = 1, 2
HEAD_USED_BYTES = 77
HEAD_BYTES, META_BYTES, HEADS_AT, PAGE = 96, 928, 4096, 4096


def flip_bit(descriptor, at, bit):
    """Flip a bit, and return the byte that is there now."""
    changed = bytes([os.pread(descriptor, 1, at)[0] ^ 1 << bit])
    os.pwrite(descriptor, changed, at)
    return changed


def find_slot(descriptor, state, kind, name=None, meta=None):
    """Return offset and length of the data in a slot with this name or this metadata, and the offset of its head.

    None if there is no such slot.
    """
    header = os.pread(descriptor, 512, 0)
    if header[:8] != b"TFSSLAB1":
        return None
    (slots,) = struct.unpack_from("<I", header, 12)
    heads = os.pread(descriptor, slots * HEAD_BYTES, HEADS_AT)
    metas_at = HEADS_AT + -(-slots * HEAD_BYTES // PAGE) * PAGE
    for number in range(slots):
        at = number * HEAD_BYTES
        name_length = heads[at + 3]
        if tuple(heads[at : at + 3]) != (state, kind, 0):
            continue
        if name is not None and heads[at + 45 : at + 44 + name_length] == name:
            return *struct.unpack_from("<QQ", heads, at + 16), HEADS_AT + at
        if meta is not None and os.pread(descriptor, len(meta), metas_at + number * META_BYTES) == meta:
            return *struct.unpack_from("<QQ", heads, at + 16), HEADS_AT + at
    return None


def flip_in_ram(segments, where, *slot, in_head=False, **about):
    """Flip a bit of a slot's data, or its head, in shared memory. The lock keeps others from using the slot anew.

    Returns:
        A function that tells whether the damaged copy is still used; None if there is no such slot.
    """
    for path in segments.rglob("*.slab"):
        with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found = find_slot(file.fileno(), *slot, **about)
            if found is not None:
                start, length = (found[2], HEAD_USED_BYTES) if in_head else found[:2]
                flip_bit(file.fileno(), start + int(where * length), int(where * 1000) % 8)
                return lambda: has_slot(path, found, *slot, **about)
    return None


def has_slot(path, place, *slot, **about):
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return find_slot(file.fileno(), *slot, **about) == place
    return False


def flip_nvme_drafts(state, where):
    """Flip a bit of the newest batch of drafts in the nvme tier, whose flusher is stopped. Return whether one is there."""
    batches = sorted(state.glob("stores/*/nvme/drafts/*-*"))
    if not batches:
        return None
    with batches[-1].open("r+b", buffering=0) as file:
        flip_bit(file.fileno(), int(where * os.fstat(file.fileno()).st_size), int(where * 1000) % 8)
    return True


def flip_nvme_file(state, where, digest):
    """Flip a bit of a chunk's file in the nvme tier, as `flip_in_ram`. Its flusher must be stopped meanwhile."""
    path = next(state.glob(f"stores/*/nvme/chunks/??{digest.hex()}"), None)
    if path is None:
        return None
    with path.open("r+b", buffering=0) as file:
        length = int.from_bytes(file.read(24)[16:24], "little")
        at = PAGE + int(where * length)
        damaged = flip_bit(file.fileno(), at, int(where * 1000) % 8)

    def is_left():
        with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=0) as again:
            return os.pread(again.fileno(), 1, at) == damaged
        return False

    return is_left
