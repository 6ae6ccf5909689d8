"""Two hosts with local tiers share one store, with every kind of crash and failure.

A state machine interleaves the steps of trainers and flushers. After each step it compares the tiers with a model:
the changes that were made, the change that each one replaces, and the level that it has reached. The checks are those
of DESIGN, "What it promises, per level".

The run is the same each time. For a long run with other seeds::

    TIERFS_STATEFUL_EXAMPLES=5000 TIERFS_STATEFUL_SEED=7 pytest tests/flusher/test_tiers_stateful.py --timeout=0
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import random
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from support.opened import SHARED
from support.stepped_hosts import (
    CHUNK,
    Applied,
    InlineTransfers,
    SteppedClock,
    SteppedHost,
    Trainer,
    store_on,
)

from tierfs import buffers
from tierfs.digest import DigestKind
from tierfs.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    NotFoundError,
    ReadOnlyError,
    StoreError,
    TierfsError,
)
from tierfs.flusher import queue
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.format.keys import ChunkName
from tierfs.format.manifest import Manifest
from tierfs.host import host as local_host
from tierfs.host.nvme import batch as nvme_batch
from tierfs.host.pending.levels import Level
from tierfs.host.slab import pool, segment_file
from tierfs.host.slab import segment as slab
from tierfs.host.write import ahead
from tierfs.objects.protocol import Update
from tierfs.store import (
    WriteMode,
    Writer,
    copy,
    delete,
    discard_conflict,
    evict,
    load,
    prefetch,
    rename,
    stat,
)
from tierfs.store import wait as wait_for
from tierfs.store.local_changes import level_of
from tierfs.store.read.reader import open_entry
from tierfs.testing import Fault
from tierfs.threads import transfers

EXAMPLES = int(os.environ.get("TIERFS_STATEFUL_EXAMPLES", "0"))
SEED = os.environ.get("TIERFS_STATEFUL_SEED")
INLINE = 256

CUT_IN_CHUNKS = (
    "buffers",
    "host.write.writer",
    "host.slab.pool",
    "store.write.sink",
    "store.write.staging",
    "store.write.writer",
)
PATHS = ("a", "b", "d/a", "d/b", "d/e/a")
LEVELS = (Level.STAGED, Level.LOCAL, Level.OBJECT)
SIZES = (0, 10, 5000, CHUNK, 2 * CHUNK + 4000, 4 * CHUNK)

paths = st.sampled_from(PATHS)
hosts = st.integers(0, 1)
processes = st.integers(0, 1)
levels = st.sampled_from([Level.STAGED, Level.STAGED, Level.STAGED, *LEVELS])
sizes = st.sampled_from(SIZES)


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of a host's tiers."""

    ram: int = 16 << 20
    nvme: int = 0
    passed_by_over: int = 1 << 30
    keeps_reads: bool = True
    passes_by: bool = False


SETUPS = {
    "both": Setup(nvme=8 << 20),
    "both, little": Setup(ram=600 << 10, nvme=12 * (64 << 10), passed_by_over=3 * CHUNK),
    "nvme only": Setup(nvme=8 << 20, keeps_reads=False),
    "ram only": Setup(),
    "ram only, little": Setup(ram=600 << 10),
    "beside the object tier": Setup(keeps_reads=False, passes_by=True),
}


@pytest.fixture(autouse=True, scope="module")
def small_and_repeatable():
    """Use chunks of a few pages and no threads. Hypothesis draws everything random."""
    with pytest.MonkeyPatch.context() as patch:
        for name in CUT_IN_CHUNKS:
            patch.setattr(importlib.import_module(f"tierfs.{name}"), "CHUNK_BYTES", CHUNK)
        patch.setattr(importlib.import_module("tierfs.store.read.reader"), "PIECE_BYTES_MAX", CHUNK)
        patch.setattr(pool, "FIRST_DATA_BYTES", 4 * CHUNK)
        patch.setattr(pool, "CHUNKS_DATA_BYTES", 4 * CHUNK)
        patch.setattr(importlib.import_module("tierfs.store.write.sink"), "SLOT_BYTES_MIN", 4096)
        patch.setattr(pool, "SMALL_BYTES", 4 * CHUNK)
        patch.setattr(transfers, "shared", InlineTransfers())
        patch.setattr(ahead, "AHEAD_BYTES_MIN", 2 * CHUNK)
        patch.setattr(queue, "LARGE_BYTES_MIN", 2 * CHUNK)
        # Housekeeping, which has arguments, would never end on the thread of the test.
        patch.setattr(ahead, "start_daemon", lambda task, *with_, name: name if with_ else task() or name)
        patch.setattr(buffers.buffers, "shared", buffers.Buffers())
        patch.setattr(buffers, "POOLED_PART", 1 << 30)
        logger = logging.getLogger("tierfs")
        level = logger.level
        logger.setLevel(logging.CRITICAL)  # a logged error keeps its frames alive, and their open files
        yield
        logger.setLevel(level)


@dataclass(eq=False)
class Change:
    """A change of one path in the model."""

    write_id: bytes
    path: str
    content: bytes | None
    base: bytes | None
    host: int
    number: int
    staged: bool
    after: bytes | None = None
    names: tuple[bytes, ...] = ()
    reached: Level = Level.NONE
    state: str = "pending"

    def __repr__(self) -> str:
        size = "gone" if self.content is None else f"{len(self.content)} bytes"
        return f"<{self.number}: {self.path} {size} on host {self.host}, {self.state}, {self.reached.label}>"


@pytest.fixture(autouse=True)
def closed(nothing_left):
    """Collect garbage after each test, before `nothing_left` checks."""
    yield
    gc.collect()


class TieredHosts(RuleBasedStateMachine):
    writers = Bundle("writers")
    examples = 0

    # -- the world -----------------------------------------------------------------------------------------------------

    @initialize(
        number=st.integers(0, 2**32), first=st.sampled_from(sorted(SETUPS)), second=st.sampled_from(sorted(SETUPS))
    )
    def start(self, number, first, second):
        self.random = random.Random(number)
        self.patch = pytest.MonkeyPatch()
        self.clock = SteppedClock()
        secrets = SimpleNamespace(
            token_hex=lambda size: self.random.randbytes(size).hex(), token_bytes=self.random.randbytes
        )
        for module in (local_host, segment_file, nvme_batch):
            self.patch.setattr(module, "secrets", secrets)
        self.patch.setattr(slab, "time", SimpleNamespace(monotonic=self.clock.monotonic))
        self.directory = Path(tempfile.mkdtemp(prefix="tierfs-stateful-", dir=SHARED))
        self.directory.chmod(0o700)
        self.changes = {}
        self.history = {}
        self.touched = set()
        self.opened = []
        self.versions = {}
        self.doings = []
        self.made = 0
        self.tier = Applied(f"/tiered-hosts-{uuid.uuid4().hex}", self.applied)
        self.uuid = "0" * 32
        self.descriptor = Descriptor(self.uuid, 0, DigestKind.XXH3_128, self.tier.capabilities, inline_bytes=INLINE)
        self.tier.put(keys.DESCRIPTOR, [self.descriptor.encode()])
        self.oracle = self.open(self.tier)
        (self.directory / "shm").mkdir()
        self.hosts = [
            SteppedHost(self, number, SETUPS[name], self.directory, self.directory / "shm")
            for number, name in enumerate((first, second))
        ]
        self.clock.meanwhile = self.others_work

    def open(self, objects, tiers=None):
        return store_on(objects, self, tiers)

    def others_work(self):
        for host in self.hosts:
            host.work()

    def teardown(self):
        if not hasattr(self, "hosts"):
            return
        try:
            self.settle_down()
        finally:
            for host in self.hosts:
                host.close()
            self.hosts = []
            self.tier.erase()
            self.patch.undo()
            shutil.rmtree(self.directory)
            TieredHosts.examples += 1
            if TieredHosts.examples % 20 == 0:  # closes the descriptors in reference cycles
                gc.collect()

    # -- callbacks that keep the model up to date ----------------------------------------------------------------------

    def sealed(self, host, draft):
        base = draft.base.write_id
        if base is None and draft.base.version is not None:
            base = self.versions[draft.base.version]
        self.note(draft.record, draft.path, base, host.number, staged=True, after=draft.after, names=draft.names)

    def sent(self, path, record, mode):
        if record.write_id not in self.changes:
            base = self.versions[mode.version] if isinstance(mode, Update) else None
            self.note(record, path, base, None, staged=False)

    def note(self, record, path, base, host, *, staged, after=None, names=()):
        doing = self.doings[-1]
        assert path in doing.contents, f"{path} was changed by {doing}"
        content = doing.contents[path]
        assert (content is None) == (not isinstance(record, Manifest))
        if not doing.blind():
            assert base == doing.seen[path], f"{path}: based on what was not there"
        self.made += 1
        change = Change(record.write_id, path, content, base, doing.host, self.made, staged, after, names)
        self.changes[record.write_id] = change
        doing.changes[path] = change
        self.touched.add(path)
        if staged:
            change.reached = Level.STAGED

    def applied(self, path, record, version):
        change = self.changes[record.write_id]
        told = self.history.setdefault(path, [])
        self.versions[version] = record.write_id
        assert change.write_id not in told, f"{change} was published twice"
        assert change.base == self.standing(path), f"{change} replaced what it had not seen"
        assert change.state in {"pending", "lost"}, f"{change} was published after all"
        overtaken = [other for other in self.changes.values() if self.is_behind(change, other)]
        assert not overtaken, f"{change} was published before {overtaken}"
        told.append(change.write_id)
        change.state, change.reached = "published", Level.OBJECT
        assert self.content_of(self.oracle, path) == change.content, f"{change} was published with other bytes"

    def standing(self, path):
        """Return the write id of a path's record in the object tier, or None."""
        told = self.history.get(path)
        return told[-1] if told else None

    def is_behind(self, change, other):
        """Return whether a change must wait for another one."""
        if not change.staged or not other.staged or other.host != change.host or other.number >= change.number:
            return False
        directory = change.path.rpartition("/")[0]
        near = not directory or other.path.startswith(f"{directory}/")
        return other.state in {"pending", "conflict"} and (near or other.write_id == change.after)

    @staticmethod
    def content_of(store, path):
        try:
            return load(store, path)
        except NotFoundError:
            return None

    def seen(self, host, path, states=None):
        """Return the write id and the content that a host must see at a path."""
        states = states or self.hosts[host].observer.look().states
        mine = [
            change
            for change in self.changes.values()
            if change.path == path and change.host == host and states.get(change.write_id, set()) & {"ram", "nvme"}
        ]
        if mine:
            newest = max(mine, key=lambda change: change.number)
            return newest.write_id, newest.content
        write_id = self.standing(path)
        return write_id, None if write_id is None else self.changes[write_id].content

    def doing(self, host, trainer, contents, seen=None):
        """Return a note of an operation: its host and trainer, and the content that each path is to get."""
        blind = trainer.tiers.counters["blind_writes"]
        return SimpleNamespace(
            host=host,
            trainer=trainer,
            contents=contents,
            seen={path: self.seen(host, path)[0] for path in contents} if seen is None else seen,
            blind=lambda: trainer.tiers.counters["blind_writes"] > blind,
            changes={},
            before=self.troubles(host),
            is_stale=False,
        )

    def troubles(self, host):
        """Return counts of everything that may have failed between a host and the object tier."""
        here = self.hosts[host]
        return (here.link.refused, len(here.faulty.fired), here.deaths, here.unreachable, here.nvme_trouble)

    def was_troubled(self, doing):
        here = self.hosts[doing.host]
        still = here.link.trouble or here.faulty.pending or here.unreachable or here.nvme_trouble
        return bool(still) or self.troubles(doing.host) != doing.before

    def has_conflict(self, host):
        return any("conflict" in states for states in self.hosts[host].observer.look().states.values())

    def attempt(self, doing, operation, level):
        """Run an operation. Return whether it succeeded."""
        failure = None
        self.doings.append(doing)
        try:
            operation()
        except (NotFoundError, AlreadyExistsError):
            raise
        except (TierfsError, TimeoutError) as error:
            failure = error
        finally:
            self.doings.pop()
        if failure is not None:
            assert self.is_excused(doing, failure), f"nothing was in its way: {failure!r}"
            return False
        for path in doing.contents:
            assert path in doing.changes, f"{path} was not changed"
            self.check_reached(doing.changes[path], level)
        return True

    def is_excused(self, doing, failure):
        """Return whether an injected fault or a conflict explains this failure of an operation."""
        if isinstance(failure, (ConflictError, TimeoutError)) and self.has_conflict(doing.host):
            return True
        if isinstance(failure, ConflictError) and doing.is_stale:
            return True
        if isinstance(failure, CapacityError) and self.hosts[doing.host].setup.ram < 1 << 20:
            return True
        expected = (ConflictError, TimeoutError, CapacityError, ReadOnlyError, StoreError)
        return isinstance(failure, expected) and self.was_troubled(doing)

    # -- invariants ----------------------------------------------------------------------------------------------------

    def in_object_tier(self, name):
        with contextlib.suppress(NotFoundError):
            self.tier.head(keys.chunk_key(ChunkName(name[1:])))
            return True
        return False

    def check_reached(self, change, level):
        """Check that a change has reached the level that was reported."""
        if change.state == "published":
            return
        assert level < Level.OBJECT, f"{change} is not in the object tier"
        look = self.hosts[change.host].observer.look()
        states = look.states.get(change.write_id, set())
        if level is Level.LOCAL:
            assert "nvme" in states, f"{change} is not in the nvme tier"
            for name in look.drafts[change.write_id].names:
                assert name in look.nvme or self.in_object_tier(name), f"{change}: a chunk is in no durable tier"
        assert states & {"ram", "nvme"}, f"{change} is nowhere"
        change.reached = max(change.reached, level)

    def is_conflict_due(self, change):
        """Return whether the base of a change, or the change it follows, is missing or gone."""
        after = self.changes.get(change.after)
        if after is not None and after.state in {"conflict", "lost", "discarded"}:
            return True
        if change.base == self.standing(change.path):
            return False
        base = self.changes.get(change.base)
        return base is None or base.state not in {"pending", "published"} or base.write_id in self.history[change.path]

    @invariant()
    def nothing_is_lost_or_wrong(self):
        if not hasattr(self, "hosts"):
            return
        for host in self.hosts:
            look = host.observer.look()
            for change in sorted(self.changes.values(), key=lambda change: change.number):
                if change.host != host.number or not change.staged:
                    continue
                states = look.states.get(change.write_id, set())
                if "conflict" in states and change.state == "pending":
                    assert self.is_conflict_due(change), f"{change} is kept as a conflict with nobody"
                    change.state = "conflict"
                if change.state in {"pending", "conflict"}:
                    assert states, f"{change} is lost"
                    for name in look.drafts[change.write_id].names:
                        safe = name in look.ram or name in look.nvme or self.in_object_tier(name)
                        assert safe, f"{change}: a chunk of it is nowhere, or may be evicted"
            for path in self.touched:
                assert self.content_of(host.observer.store, path) == self.seen(host.number, path, look.states)[1], path
        for path in self.touched:
            write_id = self.standing(path)
            content = None if write_id is None else self.changes[write_id].content
            assert self.content_of(self.oracle, path) == content, f"{path} in the object tier"

    def settle_down(self):
        """After the last failure, check that every change reaches its target and that all room is released."""
        for host in self.hosts:
            self.heal(host)
        for opened in self.opened:
            if opened.trainer.alive and not opened.closed:
                with contextlib.suppress(TierfsError):
                    opened.writer.abort()
        for host in self.hosts:
            self.finish(host)
            for trainer in host.trainers:
                trainer.crash()
            if host.flusher is not None:
                host.bury_flusher()
            host.trainers = [Trainer(host)]
            self.finish(host)
            while kept := [
                change for change in self.changes.values() if change.host == host.number and change.state == "conflict"
            ]:
                with pytest.raises(ConflictError):
                    wait_for(host.trainers[0].store, kept[0].path, Level.OBJECT, 60.0)
                self.give_conflict_up(host.number, 0, kept[0].path)
                assert kept[0].state == "discarded", f"{kept[0]} cannot be given up"
                self.finish(host)
            pending = [change for change in self.changes.values() if change.host == host.number]
            assert not [change for change in pending if change.staged and change.state in {"pending", "conflict"}]
            assert host.flusher.is_idle()

    def finish(self, host):
        """Let a flusher work until there is nothing to do."""
        idle = 0
        for _ in range(600):
            idle = 0 if host.work() else idle + 1
            if idle > 10:
                break
            if idle:
                self.clock.pass_time(10)
        else:
            raise AssertionError("the flusher never comes to rest")
        self.nothing_is_lost_or_wrong()
        for change in self.changes.values():
            if change.host == host.number and change.staged and change.state == "pending":
                # After a restart of the flusher, a draft in a slab waits for those in the nvme tier, even for
                # later ones.
                assert self.has_conflict(host.number), f"{change} is stuck"
        host.flusher.scan.sweep()
        look = host.observer.look()
        if not look.drafts:
            assert host.observer.dirty_ram_bytes() == 0, "the ram tier is full of what nobody needs"
            if host.setup.nvme:
                assert host.flusher.nvme.usage().dirty_bytes == 0, "the nvme tier is full of what nobody needs"

    def heal(self, host):
        host.link.trouble, host.nvme_trouble, host.unreachable, host.crash_at = None, False, False, None
        host.faulty.clear()
        host.faulty.deliver_late()
        host.meanwhile.clear()

    # -- trainers ------------------------------------------------------------------------------------------------------

    def content(self, size, *, unique=True):
        self.made += 1
        data = bytes(range(1, 251)) * (size // 250 + 1)
        stamp = b"<%d>" % self.made if unique else b"<same>"
        return (data[: max(size - len(stamp), 0)] + stamp)[-size:] if size else b""

    @rule(host=hosts, process=processes, path=paths, size=sizes)
    def stage(self, host, process, path, size):
        self.write(host, process, path, size, True, Level.STAGED, WriteMode.OVERWRITE)

    @rule(host=hosts, path=paths, size=sizes)
    def stage_more(self, host, path, size):
        self.write(host, 0, path, size, True, Level.STAGED, WriteMode.APPEND)

    @rule(host=hosts, path=paths, onto=paths)
    def move(self, host, path, onto):
        self.move_or_copy(host, 0, path, onto, Level.STAGED, True)

    @rule(
        host=hosts,
        process=processes,
        path=paths,
        size=sizes,
        unique=st.booleans(),
        level=levels,
        mode=st.sampled_from([WriteMode.OVERWRITE, WriteMode.OVERWRITE, WriteMode.APPEND, WriteMode.CREATE]),
    )
    def write(self, host, process, path, size, unique, level, mode):
        trainer = self.hosts[host].trainers[process]
        content, there = self.content(size, unique=unique), self.seen(host, path)[1]
        doing = self.doing(host, trainer, {path: content})
        if mode is WriteMode.APPEND:
            doing.contents[path] = (there or b"") + content

        def do():
            writer = Writer(trainer.store, path, mode=mode, level=level)
            writer.write(content)
            writer.commit()

        try:
            done = self.attempt(doing, do, level)
        except AlreadyExistsError:
            assert mode is WriteMode.CREATE
            assert there is not None or self.was_troubled(doing)
        else:
            assert not done or mode is not WriteMode.CREATE or there is None

    @rule(target=writers, host=hosts, process=processes, path=paths, size=sizes, level=levels)
    def open_writer(self, host, process, path, size, level):
        trainer = self.hosts[host].trainers[process]
        content = self.content(size)
        doing = self.doing(host, trainer, {path: content})
        try:
            writer = Writer(trainer.store, path, level=level)
            writer.write(content)
        except (StoreError, CapacityError, ReadOnlyError, TimeoutError):
            return multiple()
        opened = SimpleNamespace(
            writer=writer, trainer=trainer, doing=doing, level=level, path=path, content=content, closed=False
        )
        self.opened.append(opened)
        return opened

    @rule(opened=consumes(writers), size=sizes, commit=st.sampled_from([True, True, False]))
    def close_writer(self, opened, size, commit):
        if not opened.trainer.alive:
            return
        opened.closed = True
        if not commit:
            with contextlib.suppress(TierfsError, TimeoutError):
                opened.writer.abort()
            return
        more = self.content(size)
        opened.doing.contents[opened.path] = opened.content + more
        opened.doing.before = self.troubles(opened.doing.host)

        def do():
            opened.writer.write(more)
            opened.writer.commit()

        there = {self.standing(opened.path), self.seen(opened.doing.host, opened.path)[0]}
        stale = there != {opened.doing.seen[opened.path]}
        if stale and not opened.writer._staged:
            with pytest.raises((ConflictError, StoreError)):
                self.attempt_raw(opened.doing, do)
            return
        # If the object tier is on this host, staging reads the current record, provided that the tier answers.
        opened.doing.is_stale = stale and opened.trainer.store.descriptor.endpoint.host_local
        self.attempt(opened.doing, do, opened.level)

    def attempt_raw(self, doing, operation):
        self.doings.append(doing)
        try:
            operation()
        finally:
            self.doings.pop()

    @rule(host=hosts, process=processes, path=paths, level=levels)
    def remove(self, host, process, path, level):
        trainer = self.hosts[host].trainers[process]
        trainer.store.ack = level
        there = self.seen(host, path)[1]
        doing = self.doing(host, trainer, {path: None})
        try:
            done = self.attempt(doing, lambda: delete(trainer.store, path), level)
        except NotFoundError:
            assert there is None or self.was_troubled(doing)
        else:
            assert not done or there is not None

    @rule(host=hosts, process=processes, source=paths, onto=paths, level=levels, moves=st.booleans())
    def move_or_copy(self, host, process, source, onto, level, moves):
        if source == onto:
            return
        trainer = self.hosts[host].trainers[process]
        trainer.store.ack = level
        there = self.seen(host, source)[1]
        doing = self.doing(host, trainer, {onto: there, source: None} if moves else {onto: there})
        operation = rename if moves else copy
        try:
            done = self.attempt(doing, lambda: operation(trainer.store, source, onto), level)
        except NotFoundError:
            assert there is None or self.was_troubled(doing)
        else:
            assert not done or there is not None

    @rule(host=hosts, process=processes, path=paths, begin=st.integers(0, 3), share=st.sampled_from([1, 2, 50]))
    def read(self, host, process, path, begin, share):
        trainer = self.hosts[host].trainers[process]
        expected = self.seen(host, path)[1]
        doing = self.doing(host, trainer, {})
        try:
            reader = open_entry(trainer.store, stat(trainer.store, path))
            first = reader.length * begin // 4
            out = bytearray((reader.length - first) // share)
            reader.read_into(first, memoryview(out))
        except NotFoundError:
            assert expected is None
        except (StoreError, ReadOnlyError):
            assert self.was_troubled(doing)
        else:
            assert expected is not None
            assert bytes(out) == expected[first : first + len(out)]

    @rule(host=hosts, process=processes)
    def keep_what_was_read(self, host, process):
        self.hosts[host].trainers[process].keep()

    @rule(host=hosts, process=processes, path=st.sampled_from(["", *PATHS]), tier=st.sampled_from(["ram", "nvme"]))
    def make_room(self, host, process, path, tier):
        if tier == "nvme":
            self.clock.pass_time(61)  # recently written chunks are kept, since a draft may be about to name them
        with contextlib.suppress(TierfsError, TimeoutError):
            evict(self.hosts[host].trainers[process].store, path, tier)

    @rule(host=hosts, process=processes, path=paths, tier=st.sampled_from(["ram", "nvme"]))
    def bring(self, host, process, path, tier):
        with contextlib.suppress(TierfsError, TimeoutError):
            prefetch(self.hosts[host].trainers[process].store, path, tier)

    @rule(host=hosts, process=processes, path=st.sampled_from(["", "d", *PATHS]), level=levels)
    def wait(self, host, process, path, level):
        trainer = self.hosts[host].trainers[process]
        doing = self.doing(host, trainer, {})
        below = [
            change
            for change in self.changes.values()
            if change.host == host
            and change.staged
            and (not path or change.path == path or change.path.startswith(f"{path}/"))
        ]
        pending = [change for change in below if change.state == "pending"]
        kept = [change for change in below if change.state == "conflict"]
        if self.attempt(doing, lambda: wait_for(trainer.store, path, level, 60.0), level):
            for change in pending:
                self.check_reached(change, level)
            assert not kept or level < Level.OBJECT, f"nobody is told of {kept}"

    @rule(host=hosts, process=processes, path=paths)
    def ask_for_level(self, host, process, path):
        trainer = self.hosts[host].trainers[process]
        write_id, content = self.seen(host, path)
        try:
            level = level_of(trainer.store, path)
        except NotFoundError:
            assert content is None
        except (StoreError, ReadOnlyError):
            pass
        else:
            self.check_reached(self.changes[write_id], level)

    @rule(host=hosts, process=processes, path=paths)
    def give_conflict_up(self, host, process, path):
        kept = [
            change
            for change in self.changes.values()
            if change.host == host and change.path == path and change.state == "conflict"
        ]
        gone = {change.write_id: change for change in kept}
        for change in sorted(self.changes.values(), key=lambda change: change.number):
            if change.host == host and (change.base in gone or change.after in gone):
                gone[change.write_id] = change
        before = {change: change.state for change in gone.values()}
        with contextlib.suppress(StoreError):
            discard_conflict(self.hosts[host].trainers[process].store, path)
        states = self.hosts[host].observer.look().states
        for change, state in before.items():
            if change.write_id not in states and state in {"pending", "conflict"}:
                change.state = "discarded"

    @rule(host=hosts, process=processes)
    def crash(self, host, process):
        trainer = self.hosts[host].trainers[process]
        if all(doing.trainer is not trainer for doing in self.doings):  # a busy trainer goes on
            trainer.crash()
            self.hosts[host].trainers[process] = Trainer(self.hosts[host])

    # -- flushers ------------------------------------------------------------------------------------------------------

    @rule(host=hosts, count=st.integers(1, 8))
    def work(self, host, count):
        for _ in range(count):
            self.hosts[host].work()

    @rule(host=hosts, what=st.sampled_from(["discover", "sweep", "persist", "take", "take"]))
    def work_a_little(self, host, what):
        self.hosts[host].step(what)

    @rule(host=hosts, index=st.integers(0, 3))
    def go_on(self, host, index):
        self.hosts[host].step("advance", index)

    @rule(
        host=hosts,
        point=st.sampled_from(
            [
                "before settle.commit",
                "after settle.commit",
                "before release.chunks",
                "before release.draft",
                "after release.draft",
                "upload.chunk",
                "before publish.record",
                "after publish.record",
                "before finish.release",
                "after finish.release",
                "chunk.write",
                "chunk.rename",
                "batch.write",
                "batch.rename",
                "batch.finish",
                "head.change",
                "",
            ]
        ),
        after=st.sampled_from([0, 0, 0, 1, 3]),
    )
    def plan_crash_of_flusher(self, host, point, after):
        self.hosts[host].crash_at = (point, after)

    @precondition(lambda self: any(host.flusher is not None for host in self.hosts))
    @rule(host=hosts)
    def crash_flusher(self, host):
        if self.hosts[host].flusher is not None:
            self.hosts[host].bury_flusher()

    @rule(
        host=hosts,
        point=st.sampled_from(
            ["settle.commit", "release.chunks", "release.draft", "upload.chunk", "publish.record", "finish.release"]
        ),
        other=hosts,
        process=processes,
        path=paths,
        what=st.sampled_from(["write", "append", "remove", "move", "evict", "sweep", "persist", "advance", "crash"]),
    )
    def meanwhile(self, host, point, other, process, path, what):
        """Make something happen while a flusher is in the middle of a step."""
        actions = {
            "write": lambda: self.write(other, process, path, 2 * CHUNK, True, Level.STAGED, WriteMode.OVERWRITE),
            "append": lambda: self.write(other, process, path, 5000, True, Level.STAGED, WriteMode.APPEND),
            "remove": lambda: self.remove(other, process, path, Level.STAGED),
            "move": lambda: self.move_or_copy(other, process, path, "d/b", Level.STAGED, True),
            "evict": lambda: self.make_room(other, process, "", "ram"),
            "sweep": lambda: self.hosts[host].step("sweep"),
            "persist": lambda: self.hosts[host].step("persist"),
            "advance": lambda: self.hosts[host].step("take") and self.hosts[host].step("advance", -1),
            "crash": lambda: self.crash(other, process),
        }
        self.hosts[host].meanwhile[point] = actions[what]

    # -- failures ------------------------------------------------------------------------------------------------------

    @rule(
        host=hosts,
        fault=st.sampled_from([Fault.LATE, Fault.LOST_RESPONSE, Fault.REFUSED, Fault.FULL]),
        key_part=st.sampled_from(["/tree/", "/tree/", "/chunks/", "/leases/"]),
        after=st.sampled_from([0, 0, 1, 2]),
    )
    def break_a_put(self, host, fault, key_part, after):
        self.hosts[host].faulty.clear()
        self.hosts[host].faulty.inject(fault, method="put", key_part=key_part, after=after)

    @precondition(lambda self: any(host.faulty.late for host in self.hosts))
    @rule(host=hosts)
    def deliver_late(self, host):
        self.hosts[host].faulty.deliver_late()

    @rule(host=hosts, what=st.sampled_from(["down", "denied", "nvme", "flusher", "nothing", "nothing"]))
    def break_or_mend(self, host, what):
        here = self.hosts[host]
        here.link.trouble = what if what in {"down", "denied"} else None
        here.nvme_trouble = what == "nvme"
        here.unreachable = what == "flusher"

    @rule(seconds=st.sampled_from([1, 40]))
    def time_passes(self, seconds):
        self.clock.pass_time(seconds)

    @rule(host=hosts)
    def reboot(self, host):
        here = self.hosts[host]
        here.reboot()
        states = here.observer.look().states
        for change in self.changes.values():
            if change.host == host and change.staged and change.state in {"pending", "conflict"}:
                if change.write_id not in states:
                    assert change.reached < Level.LOCAL, f"{change} did not survive"
                    change.state = "lost"


_settings = settings(
    max_examples=EXAMPLES or 60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    derandomize=not EXAMPLES,
    database=None,
)
TestTieredHosts = TieredHosts.TestCase
TestTieredHosts.settings = _settings
# On a busy machine the run takes minutes. Hypothesis would take a timeout in an example for data that depends on
# something outside, and report a FlakyStrategyDefinition.
TestTieredHosts.pytestmark = [pytest.mark.timeout(1800)]
if SEED is not None:
    TestTieredHosts = seed(int(SEED))(TestTieredHosts)


@contextlib.contextmanager
def played(setup):
    """The machine without Hypothesis, to replay the failures that it found."""
    machine = TieredHosts()
    machine.start(number=0, first=setup, second=setup)
    yield machine
    machine.teardown()
    gc.collect()


@pytest.fixture
def world():
    with played("ram only") as machine:
        yield machine


def test_changes_that_were_built_on_each_other_are_given_up_together(world):
    world.stage(host=0, process=0, path="b", size=0)
    world.stage(host=0, process=0, path="a", size=10)
    world.move(host=0, path="a", onto="d/a")
    world.stage(host=1, process=0, path="a", size=0)
    world.move(host=0, path="b", onto="a")
    world.work(host=1, count=6)
    for _ in range(20):
        world.work(host=0, count=1)
    world.nothing_is_lost_or_wrong()
    assert discard_conflict(world.hosts[0].trainers[0].store, "a") == 4
    for change in world.changes.values():
        if change.state == "conflict":
            change.state = "discarded"


def test_an_abort_after_a_commit_keeps_the_file(world):
    trainer = world.hosts[0].trainers[0]
    content = world.content(5000)
    world.doings.append(world.doing(0, trainer, {"a": content}))
    writer = Writer(trainer.store, "a", level=Level.STAGED)
    writer.write(content)
    writer.commit()
    writer.abort()
    world.nothing_is_lost_or_wrong()
    assert load(trainer.store, "a") == content


def test_chunks_of_a_published_copy_become_clean(world):
    world.stage(host=0, process=0, path="a", size=5000)
    world.move_or_copy(host=0, process=0, source="a", onto="b", level=Level.OBJECT, moves=False)
    assert world.hosts[0].observer.dirty_ram_bytes() == 0


@pytest.fixture
def little():
    with played("both, little") as machine:
        yield machine


def test_a_flusher_that_is_started_anew_publishes_in_the_same_order(little):
    host = little.hosts[0]
    host.link.trouble = "down"
    little.stage(host=0, process=0, path="d/a", size=4 * CHUNK)  # too large for the nvme tier
    little.stage(host=0, process=0, path="d/b", size=10)
    little.work(host=0, count=4)
    host.bury_flusher()
    host.link.trouble = None
    little.wait(host=0, process=0, path="", level=Level.OBJECT)
    assert [change.state for change in little.changes.values()] == ["published", "published"]


def test_a_removal_does_not_outlive_what_was_to_be_there_instead(little):
    little.write(0, 0, "d/a", 4 * CHUNK, True, Level.OBJECT, WriteMode.OVERWRITE)
    host = little.hosts[0]
    little.stage(host=0, process=0, path="a", size=10)
    host.link.trouble = "down"
    with contextlib.suppress(StoreError):
        little.move(host=0, path="d/a", onto="a")
    little.work(host=0, count=8)
    little.reboot(host=0)
    host.link.trouble = None
    for _ in range(20):
        little.work(host=0, count=1)
        little.time_passes(seconds=40)
    contents = [little.content_of(little.oracle, path) for path in ("a", "d/a")]
    assert any(content is not None and len(content) == 4 * CHUNK for content in contents)


def test_waiting_ends_even_if_the_flusher_says_done_what_is_not(world, monkeypatch):
    monkeypatch.setattr(world.hosts[0], "request", lambda *_, **__: {})
    world.clock.meanwhile = lambda: None
    trainer = world.hosts[0].trainers[0]
    trainer.store.timeout_s = 5.0
    world.doings.append(world.doing(0, trainer, {"a": b"x"}))
    writer = Writer(trainer.store, "a", level=Level.LOCAL)
    writer.write(b"x")
    with pytest.raises(TimeoutError, match="does not know of it"):
        writer.commit()
