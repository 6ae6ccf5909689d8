"""Ranks that save checkpoints and die at a named step, and processes that inspect the result: see `test_dcp_kills`.

As a program it imports torch once and forks the requested processes, like ``tests/support/killing.py``. Forked
processes form a gloo group within moments.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support import killing

PATIENCE_S = 60
WORLD = 2
NUMBERS = 400_000
ABSENT = -2
MIXED = -1


def content(rank, seed):
    """Return a rank's state. It differs from the state of any other rank or save, in whole and in part."""
    import torch

    large = torch.arange(NUMBERS, dtype=torch.float32).mul_(seed * WORLD + rank + 1)
    return {f"large.{rank}": large, f"small.{rank}": torch.full((5,), 10.0 * seed + rank), "seed": seed}


# -- steps that the object tier sees -----------------------------------------------------------------------------------


def name_of(key, size):
    """Return the purpose of a put; ``None`` if it is no step of a save."""
    from tierfs.errors import FormatError
    from tierfs.format import keys
    from tierfs.format.manifest import TOMBSTONE_BYTES

    if key.startswith(keys.CHUNKS):
        return "chunk"
    try:
        *_, parent, name = ["", *keys.parse_record_key(key).split("/")]
    except FormatError:
        return None
    if parent == ".pending":
        return "forget" if size == TOMBSTONE_BYTES else "pending"
    return {".metadata": "root"}.get(name, "part")


def watch_puts(hook):
    """Call a hook before and after each put of this process that is a step of a save."""
    from tierfs.objects.wrappers.wrapper import WrappedObjects

    class Watched(WrappedObjects):
        def _around(self, request, send):
            step = name_of(request.key, request.size) if request.method == "put" else None
            if step is None:
                return send()
            hook(f"before put.{step}")
            answer = send()
            hook(f"after put.{step}")
            return answer

    opened = importlib.import_module("tierfs.session.open")
    connect = opened.connect
    opened.connect = lambda *arguments: Watched(connect(*arguments))


# -- the processes -----------------------------------------------------------------------------------------------------


def options_of(spec, ack="staged"):
    if spec.get("bare"):
        return {"ack": "object", "ram": "0", "nvme": "0"}
    given = {"ack": ack, "ram": spec["ram"], "nvme": spec["nvme"], "state_dir": spec["state"]}
    return {**given, "timeout": PATIENCE_S}


def rank(spec):
    """Run the operations in order and report each outcome."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from tierfs.dcp import TierWriter
    from tierfs.session.tiers import Launcher

    here, hook = spec["rank"], killing.Hook(spec)
    watch_puts(hook)
    if not spec.get("launches"):
        Launcher.launch = lambda self: None  # the test starts flushers
    torch.set_num_threads(1)
    local = WORLD if spec["is_one_host"] else 1
    os.environ |= {"RANK": str(here), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(local)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    class Writer(TierWriter):
        """Report the steps of a save to the hook."""

        def stage(self, state_dict):
            return self._around("stage", lambda: super(Writer, self).stage(state_dict))

        def write_data(self, plan, planner):
            return self._around("write_data", lambda: super(Writer, self).write_data(plan, planner))

        def finish(self, metadata, results):
            self._around("finish", lambda: super(Writer, self).finish(metadata, results))
            killing.say(spec, finished=number)
            hook("said finish")

        def _around(self, step, do):
            tiers = self._address.open(write=True)[0].tiers
            tiers._fault = tiers.writer._fault = hook
            hook(f"before {step}")
            answer = do()
            hook(f"after {step}")
            return answer

    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec['meeting']}",
        rank=here,
        world_size=WORLD,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    killing.say(spec, joined=here)
    writers = {}
    for number, (what, *arguments) in enumerate(spec["operations"]):
        if what == "await":
            killing.await_file(arguments[0])
            continue
        name, ack, *rest = arguments
        url = f"{spec['door']}/{name}"
        writer = writers.setdefault((name, ack), Writer(url, **options_of(spec, ack)))
        killing.say(spec, begin=number)
        try:
            if what == "wait":
                writer.wait("object", timeout=rest[0])
            elif what == "save":
                dcp.save(content(here, rest[0]), storage_writer=writer)
            else:
                dcp.async_save(content(here, rest[0]), storage_writer=writer).result()
        except Exception as error:
            killing.say(spec, failed=number, error=type(error).__name__, message=str(error)[:2000])
        else:
            killing.say(spec, done=number)
        hook("between")
    if "leave" in spec:
        killing.await_file(spec["leave"])
    os._exit(0)  # skips gloo's exit, which would wait for the other rank


def flusher(spec):
    watch_puts(killing.Hook(spec))
    killing.flusher(spec)


def waiter(spec):
    """Wait, as another process of a host, for complete checkpoints, and report the problems."""
    from tierfs.dcp import TierWriter
    from tierfs.session.tiers import Launcher

    if not spec.get("launches"):
        Launcher.launch = lambda self: None
    watch_puts(killing.Hook(spec))
    problems = {}
    for name in spec["names"]:
        try:
            TierWriter(f"{spec['door']}/{name}", **options_of(spec)).wait("object", timeout=spec["timeout"])
        except Exception as error:
            problems[name] = [type(error).__name__, str(error)]
    killing.say(spec, problems=problems)
    os._exit(0)


def loader(spec):
    """Load checkpoints, with or without local tiers, and report each one's seed, its sequence, and pending saves."""
    import torch

    from tierfs.dcp.address import Address
    from tierfs.session.tiers import Launcher

    torch.set_num_threads(1)
    if not spec.get("launches"):
        Launcher.launch = lambda self: None
    watch_puts(killing.Hook(spec))
    found = {}
    for name in spec["names"]:
        address = Address.of(f"{spec['door']}/{name}", options_of(spec))
        seed, sequence = load(address.url, spec)
        found[name] = {"seed": seed, "sequence": sequence, "waiting": announced(*address.open())}
    killing.say(spec, found=found)
    os._exit(0)


def load(url, spec):
    """Return the seed and the sequence number of the save in a checkpoint, after a check of every byte."""
    import torch
    import torch.distributed.checkpoint as dcp

    from tierfs.dcp import TierLoadPlanner, TierReader
    from tierfs.errors import NotFoundError

    state = {"seed": -1}
    for number in range(WORLD):
        state |= {key: torch.zeros_like(value) for key, value in content(number, 0).items() if key != "seed"}

    class Onlooker(TierReader):
        """Do not publish checkpoints that are complete."""

        def _commit(self, store, directory):
            return []

    reader = (Onlooker if spec.get("looks_on") else TierReader)(url, **options_of(spec))
    try:
        reader.read_metadata()
    except NotFoundError:
        return ABSENT, 0
    dcp.load(state, storage_reader=reader, planner=TierLoadPlanner(), no_dist=True)
    seed = state["seed"]
    expected = {}
    for number in range(WORLD):
        expected |= content(number, seed)
    same = all(
        value == state[key] if key == "seed" else torch.equal(value, state[key]) for key, value in expected.items()
    )
    return (seed if same else MIXED), reader._note.sequence


def announced(store, path):
    """Return the sequence and the missing files of each announced save, without the code that commits saves."""
    import json

    from tierfs.errors import NotFoundError
    from tierfs.store import find
    from tierfs.store import load as load_file

    # List the announcements first: a file that arrives in between does not count as missing.
    documents = []
    for entry in find(store, f"{path}/.pending"):
        with contextlib.suppress(NotFoundError):  # already forgotten
            if not entry.is_directory:
                documents.append(json.loads(bytes(load_file(store, entry.path))))
    there = {entry.path.rpartition("/")[2] for entry in find(store, path) if not entry.is_directory}
    return sorted([document["sequence"], sorted(set(document["files"]) - there)] for document in documents)


def main():
    # Before the first fork, because torch takes seconds to import.
    import tierfs.dcp.planner
    import tierfs.dcp.reader
    import tierfs.dcp.writer
    import tierfs.session.open  # noqa: F401

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    killing.ROLES |= {"rank": rank, "flusher": flusher, "waiter": waiter, "loader": loader}
    killing.main()


if __name__ == "__main__":
    main()
