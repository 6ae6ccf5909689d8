"""Checkpoints on S3 for `object.py`: saves until `object`, cold loads, and requests."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import dcp_states as states
import torch
import torch.distributed.checkpoint as dcp
from dcp_peers import NVME_GENERATIONS, RAM_GENERATIONS, SPARE_BYTES
from harness import Rows, end_flusher, private_slabs, timed
from object_clients import torch_client
from object_servers import REGION, Server
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from tierfs import digest
from tierfs.dcp import TierReader, TierWriter
from tierfs.objects import MeasuredObjects

GIB = 1 << 30
REQUESTS_BYTES_MAX = 2 * GIB
TENSOR_BYTES = 32 << 20
STOCK = "FsspecWriter over s3fs"
TORCH = "s3torchconnector's S3StorageWriter"
THREADS = 4
# After so many saves, all slabs and the nvme tier have been written to. The first saves fit in beside each other.
WARMING_SAVES = 6


warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Savers:
    """All peers that save to a server and load from it."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def reader(self, who: str, url: str) -> Callable[[], Any]:
        """Return a function that makes the reader of a checkpoint that ``who`` saved. All its imports are done."""
        import s3fs  # noqa: F401 - otherwise by who loads first

        if who.startswith("tierfs"):
            return partial(TierReader, url, s3=self._server.options())
        if who.startswith(STOCK):
            return partial(FsspecReader, url, **self._server.options())
        from s3torchconnector.dcp import S3StorageReader

        def make() -> Any:
            reader = S3StorageReader(REGION, url)
            reader.fs._client = torch_client(self._server)
            return reader

        return make

    def writer(self, who: str, url: str, threads: int) -> Any:
        if who == STOCK:
            return FsspecWriter(url, thread_count=threads, **self._server.options())
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(REGION, url, thread_count=threads)
        writer.fs._client = torch_client(self._server)
        return writer


def kind_of(path: str) -> str:
    """Return the subject of a request. Lookups, reads and listings of manifests all count as records."""
    for kind in ("chunks", "leases", "gc"):
        if f"/.tierfs/{kind}/" in unquote(path):
            return kind
    return "descriptor" if path.endswith("/.tierfs/store.json") else "records"


def state_of(size: int, make: Callable[[int, int], torch.Tensor] = torch.randn) -> Any:
    """Return matrices of the size that 2 GiB in 64 have, so that requests per GiB are comparable."""
    return states.blocks(size, min(max(size // TENSOR_BYTES, 1), states.BLOCK_TENSORS), make)


def content(state: Any) -> str:
    tensors = (tensor.reshape(-1).view(torch.uint8).numpy() for tensor in states.tensors_of(state))
    return digest.checksum(*(memoryview(array).cast("B") for array in tensors)).hex()


def _renewed(make: Callable[[int], Any], size: int, number: int) -> Any:
    states.renew(state := make(size), number)
    return state


STATES = {
    "": partial(_renewed, state_of),
    "transformer's ": partial(_renewed, states.transformer),
    "shards' ": states.shards,
}
"""Functions that make a state of so many bytes, by their label in the report. The number selects the content."""


class Checkpoints:
    """One state, and all peers that save it to a server.

    Args:
        server: Holds the stores.
        size: Bytes of the state.
        rounds: Rounds that count.
        root: A directory on the disk of the nvme tier.
    """

    def __init__(self, server: Server, size: int, rounds: int, root: Path) -> None:
        self._server = server
        self._size = size
        self._rounds = rounds
        self._root = root
        self._number = 0

    def saves_and_loads(self) -> dict[str, Any]:
        """Return the seconds of a save to the object tier and of a cold load by peer, and the errors of others."""
        state, rows = state_of(self._size), Rows()
        savers = Savers(self._server)
        everyone = [("tierfs", 0), (STOCK, 1), (STOCK, THREADS)]
        unable = {}
        try:
            import s3torchconnector.dcp  # noqa: F401
        except ImportError as error:
            unable[TORCH] = str(error)
        else:
            everyone += [(TORCH, 1), (TORCH, THREADS)]
        with private_slabs():
            writer, store = self._tierfs(self._server, "saves")
            for _ in range(WARMING_SAVES):
                self._number += 1
                states.renew(state, self._number)
                dcp.save(state, storage_writer=writer, no_dist=True, checkpoint_id=f"{store}/run_{self._number}/step_1")
                self._server.empty("saves/.tierfs/chunks")
            for number in range(1 + self._rounds):
                if number == 1:
                    rows.clear()
                for who, threads in everyone:
                    name = f"{who}, {threads} threads" if threads > 1 else who
                    self._number += 1
                    states.renew(state, self._number)
                    place = f"saves/step_{self._number}" if threads == 0 else f"others/step_{self._number}"
                    url = f"s3://{self._server.bucket}/{place}"
                    if threads == 0:
                        # A directory of its own, so that it has no parent: earlier ones are deleted below.
                        url = f"{store}/run_{self._number}/step_1"
                    gc.collect()
                    if threads == 0:
                        save = partial(dcp.save, storage_writer=writer, checkpoint_id=url)
                    else:
                        save = partial(dcp.save, storage_writer=savers.writer(who, url, threads))
                    rows.note(name, save=timed(partial(save, state, no_dist=True)))
                    found = self._load(self._server, who, url)
                    assert found["content"] == content(state), f"{name} loaded something else"
                    rows.note(name, load=found["seconds"])
                    self._server.empty("saves/.tierfs/chunks" if threads == 0 else "others")
            end_flusher(writer.status())
        return {"rows": rows.medians(), "unable": unable}

    def requests(self) -> dict[str, Any]:
        """Count the requests per GiB at the server, of a save by a writer that saved before, and of a cold load.

        The states are matrices, a transformer's state with tensors of all sizes, and a rank's shards in bfloat16 and
        float32. The result also has the requests that the loading process counted itself.
        """
        size = min(self._size, REQUESTS_BYTES_MAX)
        seen: dict[str, Counter[str]] = {}
        per_gib: dict[str, dict[str, float]] = {}

        def note(step: str, proxy: Any, state_bytes: int) -> None:
            seen[step] = Counter(kind_of(path) for _, path in proxy.requests.elements())
            counted = seen[step]["chunks"] + seen[step]["records"]
            per_gib[step] = {
                "chunks and manifests": counted * GIB / state_bytes,
                "all": proxy.requests.total() * GIB / state_bytes,
            }

        with (
            self._server.proxied() as (server, proxy),
            self._server.proxied() as (other, watched),
            private_slabs(),
        ):
            writer, store = self._tierfs(server, "requests")
            for whose, make in STATES.items():
                for save in ("first save", "save"):
                    self._number += 1
                    state = make(size, self._number)
                    url = f"{store}/step_{self._number}"
                    proxy.requests.clear()
                    dcp.save(state, storage_writer=writer, no_dist=True, checkpoint_id=url)
                    note(f"{whose}{save}", proxy, states.bytes_in(state))
                watched.requests.clear()
                found = self._load(other, "tierfs", url, size, whose)
                note(f"{whose}load", watched, states.bytes_in(state))
                assert found["content"] == content(state), f"the {whose}load brought something else"
                self._server.empty("requests/.tierfs/chunks")
            end_flusher(writer.status())
        self._server.empty("requests")
        return {"bytes": size, "seen": seen, "per GiB": per_gib, "counted by who loads": found["requests"]}

    def _tierfs(self, server: Server, name: str) -> tuple[TierWriter, str]:
        store = server.make_store(name)
        ram, nvme = (int(self._size * share) + SPARE_BYTES for share in (RAM_GENERATIONS, NVME_GENERATIONS))
        options = {"ram": ram, "nvme": nvme, "state_dir": str(self._root / name), "s3": server.options()}
        return TierWriter(store, ack="object", **options), store

    def _load(self, server: Server, who: str, url: str, size: int = 0, whose: str = "") -> dict[str, Any]:
        """Load in a new process on a host without state."""
        with (
            tempfile.TemporaryDirectory(dir=self._root) as directory,
            tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir="/dev/shm") as shared,
        ):
            environment = os.environ | {"TIERFS_STATE_DIR": directory, "TIERFS_SHM_DIR": shared}
            command = [sys.executable, __file__, who, url, size or self._size, server.url, whose]
            process = subprocess.Popen(
                list(map(str, command)), env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            output, _ = process.communicate("go\n")
        if process.returncode:
            raise SystemExit(f"a load by {who} failed")
        found: dict[str, Any] = json.loads(output)
        return found


def main() -> None:
    """Load in a new process on a host without state: ``WHO URL BYTES SERVER-URL WHOSE``.

    It prints ``ready`` when imports are done and the tensors' memory is warm, and waits for a line. Then it loads, and
    prints the seconds, a checksum of the content, and the requests to tierfs's object tier as JSON.
    """
    who, url, size, server_url, whose = sys.argv[1:]
    target = STATES[whose](int(size), 0)
    reader = Savers(Server("load", server_url, "")).reader(who, url)
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    dcp.load(target, storage_reader=reader(), no_dist=True)
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "content": content(target), "requests": requested()}))


def requested() -> dict[str, int]:
    """Return this process's requests to object tiers, by method."""
    from tierfs.session.open import open_stores

    counted: dict[str, int] = {}
    for store in open_stores.values():
        objects: Any = store.objects
        while not isinstance(objects, MeasuredObjects):
            objects = objects.inner
        for method, counters in objects.snapshot().items():
            if counters["requests"]:
                counted[method] = counted.get(method, 0) + int(counters["requests"])
    return counted


if __name__ == "__main__":
    main()
