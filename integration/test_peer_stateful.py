"""Runs on three failing hosts that hold each other's changes. A run that was acknowledged at ``peer`` survives its host."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch
from drawing import SHARE
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from peer_cluster import LEASE_S, Cluster, until

import tierfs
from tierfs.train import Latest, Manager

pytest.importorskip("cryptography")
HOSTS = st.sampled_from([0, 1, 2])
WAIT_S = 90
FLOATS = 40_000  # more than a record holds, so that there are chunks
FAST, SLOW = {}, {"bandwidth": 1}  # a slow host brings nothing but small files to the object tier

_managers = {}
_handles = {}


def begin(root, options):
    """Begin to train: restore. Return the step and the numbers that were found."""
    if root not in _managers:
        _managers[root] = Manager(root, save=(), keep=[Latest(2)], ack="peer", on_stale="ignore", timeout=5, **options)
    state = {"model": torch.zeros(FLOATS)}
    restored = _managers[root].restore(state)
    return None if restored is None else (restored.step, sorted(set(state["model"].tolist())))


def read(root, state_dir):
    """Restore on a host without local tiers."""
    with Manager(root, save=(), ram="0", nvme="0", state_dir=state_dir) as manager:
        state = {"model": torch.zeros(FLOATS)}
        restored = manager.restore(state)
    return None if restored is None else (restored.step, sorted(set(state["model"].tolist())))


def save(root, step, number):
    _handles[root] = _managers[root].save(step, {"model": torch.full((FLOATS,), float(number))})


def is_acknowledged(root, timeout):
    """Wait for the newest save. Raise its error if it has failed."""
    handle = _handles[root]
    if not handle.settle(timeout):
        return False
    if handle.error is not None:
        raise handle.error
    return True


def step(**arguments):
    """Make a rule. If it fails, the teardown only tidies."""

    def wrap(method):
        def checked(self, **arguments):
            self.is_sound = False
            method(self, **arguments)
            self.is_sound = True

        checked.__name__ = method.__name__
        return rule(**arguments)(checked)

    return wrap


class Run:
    def __init__(self, root):
        self.root = root
        self.host = None  # the one that trains; None when that is lost
        self.next_step = 0
        self.saved = {}  # by step, the numbers that were saved for it
        self.last = None  # the newest save: step and number
        self.acked = (-1, 0)  # the newest acknowledged one
        self.copies = 9  # hosts that have it, at least; 9 if the object tier has it

    def acknowledge(self, copies):
        if self.acked != self.last:
            self.acked, self.copies = self.last, copies

    def check(self, found):
        if found is None:
            assert self.acked[0] < 0, f"{self.acked} is lost"
            return
        step, numbers = found
        assert len(numbers) == 1, "parts of two saves"
        assert int(numbers[0]) in self.saved[step]
        assert (step, numbers[0]) >= self.acked, f"{found} is older than {self.acked}"


class TrainingOnThreeHosts(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="tierfs-test-"))
        os.environ["TIERFS_STATE_DIR"] = str(self.base / "bare")
        url = f"file://{self.base}/store"
        tierfs.init(url, lease_s=LEASE_S)
        self.cluster = Cluster(self.base, url)
        self.lives = self.number = 0
        self.runs = []
        self.is_sound = True
        self.cuts, self.stalled, self.killed = set(), set(), set()

    @initialize(peers=st.sampled_from([1, 2]), nvme=st.sampled_from(["0", "64MiB"]))
    def make_hosts(self, peers, nvme):
        self.peers, self.nvme = peers, nvme
        self.hosts = [self.new_host() for _ in range(3)]

    def new_host(self):
        self.lives += 1
        sizes = {"ram": "32MiB", "nvme": self.nvme, "peer_ram": "16MiB", "peer_nvme": "16MiB"}
        return self.cluster.host(f"host{self.lives}", peers=self.peers, **sizes, **SLOW).start()

    def teardown(self):
        try:
            if self.is_sound:
                self.settle()
        finally:
            self.cluster.close()
            shutil.rmtree(self.base, ignore_errors=True)

    # -- what the model knows ------------------------------------------------------------------------------------------

    def is_up(self, host):
        return not {host} & (self.cuts | self.stalled | self.killed)

    def can_acknowledge(self, host):
        others = sum(self.is_up(each) for each in self.hosts if each is not host)
        return self.is_up(host) and others >= self.peers

    def run_of(self, host):
        """Return the run that a host trains: its own, else a lost host's, else a new one."""
        for run in self.runs:
            if run.host is host:
                return run
        run = next((run for run in self.runs if run.host is None and run.copies == 9), None)
        if run is None:
            run = Run(f"tierfs::{self.cluster.url}/run{len(self.runs)}")
            self.runs.append(run)
        # A flusher that the program starts is never slow: `settle` could not tell it from its own.
        found = host.run(begin, run.root, {name: value for name, value in host.options.items() if name != "bandwidth"})
        run.check(found)
        run.host, run.next_step = host, 0 if found is None else found[0] + 1
        return run

    # -- rules ---------------------------------------------------------------------------------------------------------

    @step(host=HOSTS)
    def save(self, host):
        host = self.hosts[host]
        if host in self.stalled:
            return
        run = self.run_of(host)
        self.number += 1
        step, run.next_step = run.next_step, run.next_step + 1
        run.saved.setdefault(step, set()).add(self.number)
        run.last = step, self.number
        self.killed.discard(host)  # the program starts a flusher
        host.run(save, run.root, step, self.number)
        if self.can_acknowledge(host):
            assert host.run(is_acknowledged, run.root, WAIT_S), "not acknowledged in time"
            run.acknowledge(1 + self.peers)

    @step(host=HOSTS)
    def look(self, host):
        """See whether a save was acknowledged in the meantime."""
        host = self.hosts[host]
        for run in self.runs:
            if run.host is host and run.last and host not in self.stalled and host.run(is_acknowledged, run.root, 0):
                run.acknowledge(1 + self.peers)

    @step(host=HOSTS)
    def kill_flusher(self, host):
        self.hosts[host].kill()
        self.stalled.discard(self.hosts[host])
        self.killed.add(self.hosts[host])

    @step(host=HOSTS, settings=st.sampled_from([FAST, SLOW]))
    def restart_flusher(self, host, settings):
        self.start_anew(self.hosts[host], settings)

    def start_anew(self, host, settings):
        host.kill()
        host.settings = {name: value for name, value in host.settings.items() if name != "bandwidth"} | settings
        host.start()
        self.stalled.discard(host)
        self.killed.discard(host)

    @step(host=HOSTS)
    def stall_flusher(self, host):
        if self.hosts[host] not in self.killed:
            self.hosts[host].signal(signal.SIGSTOP)
            self.stalled.add(self.hosts[host])

    @step(host=HOSTS)
    def go_on(self, host):
        self.hosts[host].signal(signal.SIGCONT)
        self.stalled.discard(self.hosts[host])

    @step(host=HOSTS, others=st.sampled_from([(), (0,), (1,), (2,)]), both=st.booleans())
    def cut(self, host, others, both):
        """Cut a host off, or only the way to one other host, or from here to there."""
        host, others = self.hosts[host], [self.hosts[other] for other in others if other != host]
        if self.cluster.switch is None:
            return
        if others and not both:
            self.cluster.half_cut(host, others[0])
        else:
            self.cluster.cut(host, *others)
        self.cuts |= {host, *others}

    @step(host=HOSTS)
    def heal(self, host):
        if self.hosts[host] in self.cuts:
            for each in self.cuts:
                self.cluster.heal(each)
            self.cuts.clear()

    @step(host=HOSTS)
    def lose_host(self, host):
        """Replace a host by a new one. All that it had is lost."""
        if any(run.copies <= 1 for run in self.runs):
            self.settle()
        lost = self.hosts[host]
        lost.remove()
        for names in (self.cuts, self.stalled, self.killed):
            names.discard(lost)
        for run in self.runs:
            run.copies -= run.copies != 9
            if run.host is lost:
                run.host = None
        self.hosts[host] = self.new_host()

    @step()
    def settle_all(self):
        self.settle()

    def settle(self):
        """Let everything work again, and look for what was acknowledged."""
        for host in self.cuts:
            self.cluster.heal(host)
        self.cuts.clear()
        for host in self.hosts:
            self.start_anew(host, FAST)
        try:
            until(lambda: not any(self.is_busy(host) for host in self.hosts), WAIT_S)
        except AssertionError:
            print(self.cluster.report())
            raise
        reader = self.hosts[0].program()
        for run in self.runs:
            run.check(reader.run(read, run.root, os.environ["TIERFS_STATE_DIR"]))
            run.copies = 9

    def is_busy(self, host):
        found = host.status()
        assert not found["conflict_files"], found["conflicts"]
        return found["queue_files"] or found["peers"]["holds_files"]


TestTrainingOnThreeHosts = pytest.mark.timeout(1800)(TrainingOnThreeHosts.TestCase)
TrainingOnThreeHosts.TestCase.settings = hypothesis.settings(
    max_examples=int(os.environ.get("TIERFS_STATEFUL_EXAMPLES", max(3, 10 // SHARE))),
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],  # an example takes seconds, and never twice the same
)
