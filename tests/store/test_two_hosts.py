"""Two hosts write the same store while answers get lost, requests arrive late, and chunks are collected.

A state machine interleaves them and compares, after each step, what anybody can read with a small model: path to
content, and a count of changes that says whether an operation saw the newest one. The assumption it makes is
FORMAT.md's own: a request takes effect within one grace of being sent, or never.
"""

import random
import uuid

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from tierfs.clock import ManualClock
from tierfs.digest import DigestKind
from tierfs.errors import AlreadyExistsError, ConflictError, NotFoundError, StoreError
from tierfs.format import keys
from tierfs.format.descriptor import Descriptor
from tierfs.format.lease import Condemned
from tierfs.format.manifest import Manifest
from tierfs.objects import MemoryObjects, RetryingObjects
from tierfs.objects.protocol import ObjectInfo
from tierfs.store import Store, WriteMode, Writer, copy, delete, find, load, rename, save
from tierfs.store.read.reader import expand_rows
from tierfs.store.tree.records import observe
from tierfs.testing import Fault, FaultyObjects

PATHS = st.sampled_from(["a", "b", "d/a", "d/b"])
CONTENTS = st.sampled_from([b"", b"one", b"two" * 1000, b"three" * 40000])
HOSTS = st.integers(0, 1)
LEASE_S = 20
GRACE_S = 30


class TwoHosts(RuleBasedStateMachine):
    writers = Bundle("writers")

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed):
        print(f"seed {seed}")
        self.random = random.Random(seed)
        self.tier = MemoryObjects(f"/two-hosts-{uuid.uuid4().hex}")
        self.clock = ManualClock()
        # Nothing but the empty file is held in a manifest, so that every file has a chunk.
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
        self.condemned = None
        self.epoch = 0

    def open_on(self, objects):
        return Store(objects, self.descriptor, url="store", clock=self.clock, random_bytes=self.random.randbytes)

    def open_host(self, host):
        objects = self.faulty[host]
        if host:  # one host retries, the other sees every fault itself
            objects = RetryingObjects(objects, attempts=2, clock=self.clock, random=self.random)
        return self.open_on(objects)

    # -- the model ---------------------------------------------------------------------------------------------

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
        """Run an operation whose ``effects`` (path to new content) take place whole, in order, in part, or not."""
        seen = {path: self.count(path) for path in effects}
        before = {path: self.contents.get(path) for path in effects}
        late = [len(faulty._late) for faulty in self.faulty]
        try:
            operation()
        except ConflictError:
            # Only a change that somebody else made, or our own put whose answer was lost, may stand in the way.
            assert stale or any(self.was_ambiguous(path) for path in effects), "a conflict with nobody"
        except StoreError:
            pass  # in doubt: settled below
        else:
            assert not stale, "a stale operation replaced something newer"
            for path, content in effects.items():
                self.set(path, content)
            return
        # In doubt. Each effect took place or did not; what was lost on the way may still arrive.
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
        if any(len(faulty._late) > count for faulty, count in zip(self.faulty, late, strict=True)):
            self.late.append((effects, seen))

    @property
    def ambiguous(self):
        if not hasattr(self, "_ambiguous"):
            self._ambiguous = {}
        return self._ambiguous

    def was_ambiguous(self, path):
        return self.ambiguous.get(path, False)

    # -- what hosts do -----------------------------------------------------------------------------------------

    @rule(host=HOSTS, path=PATHS, content=CONTENTS)
    def overwrite(self, host, path, content):
        self.attempt(lambda: save(self.hosts[host], path, content), {path: content})

    @rule(host=HOSTS, path=PATHS, content=CONTENTS)
    def create(self, host, path, content):
        there = path in self.contents
        try:
            self.attempt(lambda: save(self.hosts[host], path, content, mode=WriteMode.CREATE), {path: content})
        except AlreadyExistsError:
            # Or it is our own create whose answer was lost: exclusive, so it cannot be told from somebody else's.
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
            writer._finish_rows()  # the chunks are on their way long before the commit
        except StoreError:
            return None
        return writer, path, content, self.count(path)

    @rule(opened=consumes(writers))
    def commit_writer(self, opened):
        if opened is None:
            return
        writer, path, content, seen = opened
        # If its chunks were collected, that is a StoreError: `attempt` finds then that nothing was published.
        self.attempt(writer.commit, {path: content}, stale=self.count(path) != seen)

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

    # -- what goes wrong ---------------------------------------------------------------------------------------

    @rule(
        host=HOSTS,
        fault=st.sampled_from([Fault.LATE, Fault.LOST_RESPONSE, Fault.REFUSED]),
        key_part=st.sampled_from(["/tree/", "/tree/", "/chunks/", "/leases/"]),
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
        """A late put took effect: it must be one that was asked for when the path was as it is in the model."""
        for effects, seen in self.late:
            for path, content in effects.items():
                if keys.record_key(path) == key and seen[path] == self.count(path) and self.real(path) == content:
                    self.set(path, content)
                    return
        raise AssertionError(f"a late put replaced something newer: {key}")

    @rule(seconds=st.sampled_from([5, 15, 30]))
    def time_passes(self, seconds):
        self.clock.sleep(seconds)

    @rule(host=HOSTS)
    def stay_busy_for_a_grace(self, host):
        """Renew the lease without a gap, so that what was learned long ago still counts."""
        for number in range(5):
            self.clock.sleep(9)
            self.overwrite(host, "busy", b"busy %d" % number)

    # -- what garbage collection will do -----------------------------------------------------------------------

    def mark(self):
        """Every chunk object that a live record reaches."""
        reached = set()
        for entry in find(self.open_on(self.tier), ""):
            manifest = observe(self.oracle, entry.path).manifest if not entry.is_directory else None
            if isinstance(manifest, Manifest):
                reached |= {row.name for row in expand_rows(self.oracle, manifest, entry.path)}
        return reached

    def stored(self):
        return {keys.parse_chunk_key(info.key, DigestKind.XXH3_128) for info in self.tier.list(keys.CHUNKS)}

    @precondition(lambda self: self.condemned is None)
    @rule()
    def condemn(self):
        """The first mark: publish what nothing reaches, however young it is."""
        self.epoch += 1
        self.condemned = frozenset(self.stored() - self.mark())
        listed = Condemned(self.epoch, self.clock.now_ns(), DigestKind.XXH3_128, self.condemned)
        self.tier.put(keys.condemned_key(self.epoch), [listed.encode()])
        self.sweep_at = self.clock.monotonic() + GRACE_S

    @precondition(lambda self: self.condemned is not None and self.clock.monotonic() >= self.sweep_at)
    @rule()
    def sweep(self):
        """The second mark, one grace later: delete what is unreached still."""
        self.deliver_late(0)
        self.deliver_late(1)
        doomed = self.condemned - self.mark()
        self.tier.delete([keys.chunk_key(name) for name in doomed])
        self.tier.delete([keys.condemned_key(self.epoch)])
        self.condemned = None

    # -- what must hold ----------------------------------------------------------------------------------------

    @invariant()
    def everybody_can_read_what_the_model_holds(self):
        if not hasattr(self, "contents"):
            return
        listed = {entry.path for entry in find(self.oracle, "") if not entry.is_directory}
        assert listed == set(self.contents)
        for path in ("a", "b", "d/a", "d/b", "busy"):
            assert self.real(path) == self.contents.get(path)


TestTwoHosts = TwoHosts.TestCase
TestTwoHosts.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
