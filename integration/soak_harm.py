"""Flip bits in every place where tierfs keeps bytes: slots, chunk files, chunk objects and records.

The layouts are those of docs/reference/local-tiers.md, read here without tierfs.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import signal
import struct

CLEAN, CHUNK = 3, 1
ROUNDS = 8
REFUSALS = ("error: CorruptionError", "error: FormatError")
HEAD_BYTES, HEADS_AT, PAGE = 96, 4096, 4096


def bytes_below(directory):
    """Return the bytes of all files below a directory, which others change meanwhile."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
    return total


def flip_bit(descriptor, at, bit):
    """Flip a bit, and return the byte that is there now."""
    changed = bytes([os.pread(descriptor, 1, at)[0] ^ 1 << bit])
    os.pwrite(descriptor, changed, at)
    return changed


def clean_slot(descriptor, digest):
    """Return where the clean copy of a chunk lies in a segment: offset and length. None if there is none."""
    header = os.pread(descriptor, 512, 0)
    if header[:8] != b"TFSSLAB1":
        return None
    (slots,) = struct.unpack_from("<I", header, 12)
    heads = os.pread(descriptor, slots * HEAD_BYTES, HEADS_AT)
    for at in range(0, len(heads), HEAD_BYTES):
        state, kind, hidden, name_length = heads[at : at + 4]
        name = heads[at + 44 : at + 44 + name_length]
        if (state, kind, hidden) == (CLEAN, CHUNK, 0) and name[1:] == digest:
            return struct.unpack_from("<QQ", heads, at + 16)
    return None


def flip_in_ram(host, digest, where):
    """Flip a bit of a chunk's clean copy in shared memory. The lock keeps others from using the slot anew meanwhile.

    Returns:
        A function that tells whether the damaged copy is still used; None if there is no copy.
    """
    for path in host.shm.rglob("*.slab"):
        with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found = clean_slot(file.fileno(), digest)
            if found is not None:
                flip_bit(file.fileno(), found[0] + int(where * found[1]), int(where * 1000) % 8)

                return functools.partial(has_slot, path, digest, found)
    return None


def has_slot(path, digest, place):
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return clean_slot(file.fileno(), digest) == place
    return False


def flip_in_nvme(host, digest, where):
    """Flip a bit of a chunk's file, as `flip_in_ram`. The flusher, which may use the file anew, is stopped meanwhile."""
    host.flusher.send(signal.SIGSTOP)
    try:
        path = next(host.state.glob(f"stores/*/nvme/chunks/??{digest.hex()}"), None)
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
    finally:
        host.flusher.send(signal.SIGCONT)


def flip(world, slot, name, tiers, where):
    """Flip bits in copies of a file that the object tier has, and read the file after each.

    A flipped local copy must not change what is read, and a flipped object must be refused. Objects are mended again.
    """
    path = f"{slot.directory}/{name}"
    known = world.model.path(path)
    if "error" in world.call(slot, do="wait", level="object"):
        return
    known.acknowledge(known.floors["staged"], "object")
    answer = world.call(slot, do="chunks", name=name)
    if "error" in answer:
        return  # no file is there
    chunks = [(bytes.fromhex(digest), key) for digest, key in answer["done"]["chunks"]][:2]
    if tiers[0] in ("chunk", "record"):
        keys = [answer["done"]["record"]] if tiers == ["record"] else [key for _, key in chunks]
        world.until_idle(*world.slots())
        for number in range(ROUNDS if keys else 0):
            flip_objects(world, path, tiers[0], keys, (where + number / ROUNDS) % 1)
        return
    for number in range(ROUNDS if chunks else 0):
        flip_copies(world, slot, path, tiers, [digest for digest, _ in chunks], (where + number / ROUNDS) % 1)


def flip_copies(world, slot, path, tiers, digests, where):
    name = path.partition("/")[2]
    for tier in tiers:
        world.call(slot, do="prefetch", name=name, tier=tier)
    if tiers == ["nvme"]:
        world.call(slot, do="evict", name=name, tier="ram")  # so that the file is read
    damages = {"ram": flip_in_ram, "nvme": flip_in_nvme}
    flipped = [(tier, damages[tier](slot.host, digest, where)) for tier in tiers for digest in digests]
    flipped = [(tier, is_left) for tier, is_left in flipped if is_left is not None]
    world.check(slot, slot.directory, "cat", [path])
    world.until_idle(slot)
    for tier, is_left in flipped:
        world.flips[f"flipped {tier}"] += 1
        world.flips[f"{tier}: {'not read' if is_left() else 'found, and not used again'}"] += 1


def flip_objects(world, path, kind, keys, where):
    world.alive(world.reader)
    with contextlib.ExitStack() as stack:
        flipped = 0
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                file = stack.enter_context((world.base / "store" / key).open("r+b", buffering=0))
                change = (file.fileno(), int(where * os.fstat(file.fileno()).st_size), int(where * 1000) % 8)
                flip_bit(*change)
                stack.callback(flip_bit, *change)  # the same file is mended, whatever its name leads to by then
                flipped += 1
        world.flips[f"flipped {kind}"] += flipped
        found = world.call(world.reader, do="read", paths=[path], attempts=1)["done"][path] if flipped else None
        if isinstance(found, str) and found.startswith(REFUSALS):
            world.flips[f"{kind}: refused"] += flipped
        elif flipped:
            world.model.check(path, found, world.model.path(path).floors["object"], f"a reader of a damaged {kind}")
            world.flips[f"{kind}: right in spite of it"] += flipped
    world.check(world.reader, path, "cat", [path])
    world.until_idle(world.reader)
