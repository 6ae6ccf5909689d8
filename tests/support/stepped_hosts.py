"""Hosts whose trainers and flushers are driven step by step on one thread, so that a run repeats exactly.

A *trainer* has what a process that uses a store has: a `Host` with its own lock, a `RamTier`, `Tiers` and a `Store`.
It crashes when its lock is released and no part of it is called any more. A *flusher* is the real one behind its real
engine, except for its threads: `SteppedHost.work` does the next unit of their work. It crashes at one of its fault
points, by an exception that no handler catches.

Time passes only when a caller waits; meanwhile the flushers work.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from concurrent.futures import Future
from types import SimpleNamespace

from tierfs.clock import ManualClock
from tierfs.errors import ReadOnlyError, StoreError, TierfsError
from tierfs.flusher.engine import FlushEngine
from tierfs.flusher.flusher import Flusher
from tierfs.flusher.publish import StorePublisher
from tierfs.format import keys
from tierfs.format.manifest import decode_record
from tierfs.host.host import Host
from tierfs.host.nvme.reader import NvmeReader
from tierfs.host.nvme.tier import NvmeTier
from tierfs.host.pending.record import Draft
from tierfs.host.slab.ram import RamTier
from tierfs.host.slab.table import SlotKind, SlotState
from tierfs.host.tiers import Tiers
from tierfs.objects import OVERWRITE, MemoryObjects
from tierfs.objects.wrappers.wrapper import WrappedObjects
from tierfs.store import Store
from tierfs.testing import FaultyObjects
from tierfs.threads import Transfers

CHUNK = 16 << 10
"""Size of a chunk in these tests, so that a file of several chunks is small."""

TICK_S = 2e-6
WAIT_S = 90.0
ROOM_S = 4.0
STEPS_MAX = 400
PEER = SimpleNamespace(gone=threading.Event())


class FlusherDied(BaseException):
    """The flusher's process ended at a fault point."""


class SteppedClock(ManualClock):
    """A clock that never returns the same time twice, and lets others work while a caller sleeps."""

    def __init__(self):
        super().__init__()
        self.meanwhile = lambda: None
        self._asleep = False

    def monotonic(self):
        self._now_s += TICK_S
        return self._now_s

    def pass_time(self, seconds):
        """Let time pass, and nobody work."""
        self._now_s += seconds

    def sleep(self, seconds):
        self.pass_time(seconds)
        if not self._asleep:
            self._asleep = True
            try:
                self.meanwhile()
            finally:
                self._asleep = False


class Inline:
    """An executor that runs tasks on the calling thread."""

    def submit(self, task, *arguments, **options):
        future = Future()
        try:
            future.set_result(task(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, *_, **__):
        pass


class InlineTransfers(Transfers):
    """Transfers on the calling thread."""

    def submit(self, task, argument):
        return Inline().submit(task, argument)


class NoFlusher:
    """A client for observers, which need no flusher: every request fails."""

    def request(self, do, arguments, *, timeout_s=None):
        raise AssertionError(f"looking needs no flusher: {do} {arguments}")

    def is_running(self):
        return False


class Applied(MemoryObjects):
    """The object tier itself. Reports every record that takes effect."""

    def __init__(self, root, on_record):
        super().__init__(root)
        self._on_record = on_record

    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        info = super().put(key, data, mode=mode, checksum=checksum)
        if key.startswith(keys.TREE):
            path = keys.parse_record_key(key)
            self._on_record(path, decode_record(b"".join(data), path, key), info.version)
        return info

    def erase(self):
        self.delete([item.key for item in self.list("")])


class Link(WrappedObjects):
    """One host's link to the object tier. Reports every record before sending it, and may be down."""

    def __init__(self, inner, on_send):
        super().__init__(inner)
        self._on_send = on_send
        self.trouble = None
        self.refused = 0

    def put(self, key, data, *, mode=OVERWRITE, checksum=None):
        if key.startswith(keys.TREE):
            path = keys.parse_record_key(key)
            self._on_send(path, decode_record(b"".join(data), path, key), mode)
        return super().put(key, data, mode=mode, checksum=checksum)

    def _around(self, request, send):
        self._check(request.key)
        return send()

    def _around_list(self, request, send):
        self._check(request.key)
        return send()

    def _check(self, key):
        if self.trouble is not None:
            self.refused += 1
        if self.trouble == "down":
            raise StoreError(f"{key}: the object tier is down", transient=True, path=key)
        if self.trouble == "denied":
            raise ReadOnlyError(f"{key}: the credentials are too old", path=key)


def forget(tiers):
    """Close everything that the tiers have open, and drop their memory."""
    tiers.cache.close()
    tiers.sources.tiers.clear()
    for part in (tiers.cache, tiers.drafts, tiers.writer):
        part._ram = None
    tiers.drafts._by_path._ram = None
    tiers.ram = None


class ImpatientRam(RamTier):
    """A ram tier that waits for room only briefly: the usual timeout would take thousands of steps."""

    def take_runs(self, kind, runs, *, timeout_s, **how):
        return super().take_runs(kind, runs, timeout_s=min(timeout_s, ROOM_S), **how)


class Trainer:
    """A process that uses the store on a host."""

    def __init__(self, host):
        self.place = host
        world, setup = host.world, host.setup
        self.host = Host(host.state, host.shm)
        self.ram = ImpatientRam(self.host, world.uuid, budget_bytes=setup.ram, clock=world.clock)
        self.tiers = Tiers(
            self.ram,
            NvmeReader(self.host.store_directory(world.uuid), clock=world.clock),
            host,
            kind=world.descriptor.digest_kind,
            has_nvme=bool(setup.nvme),
            gives_local=bool(setup.nvme),
            keeps_reads=setup.keeps_reads,
            passes_by=setup.passes_by,
            clock=world.clock,
        )
        self.tiers.cache._backfill = self
        announce = self.tiers.writer.announce
        self.tiers.writer.announce = lambda **_: announce()  # not on a thread
        self.tiers.writer.expect = lambda: None
        self.queue = []
        self._seal = self.tiers.writer.sealing
        self.tiers.writer.sealing = self.sealing
        self.store = world.open(host.link, tiers=self.tiers)
        self.alive = True

    @contextlib.contextmanager
    def sealing(self, draft, **how):
        with self._seal(draft, **how):
            yield
        self.place.world.sealed(self.place, draft)

    def add(self, slot):
        """Queue a slot. Stands in for `Backfill.add`."""
        self.queue.append(slot)

    def keep(self):
        """Copy the queued slots to the nvme tier, as a backfill's thread does."""
        slots, self.queue = self.queue, []
        with contextlib.suppress(TierfsError, TimeoutError):
            self.tiers.cache.backfill(slots)

    def crash(self):
        """End as by SIGKILL: locks and descriptors close, without any cleanup."""
        self.alive = False
        if self.host._own is not None:
            self.host._own.release()
        for segment in self.ram.segments():
            segment.close()
        self.tiers.writer.close()
        forget(self.tiers)
        self.ram = self.host = None


class Observer:
    """A process on a host that reads the local tiers and changes nothing."""

    def __init__(self, host):
        world, setup = host.world, host.setup
        self.world = world
        self.host = Host(host.state, host.shm)
        self.ram = RamTier(self.host, world.uuid, budget_bytes=setup.ram, clock=world.clock)
        directory = self.host.store_directory(world.uuid)
        self.tiers = Tiers(
            self.ram,
            NvmeReader(directory, clock=world.clock),
            NoFlusher(),
            kind=world.descriptor.digest_kind,
            has_nvme=bool(setup.nvme),
            gives_local=bool(setup.nvme),
            keeps_reads=False,
            passes_by=False,
            clock=world.clock,
        )
        self.store = world.open(world.tier, tiers=self.tiers)

    def close(self):
        for segment in self.ram.segments():
            segment.close()
        forget(self.tiers)
        self.ram = self.host = None

    def look(self):
        """Return which tiers of this host hold which drafts and chunks."""
        drafts, states = {}, {}
        for slot in self.ram.drafts((SlotState.SEALED, SlotState.CONFLICT)):
            data = bytearray(slot.length)
            slot.segment.read(slot, 0, memoryview(data))
            drafts[slot.name] = Draft.decode(bytes(data), "a slab")
            states[slot.name] = {"conflict" if slot.state is SlotState.CONFLICT else "ram"}
        needed = set()
        for stored in self.tiers.nvme.drafts_below("", conflicts=True):
            drafts[stored.write_id] = draft = Draft.decode(stored.data, "the nvme tier")
            states.setdefault(stored.write_id, set()).add("conflict" if stored.state == "conflict" else "nvme")
            needed.update(draft.names)
        assert not self.tiers.nvme.usage().damaged, "a draft in the nvme tier is damaged"
        chunks = {
            slot.name
            for segment in self.ram.segments()
            for slot in segment.slots(kind=SlotKind.CHUNK, states=(SlotState.SEALED,))
        }
        held = {name for name in needed if self.tiers.nvme.holds(name)}
        return SimpleNamespace(drafts=drafts, states=states, ram=chunks, nvme=held)

    def dirty_ram_bytes(self):
        return sum(segment.sums().dirty + segment.sums().filling for segment in self.ram.segments())


class SteppedHost:
    """A host: its directories, trainers and flusher. To trainers it is also the flusher's client."""

    def __init__(self, world, number, setup, directory, shm):
        self.world, self.number, self.setup = world, number, setup
        self.state, self.shm = directory / f"host{number}", shm / f"host{number}"
        self.shm.mkdir()
        self.faulty = FaultyObjects(world.tier, seed=number, clock=world.clock)
        self.link = Link(self.faulty, world.sent)
        self.trainers = [Trainer(self), Trainer(self)]
        self.observer = Observer(self)
        self.engine = None
        self.flusher = None
        self.held = []
        self.persisting = False
        self.crash_at = None
        self.meanwhile = {}
        self.nvme_trouble = False
        self.unreachable = False
        self.deaths = 0

    # -- the flusher's life --------------------------------------------------------------------------------------------

    def fault(self, life):
        def at(point):
            if not life.alive:
                raise FlusherDied(point)
            if self.nvme_trouble and point in {"before chunk.write", "before batch.write"}:
                raise StoreError("the disk says no", tier="nvme")
            if self.crash_at is not None:
                part, left = self.crash_at
                if part in point:
                    self.crash_at = (part, left - 1) if left else None
                    if not left:
                        life.alive = False
                        raise FlusherDied(point)
            for part in [part for part in self.meanwhile if part in point]:
                if point.partition(" ")[2].partition(".")[0] not in {
                    "chunk",
                    "chunks",
                    "batch",
                    "conflict",
                    "head",
                }:  # the tier holds locks there
                    self.meanwhile.pop(part)()
                    if not life.alive:
                        raise FlusherDied(point)

        return at

    def start_flusher(self):
        world, setup = self.world, self.setup
        life = SimpleNamespace(alive=True)
        self.life = life
        nvme = None
        try:
            self.process = Host(self.state, self.shm)
            if setup.nvme:
                directory = self.process.store_directory(world.uuid)
                nvme = NvmeTier(directory, budget_bytes=setup.nvme, clock=world.clock, faults=self.fault(life))
                nvme._is_durable = True
            ram = RamTier(self.process, world.uuid, budget_bytes=setup.ram, clock=world.clock)
            flusher = Flusher(ram, nvme, clock=world.clock, random=world.random.random, faults=self.fault(life))
            uploader = flusher.uploader
            persister = flusher.persister
            uploader._releases = persister._writes = persister._small_writes = Inline()
            uploader._chunks = dict.fromkeys((False, True), Inline())
            if nvme is not None:
                flusher._state.nvme_bytes = 2 * setup.passed_by_over
            flusher.use(StorePublisher(lambda: world.open(self.link)))
            self.flusher = flusher
            flusher.scan.resume()
            self.engine = FlushEngine(lambda: flusher)
            self.engine._started = flusher
        except BaseException:
            self.bury_flusher()
            raise

    def bury_flusher(self):
        """Close everything that the ended flusher process had open."""
        self.deaths += 1
        flusher, self.flusher, self.engine, self.held, self.persisting = self.flusher, None, None, [], False
        self.life.alive = False
        self.process = None
        if flusher is not None:
            for segment in flusher.ram.segments():
                segment.close()
            flusher.ram = None

    def running(self):
        if self.unreachable:
            raise StoreError("no flusher can be started", transient=True)
        if self.engine is None:
            self.start_flusher()
        return self.engine

    # -- the flusher's work --------------------------------------------------------------------------------------------

    def step(self, what, *arguments):
        """Let a running flusher take one step. Return the step's result, or None if the flusher died in it."""
        if self.engine is None:
            return None
        life = self.life
        try:
            return getattr(self, f"_step_{what}")(*arguments)
        except FlusherDied:
            if self.life is life and self.flusher is not None:
                self.bury_flusher()
            return None

    def work(self):
        """Do the next unit of work and start a flusher if none runs. Return whether there was work."""
        try:
            self.running()
        except (FlusherDied, TierfsError):
            return False
        return bool(self.step("any"))

    def _step_any(self):
        if not self.persisting:
            self.flusher.scan.discover()
            self.flusher.scan.sweep()
            if self.flusher._state.entries.large and self.world.random.random() < 0.5 and self._step_take():
                return True
            if self._step_persist():
                return True
        return self._step_advance(0) or (self._step_take() and self._step_advance(0))

    def _step_discover(self):
        self.flusher.scan.discover()
        return True

    def _step_sweep(self):
        if not self.persisting:
            self.flusher.scan.sweep()
        return True

    def _step_persist(self):
        """Persist the next drafts that wait for the nvme tier."""
        if self.persisting:
            return False
        persister = self.flusher.persister
        batch = persister.batch(persister.waiting()[: self.world.random.randint(1, 3)])
        if not batch:
            return False
        life, self.persisting = self.life, True
        try:
            with persister._turn:
                return persister.persist(batch)
        finally:
            if self.life is life:
                self.persisting = False

    def _step_take(self):
        """Begin the upload of the next draft that is ready, as a thread would."""
        entry = self.flusher.uploader.next()
        if entry is None:
            return False
        self.flusher._state.entries.begin(entry)
        self.held.append(entry)
        return True

    def _step_advance(self, index):
        """Continue one of the uploads that were begun."""
        if not self.held:
            return False
        self.flusher.uploader.advance(self.held.pop(index % len(self.held)))
        return True

    # -- the client that trainers use ----------------------------------------------------------------------------------

    def is_running(self):
        return self.engine is not None

    def request(self, do, arguments, *, timeout_s=None):
        arguments = json.loads(json.dumps(arguments))
        if do != "wait":
            return self._ask(do, arguments)
        limit_s = arguments.get("timeout_s")
        ends = self.world.clock.monotonic() + (WAIT_S if limit_s is None else limit_s)
        for _ in range(STEPS_MAX):
            try:
                return self._ask(do, {**arguments, "timeout_s": 0})
            except TimeoutError:
                if self.world.clock.monotonic() >= ends:
                    raise
            self.world.clock.pass_time(0.3 if self.work() else 2.0)
        raise AssertionError("a flusher that is always at work gets nowhere")

    def _ask(self, do, arguments):
        for _ in range(2):
            life = None
            try:
                engine, life = self.running(), self.life
                return engine.handle(do, arguments, PEER)
            except FlusherDied:
                if life is not None and self.life is life and self.flusher is not None:
                    self.bury_flusher()
        raise StoreError("the flusher ended before it answered", transient=True)

    # -- failures of the whole host ------------------------------------------------------------------------------------

    def reboot(self):
        """End all processes and clear memory."""
        if self.flusher is not None:
            self.bury_flusher()
        for trainer in self.trainers:
            trainer.crash()
        self.observer.close()
        shutil.rmtree(self.shm)
        self.shm.mkdir()
        self.trainers = [Trainer(self), Trainer(self)]
        self.observer = Observer(self)

    def close(self):
        if self.flusher is not None:
            self.bury_flusher()
        for trainer in self.trainers:
            trainer.crash()
        self.observer.close()
        self.meanwhile.clear()


def store_on(objects, world, tiers=None):
    return Store(
        objects,
        world.descriptor,
        url="store",
        clock=world.clock,
        random_bytes=world.random.randbytes,
        tiers=tiers,
        timeout_s=WAIT_S,
    )
