"""What `codec.py` measures of links: how long a late state takes from `staged` to the object tier, with codecs and without.

A state is saved as one safetensors file, of which each tensor is a chunk of its own, 1 to 2 MiB here; and as a checkpoint of DCP's, whose chunks
are of 16 MiB whatever the size of the tensors is, as those of files with large tensors are.

Run as a program by `report`, in a network of its own whose loopback is the link: ``SNAPSHOTS ROOT STATES ROUNDS``. The server is nginx
with its files on tmpfs.
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
# Whether by DCP, and with which options.
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
    """A store, and states that are staged, then flushed there by the flusher's process; each has the store for itself.

    Args:
        server: Where to.
        name: Of the store.
        size: Of a state in bytes.
        root: Of the state directory.
        dcp: Whether states are saved as checkpoints.
        options: Of the filesystem.
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
        """Seconds from when a state is staged until the object tier has it, the flusher's CPU seconds, bytes stored."""
        # A directory of its own, so that nothing is the parent of anything.
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
        if (
            check and self._writer is None
        ):  # a checkpoint takes reads that nginx cannot answer; what `codec.py` does with sets loads them
            self._check(f"{run}/{FILE}", state)
        self._server.empty(f"{self._name}/.tierfs/chunks")
        return {"seconds": seconds, "cpu": used, "stored": stored / bytes_of(state)}

    def stop(self) -> None:
        """End the flusher."""
        end_flusher(self._fs.status(self._path))

    def _check(self, file: str, state: State) -> None:
        elsewhere = str(self._root / f"{self._name}-elsewhere")
        options: dict[str, Any] = {"ram": 0, "nvme": 0, "state_dir": elsewhere, "s3": self._server.options()}
        fs, path = fsspec.url_to_fs(f"{self._url}/{file}", **options)
        loaded = safetensors.torch.load(fs.cat(path))
        assert all(same(loaded[name], state[name]) for name in state), "what was loaded is not what was saved"


def states(snapshots: Path, count: int) -> State:
    """The last few states of a run as one that is larger."""
    steps = steps_of(snapshots / RUN)[LATE:][:count]
    return {f"{step.name}.{name}": tensor for step in steps for name, tensor in load(step).items()}


def moved(state: State, count: int) -> State:
    """A state whose tensors are turned by so many elements: nothing of it was stored before, its statistics are the same."""
    return {name: tensor.flatten().roll(count) for name, tensor in state.items()}


def report(snapshots: Path, root: Path, count: int, rounds: int) -> dict[str, Any]:
    """Everything about links."""
    program = [sys.executable, Path(__file__), snapshots, root, str(count), str(rounds)]
    done = subprocess.run(
        shaped_network.command(program), env=CREDENTIALS | os.environ, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Measure, in a network of one's own, and print what was found."""
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
                        rows[limit].clear()  # the flusher of a long-running job knows its link
                    # Who is first takes turns.
                    for way in list(flushes)[:: 1 if number % 2 else -1]:
                        rows[limit].note(way, **flushes[way](moved(state, next(turned)), check=False))
        finally:
            for flush in flushes.values():
                flush.stop()
    medians = {limit: row.medians() for limit, row in rows.items()}
    print(json.dumps({"bytes": bytes_of(state), "rows": medians}))


if __name__ == "__main__":
    main()
