"""A process that encodes blocks for another one, which started it and shares memory with it: see `tierfs.codec.workers`.

``python -m tierfs.codec.worker DESCRIPTOR``, of a socket. It ends with that.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import sys
from typing import Any

from tierfs import __version__
from tierfs.codec.blocks import Codec, Coding, encode_blocks

__all__ = ["ANSWER_BYTES_MAX", "serve"]

ANSWER_BYTES_MAX = 64 << 10
_JOB_BYTES_MAX = 64 << 10
_REGIONS_MAX = 64  # of which a job has up to twelve


class Worker:
    """What is known of the other process's memory."""

    def __init__(self) -> None:
        self._regions: dict[int, memoryview] = {}

    def learn(self, numbers: list[int], descriptors: list[int], gone: list[int]) -> None:
        """Map regions, and forget others."""
        for number in gone:
            self._regions.pop(number)
        for number, descriptor in zip(numbers, descriptors, strict=True):
            self._regions[number] = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size))
            os.close(descriptor)

    def encode(self, job: dict[str, Any]) -> list[tuple[int, int]]:
        """Encode blocks from and to the other process's memory."""
        raws, bases, outs = ([self._view(place) for place in job[field]] for field in ("raws", "bases", "outs"))
        found = encode_blocks(raws, Coding(Codec(job["codec"]), job["width"]), bases or [None] * len(raws), outs)
        return [(int(codec), length) for codec, length in found]

    def _view(self, place: list[int]) -> memoryview:
        region, at, length = place
        return self._regions[region][at : at + length]


def serve(connection: socket.socket) -> None:
    """Do what is asked until nobody asks any more. An error ends it: who asked does it itself then, counts that, and has it raised there."""
    worker = Worker()
    connection.send(json.dumps({"version": __version__}).encode())
    while True:
        packet, descriptors, _, _ = socket.recv_fds(connection, _JOB_BYTES_MAX, _REGIONS_MAX)
        if not packet:
            return
        job = json.loads(packet)
        worker.learn(job["new"], descriptors, job["gone"])
        connection.send(json.dumps({"number": job["number"], "found": worker.encode(job)}).encode())


if __name__ == "__main__":
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, signal.SIG_IGN)  # they are for the process that started it, with which this one ends
    with socket.socket(fileno=int(sys.argv[1])) as served:
        serve(served)
