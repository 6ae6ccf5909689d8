"""Links for `codec.py`: the time of a late state from `staged` to the object tier, with codecs and without.

A state is saved as one safetensors file, in which each tensor is a chunk of 1 to 2 MiB. It is also saved as a DCP
checkpoint, whose chunks are 16 MiB, like those of files with large tensors.

`report` runs this file as a program, ``SNAPSHOTS ROOT STATES ROUNDS``, in a network namespace whose loopback is the
link. The server is nginx with its files on tmpfs.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import safetensors.torch
import shaped_network
import torch
from codec_states import bytes_of, load, same, steps_of
from dcp_session import Rows, timed
from object_moves import cpu_seconds, end_flusher, private_slabs
from object_servers import REGION, Server, nginx
from torch.distributed.checkpoint import save as save_checkpoint

from tierfs.dcp import TierWriter

MB = 10**6
LIMITS = {"50": 50 * MB, "100": 100 * MB, "200": 200 * MB, "400": 400 * MB, "800": 800 * MB, "unlimited": None}
# For each way: whether it saves through DCP, and the options of the filesystem.
WAYS: dict[str, tuple[bool, dict[str, str]]] = {
    "file, raw": (False, {"codecs": "off"}),
    "file": (False, {}),
    "checkpoint, raw": (True, {"codecs": "off"}),
    "checkpoint": (True, {}),
}
State = dict[str, torch.Tensor]
RUN = "fp32master"
LATE = 4
FILE = "state.safetensors"
RAM_STATES = 2.5
SPARE_BYTES = 256 << 20
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_REGION": REGION}


class Flush:
    """Stage states in a store and time how long the flusher's process takes to flush them.

    The chunks of a state are deleted before the next state.

    Args:
        server: Holds the store.
        name: Name of the store.
        size: Bytes of a state.
        root: Parent of the state directory.
        dcp: Whether states are saved as DCP checkpoints.
        options: Options of the filesystem.
    """

    def __init__(self, server: Server, name: str, size: int, root: Path, options: dict[str, str], *, dcp: bool) -> None:
        self._server = server
        self._name = name
        self._url = server.make_store(name)
        self._root = root
        everything: dict[str, Any] = {
            "ack": "staged",
            "ram": int(size * RAM_STATES) + SPARE_BYTES,
            "nvme": 0,
            "state_dir": str(root / name),
            "s3": server.options(),
            **options,
        }
        self._fs, self._path = fsspec.url_to_fs(self._url, **everything)
        self._writer = TierWriter(self._url, **everything) if dcp else None
        self._numbers = itertools.count()

    def __call__(self, state: State, *, check: bool) -> dict[str, float]:
        """Return the seconds from staged to the object tier, the flusher's CPU seconds, and stored over raw bytes."""
        # A new directory, so that no earlier checkpoint is the parent of this one.
        run = f"run_{next(self._numbers)}/step_1"
        if self._writer is None:
            with self._fs.open(f"{self._path}/{run}/{FILE}", "wb") as handle:
                handle.write(safetensors.torch.save(state))
        else:
            save_checkpoint(state, storage_writer=self._writer, checkpoint_id=f"{self._url}/{run}", no_dist=True)
        pid = self._fs.status(self._path)["flusher"]["pid"]
        used = cpu_seconds(pid)
        seconds = timed(partial(self._fs.wait, self._path, "object"))
        used = cpu_seconds(pid) - used
        stored = self._server.stored(f"{self._name}/.tierfs/chunks")
        if check and self._writer is None:  # nginx cannot answer the reads of a checkpoint; `codec_sets` loads those
            self._check(f"{run}/{FILE}", state)
        self._server.empty(f"{self._name}/.tierfs/chunks")
        return {"seconds": seconds, "cpu": used, "stored": stored / bytes_of(state)}

    def stop(self) -> None:
        end_flusher(self._fs.status(self._path))

    def _check(self, file: str, state: State) -> None:
        elsewhere = str(self._root / f"{self._name}-elsewhere")
        options: dict[str, Any] = {"ram": 0, "nvme": 0, "state_dir": elsewhere, "s3": self._server.options()}
        fs, path = fsspec.url_to_fs(f"{self._url}/{file}", **options)
        loaded = safetensors.torch.load(fs.cat(path))
        assert all(same(loaded[name], state[name]) for name in state), "what was loaded is not what was saved"


def states(snapshots: Path, count: int) -> State:
    """Combine several late states of a run into one larger state."""
    steps = steps_of(snapshots / RUN)[LATE:][:count]
    return {f"{step.name}.{name}": tensor for step in steps for name, tensor in load(step).items()}


def moved(state: State, count: int) -> State:
    """Rotate each tensor by `count` elements: no chunk of it was stored before, and its statistics are the same."""
    return {name: tensor.flatten().roll(count) for name, tensor in state.items()}


def report(snapshots: Path, root: Path, count: int, rounds: int) -> dict[str, Any]:
    program = [sys.executable, Path(__file__), snapshots, root, str(count), str(rounds)]
    done = subprocess.run(
        shaped_network.command(program), env=CREDENTIALS | os.environ, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure in this network namespace, and print the result as JSON."""
    snapshots, root, count, rounds = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    state = states(snapshots, count)
    rows: dict[str, Rows] = {limit: Rows() for limit in LIMITS}
    turned = itertools.count(1)
    shaped_network.up()
    with nginx() as server, private_slabs():
        flushes: dict[str, Flush] = {}
        try:
            for number, (way, (dcp, options)) in enumerate(WAYS.items()):
                flushes[way] = Flush(server, f"store-{number}", bytes_of(state), root, options, dcp=dcp)
                flushes[way](moved(state, next(turned)), check=True)  # warms slabs and connections
            for limit, bytes_per_s in LIMITS.items():
                shaped_network.limit(bytes_per_s)
                for number in range(1 + rounds):
                    if number == 1:
                        rows[limit].clear()  # in the first round the flusher measured its link, as in a long job
                    # Alternate which way goes first.
                    for way in list(flushes)[:: 1 if number % 2 else -1]:
                        rows[limit].note(way, **flushes[way](moved(state, next(turned)), check=False))
        finally:
            for flush in flushes.values():
                flush.stop()
    medians = {limit: row.medians() for limit, row in rows.items()}
    print(json.dumps({"bytes": bytes_of(state), "rows": medians}))


if __name__ == "__main__":
    main()
