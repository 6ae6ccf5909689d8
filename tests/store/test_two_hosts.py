"""Two hosts write the same store while answers get lost, requests arrive late, and chunks are collected.

A state machine interleaves them. After each step it compares everything that a reader can see with a small model: the
content of each path, and a count of changes, which shows whether an operation saw the newest one. It assumes, as
FORMAT.md does, that a request takes effect within a grace minus a lease of being sent, or never.

It runs fifteen sequences of 40 steps, a second each. Before changing how hosts treat each other's files, run more:

    TIERFS_STATEFUL_EXAMPLES=500 pytest tests/store/test_two_hosts.py --timeout=0
"""

import functools
import os
import random
import uuid

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from support.served import KilledError, ServedObjects, StepLink

from tierfs.clock import ManualClock
from tierfs.digest import DigestKind
from tierfs.errors import AlreadyExistsError, ConflictError, NotFoundError, StoreError
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.objects import RetryingObjects
from tierfs.objects.protocol import ObjectInfo
from tierfs.store import Store, WriteMode, Writer, copy, delete, find, load, rename, save
from tierfs.store.maintenance.gc import GcOptions, collect
from tierfs.store.read.reader import expand_rows
from tierfs.store.tree.records import observe
from tierfs.store.tree.references import write_references
from tierfs.testing import Fault, FaultyObjects

PATHS = st.sampled_from(["a", "b", "d/a", "d/b", "d/.metadata"])
CONTENTS = st.sampled_from([b"", b"one", b"two" * 1000, b"three" * 40000])
HOSTS = st.integers(0, 1)
LEASE_S = 20
GRACE_S = 60


class HostClock(ManualClock):
    """A host's own clock. It shows another time than the object tier's, at the same speed."""

    def __init__(self, clock, offset_s):
        self._clock, self._offset_ns = clock, offset_s * 1_000_000_000

    def now_ns(self):
        return self._clock.now_ns() + self._offset_ns

    def monotonic(self):
        return self._clock.monotonic()

    def sleep(self, seconds):
        self._clock.sleep(seconds)


class TwoHosts(RuleBasedStateMachine):
    writers = Bundle("writers")

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed):
        print(f"seed {seed}")
        self.random = random.Random(seed)
        self.clock = ManualClock()
        self.tier = ServedObjects(f"/two-hosts-{uuid.uuid4().hex}", self.clock)
        # Only the empty file is inline in its manifest, so that every other file has a chunk.
        self.descriptor = Descriptor(
            "0" * 32, 0, DigestKind.XXH3_128, self.tier.capabilities, inline_bytes=0, lease_s=LEASE_S, grace_s=GRACE_S
        )
        self.tier.put(keys.DESCRIPTOR, [self.descriptor.encode()])
        self.faulty = [FaultyObjects(self.tier, seed=seed), FaultyObjects(self.tier, seed=seed + 1)]
        self.hosts = [self.open_host(0), self.open_host(1)]
        self.oracle = self.open_on(self.tier)
        self.contents = {}
        self.changes = {}
        self.late = []
        self.late_since = None
        self.late_since = {}
        self.gc_links = []
        self.is_collecting = False

    def open_on(self, objects, *, offset_s=0):
        clock = HostClock(self.clock, offset_s)
        return Store(objects, self.descriptor, url="store", clock=clock, random_bytes=self.random.randbytes)

    def open_host(self, host):
        objects = self.faulty[host]
        if host:  # one host retries, the other sees every fault
            objects = RetryingObjects(objects, attempts=2, clock=self.clock, random=self.random)
        return self.open_on(objects, offset_s=3600 * host)

    # -- the model -----------------------------------------------------------------------------------------------------

    def count(self, path):
        return self.changes.get(path, 0)

    def set(self, path, content):
        self.changes[path] = self.count(path) + 1
        if content is None:
            self.contents.pop(path, None)
        else:
            self.contents[path] = content

    def real(self, path):
        try:
            return load(self.oracle, path)
        except NotFoundError:
            return None

    def attempt(self, operation, effects, *, stale=False, sources=()):
        """Run an operation. Its ``effects`` (path to new content) may take place whole, in order, in part, or not."""
        seen = {path: self.count(path) for path in effects}
        before = {path: self.contents.get(path) for path in effects}
        late = [faulty.late for faulty in self.faulty]
        try:
            operation()
        except ConflictError:
            # Only another host's change, or this host's own put whose answer was lost, may conflict.
            assert stale or any(self.was_ambiguous(path) for path in effects), "a conflict with nobody"
        except StoreError:
            pass  # in doubt: settled below
        else:
            assert not stale, "a stale operation replaced something newer"
            for path, content in effects.items():
                self.set(path, content)
            return
        # In doubt: each effect took place or did not. A lost request may still arrive.
        for path, content in effects.items():
            real = self.real(path)
            if stale:
                assert real == before[path]
            elif real == content and real != before[path]:
                self.set(path, content)
            else:
                assert real == before[path], f"{path} is neither what it was nor what it was to be"
                if real == content:
                    self.ambiguous[path] = True
        if any(faulty.late > count for faulty, count in zip(self.faulty, late, strict=True)):
            self.late.append((effects, seen))

    @property
    def ambiguous(self):
        if not hasattr(self, "_ambiguous"):
            self._ambiguous = {}
        return self._ambiguous

    def was_ambiguous(self, path):
        return self.ambiguous.get(path, False)

    # -- operations of hosts -------------------------------------------------------------------------------------------

    @rule(host=HOSTS, path=PATHS, content=CONTENTS)
    def overwrite(self, host, path, content):
        self.attempt(lambda: save(self.hosts[host], path, content), {path: content})

    @rule(host=HOSTS, path=PATHS, content=CONTENTS)
    def create(self, host, path, content):
        there = path in self.contents
        try:
            self.attempt(lambda: save(self.hosts[host], path, content, mode=WriteMode.CREATE), {path: content})
        except AlreadyExistsError:
            # Or the path has this host's own create, whose answer was lost. It looks like another host's create.
            assert there or self.real(path) is not None
            if not there:
                assert self.real(path) == content
                self.set(path, content)
        else:
            assert not there or self.contents.get(path) is not None

    @rule(target=writers, host=HOSTS, path=PATHS, content=CONTENTS)
    def open_writer(self, host, path, content):
        try:
            writer = Writer(self.hosts[host], path)
            writer.write(content)
            writer._finish_rows()  # sends the chunks long before the commit
        except StoreError:
            return None
        return writer, path, content, self.count(path), path in self.contents

    @rule(opened=consumes(writers))
    def commit_writer(self, opened):
        if opened is None:
            return
        writer, path, content, seen, was_there = opened
        # If its chunks were collected, it raises StoreError. Then `attempt` finds that nothing was published.
        # If there was no file and is no record, the path has no file still: its tombstones were collected.
        is_absent = not was_there and not any(True for _ in self.tier.list(keys.record_key(path)))
        self.attempt(writer.commit, {path: content}, stale=self.count(path) != seen and not is_absent)

    @rule(host=HOSTS, path=PATHS)
    def remove(self, host, path):
        there = path in self.contents
        try:
            self.attempt(lambda: delete(self.hosts[host], path), {path: None})
        except NotFoundError:
            assert not there
        else:
            assert there or path not in self.contents

    @rule(host=HOSTS, source=PATHS, onto=PATHS)
    def move(self, host, source, onto):
        if source == onto:
            return
        content = self.contents.get(source)
        try:
            self.attempt(lambda: rename(self.hosts[host], source, onto), {onto: content, source: None})
        except NotFoundError:
            assert content is None

    @rule(host=HOSTS, source=PATHS, onto=PATHS)
    def duplicate(self, host, source, onto):
        if source == onto:
            return
        content = self.contents.get(source)
        try:
            self.attempt(lambda: copy(self.hosts[host], source, onto), {onto: content})
        except NotFoundError:
            assert content is None

    @rule(host=HOSTS, path=PATHS)
    def read(self, host, path):
        try:
            content = load(self.hosts[host], path)
        except NotFoundError:
            content = None
        except StoreError:
            return
        assert content == self.contents.get(path)

    @rule(host=HOSTS)
    def crash(self, host):
        self.hosts[host] = self.open_host(host)

    # -- faults --------------------------------------------------------------------------------------------------------

    @rule(
        host=HOSTS,
        fault=st.sampled_from([Fault.LATE, Fault.LOST_RESPONSE, Fault.REFUSED]),
        key_part=st.sampled_from(["/tree/", "/tree/", "/chunks/", "/leases/", "/references/"]),
        after=st.sampled_from([0, 0, 1, 2]),
    )
    def break_a_put(self, host, fault, key_part, after):
        self.faulty[host].clear()
        self.faulty[host].inject(fault, method="put", key_part=key_part, after=after)
        if after == 2:
            self.faulty[host].inject(Fault.REFUSED, method="read", key_part="/tree/", after=1)

    @precondition(lambda self: any(faulty.late for faulty in self.faulty))
    @rule(host=HOSTS)
    def deliver_late(self, host):
        for outcome in self.faulty[host].deliver_late():
            if isinstance(outcome, ObjectInfo) and outcome.key.startswith(keys.TREE):
                self.land(outcome.key)

    def land(self, key):
        """Check a late put that took effect: the model must still be as it was when the put was sent."""
        for effects, seen in self.late:
            for path, content in effects.items():
                if keys.record_key(path) == key and seen[path] == self.count(path) and self.real(path) == content:
                    self.set(path, content)
                    return
        raise AssertionError(f"a late put replaced something newer: {key}")

    @rule(seconds=st.sampled_from([5, 15, 30]))
    def time_passes(self, seconds):
        # A request takes effect within a grace minus a lease of being sent, or never.
        now = self.clock.monotonic()
        for number, faulty in enumerate([*self.faulty, *self.gc_links]):
            if not faulty.late:
                self.late_since.pop(number, None)
            elif now + seconds - self.late_since.setdefault(number, now) >= GRACE_S - LEASE_S:
                if number < len(self.faulty):
                    self.deliver_late(number)
                else:
                    faulty.deliver_late()
        self.clock.sleep(seconds)

    @rule(host=HOSTS)
    def write_the_list_of_the_checkpoint(self, host):
        # The list names the files that this host sees now. A late put of it may arrive when these have changed.
        write_references(self.hosts[host], "d")

    @rule(host=HOSTS)
    def stay_busy_for_a_grace(self, host):
        """Renew the lease without a gap, so that knowledge from long ago still counts."""
        for number in range(5):
            self.time_passes(9)
            self.overwrite(host, "busy", b"busy %d" % number)

    # -- garbage collection, the real one ------------------------------------------------------------------------------

    def collector_link(self, actions=None, kill_at=None):
        self.gc_faulty = FaultyObjects(self.tier, seed=self.random.randrange(1 << 30))
        self.gc_links.append(self.gc_faulty)
        return StepLink(self.gc_faulty, actions, kill_at)

    def collect(self, link):
        """Run gc once from a third host, which has yet another clock."""
        store = self.open_on(link, offset_s=-3600)
        try:
            return collect(store, GcOptions(concurrency=1, batch=2))
        except (ConflictError, StoreError, KilledError):
            return None  # another gc runs, or this one failed or was killed

    @rule()
    def collect_garbage(self):
        self.collect(self.collector_link())

    @rule(at=st.integers(1, 120))
    def collect_until_killed(self, at):
        self.collect(self.collector_link(kill_at=at))

    @rule(
        fault=st.sampled_from([Fault.LATE, Fault.LOST_RESPONSE, Fault.REFUSED]),
        method=st.sampled_from(["put", "delete", "delete_version"]),
        after=st.integers(0, 4),
    )
    def collect_with_a_fault(self, fault, method, after):
        link = self.collector_link()
        self.gc_faulty.inject(fault, method=method, after=after)
        self.collect(link)

    @rule(
        steps=st.lists(st.integers(1, 90), min_size=1, max_size=4, unique=True),
        does=st.lists(
            st.tuples(
                st.sampled_from(["move", "overwrite", "duplicate", "remove", "wait", "collect"]), HOSTS, PATHS, PATHS
            ),
            min_size=4,
            max_size=4,
        ),
        content=CONTENTS,
    )
    def collect_while_others_work(self, steps, does, content):
        """Run other operations at steps of a gc: for example a rename behind the listing's cursor, or another gc."""
        if self.is_collecting:
            return
        self.is_collecting = True

        def action(what, host, path, other):
            match what:
                case "move":
                    self.move(host, path, other)
                case "overwrite":
                    self.overwrite(host, path, content)
                case "duplicate":
                    self.duplicate(host, path, other)
                case "remove":
                    self.remove(host, path)
                case "wait":
                    self.time_passes(LEASE_S + 5)
                case "collect":
                    self.collect(self.collector_link())

        actions = {step: functools.partial(action, *each) for step, each in zip(steps, does, strict=False)}
        try:
            self.collect(self.collector_link(actions))
        finally:
            self.is_collecting = False

    @rule()
    def a_grace_passes_between_two_runs(self):
        self.collect_garbage()
        self.time_passes(GRACE_S + 5)
        self.collect_garbage()

    def teardown(self):
        """After quiet graces, check that no unreachable object is left and that everything else is there."""
        if not hasattr(self, "contents"):
            return
        for faulty in [*self.faulty, *self.gc_links]:
            faulty.clear()
        self.time_passes(GRACE_S)
        self.time_passes(LEASE_S + 5)
        for _ in range(4):
            assert self.collect(StepLink(self.tier)) is not None
            self.time_passes(GRACE_S + LEASE_S + 5)
        self.everybody_can_read_what_the_model_holds()
        reached = set()
        for path in self.contents:
            rows = expand_rows(self.oracle, observe(self.oracle, path).manifest, path)
            reached |= {name for row in rows for name in (row.name, *row.bases)}
        kind = DigestKind.XXH3_128
        assert {keys.parse_chunk_key(item.key, kind) for item in self.tier.list(keys.CHUNKS)} == reached
        assert {item.key for item in self.tier.list(keys.TREE)} == {keys.record_key(path) for path in self.contents}
        assert [item.key for item in self.tier.list(keys.GC)] == [keys.COLLECTOR]
        lists = {keys.references_key("d")} if "d/.metadata" in self.contents else set()
        assert {item.key for item in self.tier.list(keys.REFERENCES)} == lists

    # -- invariants ----------------------------------------------------------------------------------------------------

    @invariant()
    def everybody_can_read_what_the_model_holds(self):
        if not hasattr(self, "contents"):
            return
        listed = {entry.path for entry in find(self.oracle, "") if not entry.is_directory}
        assert listed == set(self.contents)
        for path in ("a", "b", "d/a", "d/b", "d/.metadata", "busy"):
            assert self.real(path) == self.contents.get(path)


TestTwoHosts = TwoHosts.TestCase
TestTwoHosts.settings = settings(
    max_examples=int(os.environ.get("TIERFS_STATEFUL_EXAMPLES", "15")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
