"""The processes of `soak`: workers that do one operation after another, and commands of tierfs.

As a program it forks the requested processes, as ``tests/support/killing.py`` does. ``--torch`` imports torch first.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import fsspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from struck_objects import StruckObjects
from support import killing
from support.promises import digest_of

from tierfs.clock import SystemClock
from tierfs.errors import ConflictError
from tierfs.format import keys
from tierfs.objects import registry
from tierfs.session import open_store, parse_url, settings
from tierfs.session.open import open_bare
from tierfs.session.tiers import Launcher
from tierfs.store import discard_conflict, stat
from tierfs.testing import PlannedTcpFault, TcpFault

NUMBERS = 20_000  # of a tensor
PATIENCE_S = 40
ATTEMPTS = 4
TCP_FAULTS = (
    PlannedTcpFault(TcpFault.RESET),
    PlannedTcpFault(TcpFault.RESET, at=0),
    PlannedTcpFault(TcpFault.RESET, side="request"),
    PlannedTcpFault(TcpFault.TRUNCATED),
    PlannedTcpFault(TcpFault.UNAVAILABLE, side="request"),
    # Nothing protects the bytes of a listing.
    PlannedTcpFault(
        TcpFault.BIT_FLIP, body_only=True, aim=lambda method, path: method == "GET" and "list-" not in path
    ),
    PlannedTcpFault(TcpFault.BIT_FLIP, side="request", body_only=True, aim=lambda method, _: method == "PUT"),
)


def use_endpoint(url):
    """Let the clients of S3 in this process use this server, if there is one."""
    if url:
        os.environ |= {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
        os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}


def strike_objects(spec):
    noise, local = random.Random(spec["seed"]), registry.LocalObjects
    lies = spec["lies"] and not spec.get("version")
    struck = {"probability": spec["faults"], "notes": spec["notes"], "outage": spec["outage"], "lies": lies}
    registry.LocalObjects = lambda path: StruckObjects(local(path), noise, **struck)


# -- operations --------------------------------------------------------------------------------------------------------


class Worker:
    """One process that uses the store through its doors."""

    def __init__(self, spec):
        self.spec = spec

    def options(self, level):
        if self.spec["bare"]:
            return {"ack": "object", "ram": "0", "nvme": "0", "state_dir": self.spec["state"]}
        tiers = {name: self.spec[name] for name in ("ram", "nvme")}
        return {"ack": level, "state_dir": self.spec["state"], "timeout": PATIENCE_S, **tiers}

    @functools.cache  # noqa: B019 - it lives as long as the process
    def fs(self, level="staged"):
        return fsspec.url_to_fs(f"tierfs::{self.spec['url']}", **self.options(level))

    def at(self, name, level="staged"):
        fs, root = self.fs(level)
        return fs, f"{root}{name}" if name.startswith("/") else f"{root}/{self.spec['directory']}/{name}"

    def write(self, name, content, level, door):
        data = killing.content(*content)
        if door == "mount":
            place = Path(self.spec["mount"], self.spec["directory"], name)
            place.parent.mkdir(parents=True, exist_ok=True)
            part = place.with_name(f"{place.name}.part")
            part.write_bytes(data)
            os.replace(part, place)
            return
        fs, place = self.at(name, level)
        if door == "pipe":
            fs.pipe_file(place, data)
            return
        with fs.open(place, "wb") as file:
            for at in range(0, len(data), 200_000):
                file.write(data[at : at + 200_000])

    def change(self, do, name="", to="", level="staged", tier="", everything=False):
        """Call one method of the filesystem."""
        fs, place = self.at(name, level)
        match do:
            case "move":
                fs.mv(place, self.at(to)[1])
            case "copy":
                fs.cp_file(place, self.at(to)[1])
            case "remove":
                fs.rm_file(place)
            case "wait":
                fs.wait(self.fs()[1] if everything else place, level, timeout=PATIENCE_S)
            case "ack":
                return fs.ack(place)
            case "evict" | "prefetch":
                getattr(fs, do)(place, tier=tier)
            case "listed":
                return [each[len(place) :] for each in fs.find(place)]  # `exists` may answer blindly in an outage
        return None

    def read(self, paths, door="cat", attempts=ATTEMPTS):
        """Return the digest of each path's content, or None. An error is repeated, then returned as text."""
        return {path: self.asked(lambda path=path: digest_of(self.content(path, door)), attempts) for path in paths}

    def asked(self, question, attempts=ATTEMPTS):
        for attempt in range(attempts):
            time.sleep(0.05 * 4**attempt if attempt else 0)
            try:
                return question()
            except FileNotFoundError:
                return None
            except BaseException as error:  # torch's own error is no Exception
                if "NotFoundError: no checkpoint" in str(error):
                    return None
                told = f"error: {type(error).__name__}: {error}"
        return told[:3000]

    def content(self, path, door):
        fs, root = self.fs()
        if door == "cat":
            return fs.cat_file(f"{root}/{path}")
        with fs.open(f"{root}/{path}", "rb") as file:
            return b"".join(iter(lambda: file.read(150_000), b""))

    def discard(self, path=None):
        """Discard a pending change, or all conflicts of the host. Return the paths."""
        fs, root = self.fs()
        paths = [path] if path is not None else sorted({each["path"] for each in fs.status(root)["conflicts"]})
        for each in paths:
            discard_conflict(open_store(parse_url(self.spec["url"]))[0], each)
        return paths

    def chunks(self, name):
        """Return the digests of a file's chunks in the object tier, with their keys, and the key of its record."""
        path = f"{self.spec['directory']}/{name}"
        manifest = stat(open_bare(parse_url(self.spec["url"]))[0], path).manifest
        rows = [] if manifest is None else manifest.rows
        found = [[row.name.digest.hex(), keys.chunk_key(row.name)] for row in rows]
        return {"chunks": found, "record": keys.record_key(path)}

    # -- checkpoints

    def state(self, number):
        import torch

        large = torch.arange(NUMBERS, dtype=torch.float32).mul_(number + 1)
        return {"large": large, "small": torch.full((5,), float(number)), "number": number}

    def save(self, name, number, level):
        from torch.distributed import checkpoint as dcp

        from tierfs.dcp import TierWriter

        place = f"tierfs::{self.spec['url']}/{self.spec['directory']}/{name}"
        dcp.save(self.state(number), storage_writer=TierWriter(place, **self.options(level)))

    def load(self, paths, door):
        """Return the number of the save that each checkpoint holds, None, or -1 if its parts do not fit together."""
        return {path: self.asked(lambda path=path: self.loaded(path)) for path in paths}

    def loaded(self, path):
        from torch.distributed import checkpoint as dcp

        from tierfs.dcp import TierReader

        place, state = f"tierfs::{self.spec['url']}/{path}", self.state(0)
        dcp.load(state, storage_reader=TierReader(place, **self.options("staged")))
        wanted = self.state(state["number"])
        right = all(bool((state[name] == wanted[name]).all()) for name in ("large", "small"))
        return state["number"] if right else -1

    def train(self, first, count, level):
        """Train with a `Manager`: restore, then save some steps. Tell the restored step and each saved one."""
        import torch

        from tierfs.train import Every, Manager, TrainState

        model = torch.nn.Linear(40, 40)
        optimizer = torch.optim.AdamW(model.parameters())
        state = TrainState(model=model, optimizer=optimizer, scheduler=None, dataloader=None)
        place = f"tierfs::{self.spec['url']}/{self.spec['directory']}/trained"
        options = {**self.options(level), "save": [Every(steps=1)], "keep": [Every(steps=5)], "on_error": "raise"}
        with Manager(place, **options) as manager:
            restored = manager.restore(state)
            found = None if restored is None else restored.step
            if found is not None and not bool((model.weight == float(found)).all()):
                found = -1
            self.say(restored=found)
            for step in range(max(first, 0 if found is None else found + 1), first + count):
                with torch.no_grad():
                    model.weight.fill_(float(step))
                if (handle := manager.step(step, state)) is not None:
                    handle.wait(level, PATIENCE_S)
                    self.say(saved=step)

    # -- answers

    def say(self, **words):
        self.socket.send(json.dumps(words).encode())

    def serve(self):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(self.spec["socket"])
        while data := self.socket.recv(1 << 20):
            request, begun = json.loads(data), time.monotonic()
            try:
                do = getattr(self, request["do"], None)
                answer = {"done": do(**request["with"]) if do else self.change(request["do"], **request["with"])}
            except BaseException as error:
                answer = {"error": type(error).__name__, "message": str(error)[:2000]}
                answer["conflict"] = isinstance(error, ConflictError) or "ConflictError" in str(error)
            self.say(**answer, seconds=time.monotonic() - begun)


def command(spec):
    """Run a command of tierfs."""
    from tierfs.cli.app import main

    for name in ("tierfs", "tierfs.cli.commands.flusher", "tierfs.session.tiers") if spec.get("version") else ():
        importlib.import_module(name).__version__ = spec["version"]
    sys.exit(main(spec["words"]))


def prepared(role):
    def run(spec):
        faulthandler.register(signal.SIGUSR1)
        Launcher.launch = lambda self: None  # the driver starts the flushers
        settings.is_durable = lambda _: True  # as in `killing.become`
        os.environ |= {f"TIERFS_{name.upper()}": "0" if spec["bare"] else spec[name] for name in ("ram", "nvme")}
        use_endpoint(spec["endpoint"])
        if spec["namespace"]:
            with open(spec["namespace"]) as file:
                assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
            os.environ |= {"TIERFS_PEERS": "1", "TIERFS_PEER_LISTEN": spec["address"]}
        if not spec["bare"] or spec["lies"]:
            strike_objects(spec)
        ahead_ns, now_ns = spec["clock_s"] * 10**9, time.time_ns
        SystemClock.now_ns = lambda self: now_ns() + ahead_ns * (int(time.monotonic() / 3) % 2)  # it jumps
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            role(spec)

    return run


killing.ROLES.update(worker=prepared(lambda spec: Worker(spec).serve()), command=prepared(command))


if __name__ == "__main__":
    # Import here everything that the forked processes need.
    names = ["fsspec.implementations.local", "tierfs.cli.commands.flusher", "tierfs.flusher.engine", "xxhash"]
    names += ["tierfs.flusher.server", "tierfs.mount.process", "tierfs.fs.filesystem", "tierfs.session.tiers"]
    if "--s3" in sys.argv:
        names += ["tierfs.objects.backends.s3", "s3fs", "botocore.session"]
    if "--torch" in sys.argv:
        names += ["torch.distributed.checkpoint", "tierfs.dcp", "tierfs.train"]
    for name in names:
        importlib.import_module(name)
    killing.main()
