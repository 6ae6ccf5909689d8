"""Files that are written, changed and read by any door, level, tiers and host, while gc, scrub or evict runs.

A `World` is one store that several hosts use. `World.run` makes one draw, and `World.check` looks at the store at the
end. Half of the contents come from a small pool, so that draws share chunks, and write what others have deleted.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from support.mount_hand import Hand
from tierfs.cli import main
from tierfs.dcp import TierReader, TierWriter
from tierfs.format import keys
from tierfs.fs.filesystem import TierFileSystem
from tierfs.host.pending.levels import Level
from tierfs.objects.protocol import objects_below
from tierfs.session import TierOptions, init, open_store, parse_url
from tierfs.session import open as session_open
from tierfs.session.compose import open_tiers
from tierfs.store import Store, delete, evict, find, level_of, load, wait
from tierfs.store.maintenance.gc import GcOptions, collect
from tierfs.store.maintenance.scrub import scrub
from tierfs.store.read.reader import expand_rows

TIERS = {
    "none": {"ram": "0", "nvme": "0"},
    "ram": {"ram": "64MiB", "nvme": "0"},
    "nvme": {"ram": "0", "nvme": "256MiB"},
    "both": {"ram": "64MiB", "nvme": "256MiB"},
    "tight": {"ram": "4MiB", "nvme": "0"},
}
LEASE_S, GRACE_S = 1, 2
MARGIN_S = 2.1
"""A chunk counts as old after a grace and 2 s."""
RUNS_MAX = 5
"""A run finds shard files that no save names, the next ones delete them, their list, condemn and delete the chunks."""
SIZES = (1000, 100_000, 300_000, 5_000_000)


def _content(noise):
    """Return new bytes, or bytes that other draws save too."""
    return random.Random(noise.choice([noise.random(), 1, 2])).randbytes(noise.choice(SIZES))


class Fsspec:
    """The door ``fsspec``. A path is relative to the store."""

    def __init__(self, world, settings):
        self._root = world.root
        self._fs = TierFileSystem(
            target_protocol=world.protocol, target_options=world.options, skip_instance_cache=True, **settings
        )

    def _full(self, path):
        return f"{self._root}/{path}"

    def write(self, path, content):
        with self._fs.open(self._full(path), "wb") as file:
            file.write(content)

    def read(self, path):
        return self._fs.cat_file(self._full(path))

    def rename(self, path, target):
        self._fs.mv(self._full(path), self._full(target), recursive=True)

    def remove(self, path):
        self._fs.rm(self._full(path), recursive=True)

    def file(self, path):
        """Return the path of a file whose level is that of the content."""
        return path


class Dcp(Fsspec):
    """The door ``TierWriter``: a path is a checkpoint, whose one tensor has the content."""

    def __init__(self, world, settings):
        super().__init__(world, settings)
        self._url, self._settings = world.url, {**settings, world.protocol: world.options}

    def write(self, path, content):
        state = {"tensor": torch.frombuffer(bytearray(content), dtype=torch.uint8)}
        dcp.save(state, storage_writer=TierWriter(f"{self._url}/{path}", **self._settings), no_dist=True)

    def read(self, path):
        settings = {name: value for name, value in self._settings.items() if name != "ack"}
        reader = TierReader(f"{self._url}/{path}", **settings)
        size = reader.read_metadata().state_dict_metadata["tensor"].size
        state = {"tensor": torch.zeros(size, dtype=torch.uint8)}
        dcp.load(state, storage_reader=reader, no_dist=True)
        return state["tensor"].numpy().tobytes()

    def file(self, path):
        return f"{path}/.metadata"


class Mount:
    """The door ``mount``, without the kernel."""

    def __init__(self, world, settings):
        staging = Path(settings["state_dir"]) / "mount"
        staging.mkdir(exist_ok=True)
        self._hand = Hand(world.open(settings), staging)

    def write(self, path, content):
        folder = path.rpartition("/")[0]
        if folder and not self._hand.exists(folder):
            self._hand.tree.make_directory(*self._hand.parent(folder), 0o755)
        self._hand.write_file(path, content)

    def read(self, path):
        return self._hand.read_file(path)

    def rename(self, path, target):
        self._hand.tree.rename(*self._hand.parent(path), *self._hand.parent(target), 0)

    def remove(self, path):
        self._hand.tree.remove_file(*self._hand.parent(path))

    def file(self, path):
        return path


class Cli:
    """The door ``tierfs cp``, ``mv`` and ``rm``."""

    def __init__(self, world, settings):
        self._url, self._local = world.url, Path(settings["state_dir"]) / "local"
        self._environment = {
            "TIERFS_RAM": settings["ram"],
            "TIERFS_NVME": settings["nvme"],
            "TIERFS_STATE_DIR": settings["state_dir"],
        }

    def _run(self, *arguments):
        before = {name: os.environ.get(name) for name in self._environment}
        os.environ.update(self._environment)
        session_open.open_stores.clear()  # each command is a process of its own, which reads its environment
        try:
            assert main([str(argument) for argument in arguments]) == 0
        finally:
            session_open.open_stores.clear()
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)

    def write(self, path, content):
        self._local.write_bytes(content)
        self._run("cp", self._local, f"{self._url}/{path}")

    def read(self, path):
        self._run("cp", f"{self._url}/{path}", self._local)
        return self._local.read_bytes()

    def rename(self, path, target):
        self._run("mv", f"{self._url}/{path}", f"{self._url}/{target}")

    def remove(self, path):
        self._run("rm", f"{self._url}/{path}")

    def file(self, path):
        return path


DOORS = {"fsspec": Fsspec, "TierWriter": Dcp, "mount": Mount, "cli": Cli}
AXES = {
    "door": list(DOORS),
    "reader": list(DOORS),
    "level": ["staged", "local", "object"],
    "tiers": list(TIERS),
    "beside": ["nothing", "gc", "scrub", "evict"],
    "host": ["same", "other"],
    "change": ["none", "overwrite", "rename", "remove"],
}


class World:
    """One store, and what every acknowledged change has made of it.

    Args:
        url: The store, with ``tierfs::``. It is made with a lease of a second and a grace of two.
        base: A directory for the hosts' state.
        doors: Replaces doors of `DOORS`.
        **options: Options of the object tier's filesystem.
    """

    def __init__(self, url, base, doors=None, **options):
        self.url, self.options, self.base = url, options, base
        self.protocol, _, self.root = url.removeprefix("tierfs::").partition("://")
        self.doors = DOORS | (doors or {})
        init(url, lease_s=LEASE_S, grace_s=GRACE_S, options=options)
        self.bare = self.open({"ram": "0", "nvme": "0", "state_dir": str(base / "bare")})
        self.hosts: dict[str, Store] = {}
        self.contents: dict[tuple[str, str], bytes | None] = {}  # by door and path; None if it was removed
        self.ends = contextlib.ExitStack()
        """Ends the doors of a draw."""
        self._count = 0

    def count(self):
        """Return a number that no other call has returned."""
        self._count += 1
        return self._count

    def open(self, settings):
        tiers = TierOptions.from_mapping(settings, "a test")
        return open_store(replace(parse_url(self.url), tiers=tiers, options=self.options))[0]

    def run(self, draw):
        """Write a file, change it, and read it where its level promises it."""
        number = self.count()
        noise = random.Random(number)
        settings = self._settings(draw, "here")
        # A command waits for the object tier, whatever the level.
        level = Level.OBJECT if draw["door"] == "cli" else Level.parse(draw["level"])
        self.hosts[draw["tiers"] + draw["level"]] = store = self.open(settings)
        path, content = f"run{number % 3}/file{number}", _content(noise)
        with self.ends, self._beside(draw["beside"], store):
            door = self.doors[draw["door"]](self, settings)
            door.write(path, content)
            self._note(draw, path, content)
            match draw["change"]:
                case "overwrite":
                    content = _content(noise)
                    door.write(path, content)
                    self._note(draw, path, content)
                case "rename":
                    door.rename(path, f"{path}-moved")
                    self._note(draw, path, None)
                    path = f"{path}-moved"
                    self._note(draw, path, content)
                case "remove":
                    door.remove(path)
                    self._note(draw, path, None)
                    return
            assert draw["change"] == "rename" or level_of(store, door.file(path)) >= level
            if draw["host"] == "other" and level is not Level.OBJECT:
                wait(store, "", Level.OBJECT)
            if draw["host"] == "other":
                settings = self._settings(draw, "other")
            reader = draw["door"] if "TierWriter" in (draw["door"], draw["reader"]) else draw["reader"]
            assert self.doors[reader](self, settings).read(path) == content

    def _settings(self, draw, host):
        state = self.base / f"{draw['tiers']}-{host}"
        state.mkdir(mode=0o700, exist_ok=True)
        return {**TIERS[draw["tiers"]], "state_dir": str(state), "ack": draw["level"]}

    def _note(self, draw, path, content):
        self.contents[draw["door"], path] = content

    @contextlib.contextmanager
    def _beside(self, action, store):
        """Run gc, scrub or evict again and again on a thread."""
        stop, errors = threading.Event(), []

        def evict_all():
            for tier in ("ram", "nvme"):
                if store.tiers is not None and getattr(store.tiers, f"has_{tier}", True):
                    evict(store, "", tier)

        actions = {"gc": lambda: collect(self.bare), "scrub": lambda: scrub(self.bare), "evict": evict_all}

        def run():
            try:
                while action in actions and not stop.is_set():
                    actions[action]()
                    time.sleep(0.02)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        assert not errors, errors

    def close(self):
        """Close all local tiers of this process, and forget them."""
        for tiers in open_tiers.values():
            tiers.close()
        open_tiers.clear()
        session_open.open_stores.clear()

    def clear(self):
        """Remove all files, and let gc delete their chunks, which the processes still know."""
        self._settle()
        for entry in find(self.bare, ""):
            if not entry.is_directory:
                delete(self.bare, entry.path)
        self.contents = dict.fromkeys(self.contents)
        self.check()

    def check(self):
        """Check that the store has each acknowledged content, and that gc leaves nothing else."""
        self._settle()
        for _ in range(RUNS_MAX):
            self._check_contents()
            time.sleep(GRACE_S + MARGIN_S)
            collect(self.bare)
            self._check_contents()
            left = collect(self.bare, GcOptions(dry_run=True))
            counts = [tally.count for tally in (left.condemned, left.waiting, left.young, left.deleted)]
            if not any(counts):
                break
        assert not any(counts), left
        needed = {
            keys.chunk_key(name)
            for entry in find(self.bare, "")
            if entry.manifest is not None
            for row in expand_rows(self.bare, entry.manifest, entry.path)
            for name in (row.name, *row.bases)
        }
        assert {item.key for item in objects_below(self.bare.objects, keys.CHUNKS)} == needed

    def _settle(self):
        for store in self.hosts.values():
            wait(store, "", Level.OBJECT)

    def _check_contents(self):
        found = {entry.path for entry in find(self.bare, "") if not entry.is_directory}
        bare = {"ram": "0", "nvme": "0", "state_dir": str(self.base / "bare")}
        for (door, path), content in self.contents.items():
            if content is None:
                assert not {name for name in found if name == path or name.startswith(f"{path}/")}, path
            elif door == "TierWriter":
                assert Dcp(self, bare).read(path) == content, path
            else:
                assert load(self.bare, path) == content, path
