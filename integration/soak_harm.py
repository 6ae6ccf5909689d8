"""Flip bits in every place where tierfs keeps bytes: slots, chunk files, chunk objects and records.

The layouts are those of docs/reference/local-tiers.md, read here without tierfs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct

import xxhash
from soak_model import BrokenPromiseError
from support import killing

SEALED, CLEAN = 2, 3
CHUNK, DRAFT = 1, 2
ROUNDS = 8
REFUSALS = ("error: CorruptionError", "error: FormatError")
HEAD_BYTES, META_BYTES, HEADS_AT, PAGE = 96, 928, 4096, 4096


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


def find_slot(descriptor, state, kind, name=None, meta=None):
    """Return offset and length of the data in a slot with this name, or with this metadata. None if there is none."""
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
            return struct.unpack_from("<QQ", heads, at + 16)
        if meta is not None and os.pread(descriptor, len(meta), metas_at + number * META_BYTES) == meta:
            return struct.unpack_from("<QQ", heads, at + 16)
    return None


def flip_in_ram(host, where, *slot, **about):
    """Flip a bit of a slot in shared memory. The lock keeps others from using the slot anew meanwhile.

    Returns:
        A function that tells whether the damaged copy is still used; None if there is no such slot.
    """
    for path in host.shm.rglob("*.slab"):
        with contextlib.suppress(FileNotFoundError), path.open("r+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found = find_slot(file.fileno(), *slot, **about)
            if found is not None:
                flip_bit(file.fileno(), found[0] + int(where * found[1]), int(where * 1000) % 8)
                return lambda: has_slot(path, found, *slot, **about)
    return None


def has_slot(path, place, *slot, **about):
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return find_slot(file.fileno(), *slot, **about) == place
    return False


def flip_in_nvme(host, where, digest):
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
        if world.proxy is not None:
            return  # these objects are no files here
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
    damages = {
        "ram": lambda digest: flip_in_ram(slot.host, where, CLEAN, CHUNK, name=digest),
        "nvme": lambda digest: flip_in_nvme(slot.host, where, digest),
    }
    flipped = [(tier, damages[tier](digest)) for tier in tiers for digest in digests]
    flipped = [(tier, is_left) for tier, is_left in flipped if is_left is not None]
    world.check(slot, slot.directory, "cat", [path])
    world.until_idle(slot)
    for tier, is_left in flipped:
        world.flips[tier] += 1
        world.damage[f"{tier}: {'not read' if is_left() else 'found, and not used again'}"] += 1


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
        world.flips[kind] += flipped
        found = world.call(world.reader, do="read", paths=[path], attempts=1)["done"][path] if flipped else None
        if isinstance(found, str) and found.startswith(REFUSALS):
            world.damage[f"{kind}: refused"] += flipped
        elif flipped:
            world.model.check(path, found, world.model.path(path).floors["object"], f"a reader of a damaged {kind}")
            world.damage[f"{kind}: right in spite of it"] += flipped
    world.check(world.reader, path, "cat", [path])
    world.until_idle(world.reader)


def flip_pending(world, slot, name, what, content, where):
    """Flip a bit of a change that only this host has. It must be refused, and not reach the object tier.

    Then the change is discarded, if its draft was damaged, and the same bytes are saved again.
    """
    path, host = f"{slot.directory}/{name}", slot.host
    while world.timers:
        world.pump(0.05)
    world.until_idle(*host.slots)
    host.flusher.send(signal.SIGSTOP)
    known = world.model.path(path)
    index = known.begin([tuple(content)])
    write = {"do": "write", "name": name, "content": content, "level": "staged", "door": "pipe"}
    damaged = None
    if "error" not in world.call(slot, **write):
        about = {"name": chunk_digest(killing.content(*content))} if what == "slot" else {"meta": path.encode()}
        damaged = flip_in_ram(host, where, SEALED, CHUNK if what == "slot" else DRAFT, **about)
    host.flusher.send(signal.SIGCONT)
    if damaged is None:
        return
    world.flips[f"pending {what}"] += 1
    found = world.call(slot, do="read", paths=[path], attempts=1)["done"][path]
    if not (isinstance(found, str) and found.startswith(REFUSALS)):
        world.model.check(path, found, index, f"a reader of a damaged pending {what}")
    waited = world.call(slot, do="wait", level="object")
    told = "refused" if waited.get("error") == "CorruptionError" else f"waited: {waited.get('error', 'done')}"
    world.damage[f"pending {what}: {told}"] += 1
    if what == "draft":
        world.call(slot, do="discard", path=path)
    index = known.begin([tuple(content)])
    for request in (write, {"do": "wait", "level": "object"}):
        answer = world.call(slot, **request)
        if "error" in answer:
            raise BrokenPromiseError("error", f"{path} cannot be saved again after damage: {answer}")
    known.acknowledge(index, "object")
    world.check(world.reader, path, "cat", [path])
    world.until_idle(world.reader)


def chunk_digest(data):
    """Return the digest of the chunk that a content of at most 1 MiB makes."""
    return xxhash.xxh3_128_digest(len(data).to_bytes(8, "little") + xxhash.xxh3_128_digest(data))
