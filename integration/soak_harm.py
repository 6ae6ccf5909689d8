"""Flip bits in every place where tierfs keeps bytes, and see whether it takes the bytes from another one."""

from __future__ import annotations

import contextlib
import os
import signal

import xxhash
from soak_hosts import fill
from support import killing
from support.flipped_copies import (
    CHUNK,
    CLEAN,
    DRAFT,
    SEALED,
    flip_bit,
    flip_in_ram,
    flip_nvme_drafts,
    flip_nvme_file,
)
from support.promises import BrokenPromiseError

from tierfs.host.host import Host
from tierfs.host.rpc.protocol import connect
from tierfs.host.slab.budget import LOCK

ROUNDS = 8
REFUSALS = ("error: CorruptionError", "error: FormatError")


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
    flusher, flipped = slot.host.flusher, []
    flusher.send(signal.SIGSTOP)  # it alone may use a file of the nvme tier anew
    for digest in digests:
        if "ram" in tiers:
            flipped.append(("ram", flip_in_ram(slot.host.shm, where, CLEAN, CHUNK, name=digest)))
        if "nvme" in tiers:
            flipped.append(("nvme", flip_nvme_file(slot.host.state, where, digest)))
    flusher.send(signal.SIGCONT)
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
                flip_object(world, stack, key, where)
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


def flip_object(world, stack, key, where):
    """Flip a bit of an object until the end of the stack."""
    if world.proxy is not None:
        data = world.objects.read(key, 1 << 25)[0]
        damaged = bytearray(data)
        damaged[int(where * len(data))] ^= 1 << int(where * 1000) % 8
        world.objects.put(key, [damaged])
        stack.callback(world.objects.put, key, [data])
        return
    file = stack.enter_context((world.base / "disk/store" / key).open("r+b", buffering=0))
    change = (file.fileno(), int(where * os.fstat(file.fileno()).st_size), int(where * 1000) % 8)
    flip_bit(*change)
    stack.callback(flip_bit, *change)  # the same file is mended, whatever its name leads to by then


def flip_pending(world, slot, name, what, content, where):
    """Flip a bit of a change that only this host has. It must be refused, and not reach the object tier.

    Then the change is discarded, if its draft was damaged, and the same bytes are saved again.
    """
    path, host = f"{slot.directory}/{name}", slot.host
    while world.timers:
        world.pump(0.05)
    world.until_idle(*host.slots)
    while not listens(host):
        world.pump(0.05)
    is_stored = what == "batch"  # in the nvme tier alone
    ballast = fill(world.base / "disk") if is_stored else None
    if not is_stored:
        with Host(host.state).locked(LOCK):  # so that the flusher does not keep it from the write
            host.flusher.send(signal.SIGSTOP)
    known = world.model.path(path)
    index = known.begin([tuple(content)])
    level = "local" if is_stored else "staged"
    write = {"do": "write", "name": name, "content": content, "level": level, "door": "pipe"}
    damaged = None
    if "error" not in world.call(slot, **write):
        host.flusher.send(signal.SIGSTOP)
        if is_stored:
            damaged = flip_nvme_drafts(host.state, where)
        else:
            is_chunk = what.startswith("slot")
            about = {"name": chunk_digest(killing.content(*content))} if is_chunk else {"meta": path.encode()}
            about["in_head"] = what.endswith("head")
            damaged = flip_in_ram(host.shm, where, SEALED, CHUNK if is_chunk else DRAFT, **about)
    if ballast is not None:
        ballast.unlink()
        world.kill("flusher", host)  # the next one reads the batch
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
    for each in (path, "") if told == "refused" and not what.startswith("slot") else ():  # its path may be damaged, too
        world.call(slot, do="discard", path=each)
    index = known.begin([tuple(content)])
    for _ in range(8):  # a fault may strike each request
        answer = world.call(slot, **write)
        if "error" not in answer:
            answer = world.call(slot, do="wait", level="object")
        if "error" not in answer:
            break
        if answer["error"] == "CorruptionError":  # a batch that was read only now: see docs/how-to/damage.md
            for each in (path, ""):
                world.call(slot, do="discard", path=each)
        if host.has_conflicts:  # of an earlier change, which a late request overtook
            world.discard(slot)
    else:
        raise BrokenPromiseError("error", f"{path} cannot be saved again after damage: {answer}")
    known.acknowledge(index, "object")
    world.check(world.reader, path, "cat", [path])
    world.until_idle(world.reader)


def listens(host):
    """Return whether the flusher of a host has started."""
    connections = [connect(directory, 1) for directory in host.state.glob("stores/*")]
    for connection in filter(None, connections):
        connection.close()
    return any(connections)


def chunk_digest(data):
    """Return the digest of the chunk that a content of at most 1 MiB makes."""
    return xxhash.xxh3_128_digest(len(data).to_bytes(8, "little") + xxhash.xxh3_128_digest(data))
