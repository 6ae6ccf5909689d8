"""Chunks for `object.py`: all clients, and tierfs's flusher, on one server."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from harness import SEED, Rows, cpu_seconds, end_flusher, private_slabs, timed
from object_clients import best_width, clients, loopback_sink
from object_servers import Server
from tiers import fresh

from tierfs.digest import CHUNK_BYTES

SPARE_BYTES = 256 << 20
TUNED_SHARE = 4
# A slab or a chunk file is warm after the first write to it. The first file does not write to all.
WARMING_FLUSHES = 3


class Flush:
    """Stage files in a store with local tiers, and time how long the flusher's process takes to flush them.

    Args:
        server: Holds the store.
        name: Name of the store.
        size: Bytes of a file.
        root: A directory on the disk of the nvme tier.
        has_nvme: Whether the store has an nvme tier.
    """

    def __init__(self, server: Server, name: str, size: int, root: Path, *, has_nvme: bool) -> None:
        self._server = server
        self._name = name
        url = server.make_store(name)
        room = size * 5 // 2 + SPARE_BYTES
        self._fs, self._path = fsspec.url_to_fs(
            url,
            ack="staged",
            ram=room,
            nvme=room if has_nvme else 0,
            state_dir=str(root / name),
            s3=server.options(),
        )
        self._numbers = itertools.count()

    def __call__(self, source: np.ndarray[Any, Any]) -> dict[str, float]:
        """Return the seconds from the closed file until it is in the object tier, and the flusher's CPU seconds."""
        path = f"{self._path}/{next(self._numbers)}"
        with self._fs.open(path, "wb") as file:
            file.write(source)
        begin = time.perf_counter()
        pid = self._fs.status(self._path)["flusher"]["pid"]
        used = cpu_seconds(pid)
        self._fs.wait(path, "object")
        seconds = time.perf_counter() - begin
        used = cpu_seconds(pid) - used
        self._fs.rm(path)
        self._fs.wait(path, "object")
        self._server.empty(f"{self._name}/.tierfs/chunks")
        return {"put": seconds, "put cpu": used}

    def stop(self) -> None:
        end_flusher(self._fs.status(self._path))


@contextlib.contextmanager
def flushes(server: Server, size: int, root: Path) -> Iterator[dict[str, Flush]]:
    """Yield the flushes by their name in the report."""
    found: dict[str, Flush] = {}
    with private_slabs():
        try:
            for name, has_nvme in (("tierfs flush, ram tier", False), ("tierfs flush, ram and nvme tiers", True)):
                found[name] = Flush(server, f"flush{len(found)}", size, root, has_nvme=has_nvme)
            yield found
        finally:
            for flush in found.values():
                flush.stop()


def moves(server: Server, size: int, rounds: int, root: Path) -> dict[str, Any]:
    """Return the seconds to put, flush and get by client, each client's concurrency, and the errors of the others."""
    generator = np.random.default_rng(SEED)
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    buffers = [memoryview(target)[at : at + CHUNK_BYTES] for at in range(0, size, CHUNK_BYTES)]
    rows = Rows()

    def chunks() -> list[bytes]:
        return [source[at : at + CHUNK_BYTES].tobytes() for at in range(0, size, CHUNK_BYTES)]

    fresh(source, generator)
    able, unable = clients(server, chunks()[0])
    some = chunks()[: max(len(buffers) // TUNED_SHARE, 1)]
    widths: dict[str, dict[str, int]] = {}
    for client in able:
        empty = partial(server.empty, client.prefix)
        put = best_width(partial(client.put_all, some), empty)
        client.put_all(some, put)
        get = best_width(partial(client.get_all, buffers[: len(some)]), lambda: None)
        empty()
        widths[client.name] = {"put": put, "get": get}
    with loopback_sink() as send, flushes(server, size, root) as flushers:
        for flush, _ in itertools.product(flushers.values(), range(WARMING_FLUSHES)):
            fresh(source, generator)
            flush(source)
        for number in range(1 + rounds):
            if number == 1:
                rows.clear()
            fresh(source, generator)
            pieces = chunks()
            rows.note("memcpy", put=timed(partial(np.copyto, target, source)))
            rows.note("loopback TCP to a process that does nothing", put=timed(partial(send, pieces)))
            for name, flush in flushers.items():
                fresh(source, generator)
                rows.note(name, **flush(source))
            for client in able:
                width = widths[client.name]
                for what, move in (
                    ("put", partial(client.put_all, pieces, width["put"])),
                    ("get", partial(client.get_all, buffers, width["get"])),
                ):
                    used = time.process_time()
                    rows.note(client.name, **{what: timed(move), f"{what} cpu": time.process_time() - used})
                server.empty(client.prefix)
    for client in able:
        client.close()
    return {"rows": rows.medians(), "at once": widths, "unable": unable}
