"""A run moves between two failing hosts. A restore finds the newest step acknowledged at `object`, or a newer one."""

import os
import shutil
import signal
import tempfile

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from support import opened
from support.waiting import HANG_S

import tierfs
from tierfs.errors import AlreadyExistsError, ConflictError, NotFoundError, StoreError
from tierfs.train import Latest, Manager
from tierfs.train.save import RunWriter

HOSTS = st.sampled_from([0, 1])
WAIT_S = HANG_S


class Life:
    """A host until it is lost: its state directory, the manager of its job, and the job's saves."""

    def __init__(self, state_dir):
        self.options = {"ram": "16MiB", "nvme": "0", "state_dir": state_dir}
        self.manager = None
        self.next_step = 0
        self.saves = []  # handles, and the numbers of their contents
        self.own = set()  # contents that any job saved on this host
        self.flusher = None  # its process id, once the manager has reported it
        self.is_stalled = False

    def signal(self, number):
        """Send the flusher a signal. Return whether the flusher exists."""
        if self.manager is not None:
            self.flusher = self.manager._writer.status()["flusher"].get("pid", self.flusher)
        try:
            if self.flusher is not None:
                os.kill(self.flusher, number)
        except ProcessLookupError:
            self.flusher = None
        return self.flusher is not None

    def stall(self):
        self.is_stalled = self.signal(signal.SIGSTOP)

    def go_on(self):
        if self.is_stalled:
            self.signal(signal.SIGCONT)
            self.is_stalled = False

    def kill(self):
        self.go_on()
        self.signal(signal.SIGKILL)
        self.flusher = None

    def close(self):
        if self.manager is not None:
            self.manager.close()
            self.manager = None


class TrainingOnTwoHosts(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.directory = tempfile.mkdtemp()
        tierfs.init(f"file://{self.directory}/store")
        self.root = f"tierfs::file://{self.directory}/store/run"
        self.lives = 0
        self.hosts = [self.new_host(), self.new_host()]
        self.number = 0  # of the newest content
        self.saved = {}  # by step, the contents that were saved for it
        self.acked = {}  # by step, the newest content that was acknowledged at `object`

    def new_host(self):
        self.lives += 1
        return Life(f"{self.directory}/host-{self.lives}")

    def teardown(self):
        for host in self.hosts:
            host.go_on()
            host.close()
        opened.close_stores()
        for host in self.hosts:
            host.kill()
        shutil.rmtree(self.directory, ignore_errors=True)  # a killed process may still be writing

    def begin(self, host):
        """Start the job on a host: restore, and continue behind the restored step."""
        host.manager = Manager(self.root, save=(), keep=[Latest(2)], on_stale="ignore", timeout=WAIT_S, **host.options)
        host.next_step = self.check_restore(host) + 1
        return host.manager

    def check_restore(self, host):
        state = {"model": torch.zeros(3000)}
        restored = host.manager.restore(state)
        if restored is None:
            assert not self.acked
            return -1
        numbers = set(state["model"].tolist())
        assert len(numbers) == 1, "parts of two saves"
        assert restored.step >= max(self.acked, default=-1)
        assert numbers <= self.saved[restored.step]
        # A later save of a step may replace an acknowledged one. An earlier save may not. But a host sees its own
        # save until its flusher learns that another host's save of that step was published first.
        assert min(numbers) >= self.acked.get(restored.step, 0) or numbers <= host.own
        return restored.step

    @rule(host=HOSTS, fails=st.sampled_from([False, False, False, True]))
    def save(self, host, fails):
        host = self.hosts[host]
        manager = host.manager or self.begin(host)
        self.number += 1
        step, host.next_step = host.next_step, host.next_step + 1
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(RunWriter, "write_data", self.refuse)
            handle = manager.save(step, {"model": torch.full((3000,), float(self.number))})
            manager.wait(timeout=WAIT_S)
        if handle.error is None:
            assert not fails
            host.saves.append((handle, self.number))
            host.own.add(self.number)
            self.saved.setdefault(step, set()).add(self.number)
        else:
            # The other host may have saved this step meanwhile. Its content stays.
            told = (AlreadyExistsError, ConflictError)
            assert isinstance(handle.error, (*told, StoreError) if fails else told)

    @staticmethod
    def refuse(*_):
        raise StoreError("the disk is full")

    @rule(host=HOSTS)
    def wait_for_object(self, host):
        host = self.hosts[host]
        if not host.saves or host.is_stalled or host.manager is None:
            return
        handle, number = host.saves[-1]
        try:
            handle.wait("object", timeout=WAIT_S)
        except ConflictError:  # the other host saved this step too, and its record was first
            assert len(self.saved[handle.step]) > 1
        except NotFoundError:  # the other host went on from this step or its own, and no longer keeps it
            assert max(self.saved) > handle.step
        else:
            self.acked[handle.step] = max(number, self.acked.get(handle.step, 0))

    @rule(host=HOSTS)
    def restore(self, host):
        host = self.hosts[host]
        if host.manager is None:
            self.begin(host)
        else:
            self.check_restore(host)

    @rule(host=HOSTS)
    def end_the_job(self, host):
        """End the job. The flusher continues with the job's saves."""
        self.hosts[host].saves.clear()
        self.hosts[host].close()

    @rule(host=HOSTS)
    def kill_flusher(self, host):
        self.hosts[host].kill()

    @rule(host=HOSTS)
    def stall_flusher(self, host):
        self.hosts[host].stall()

    @rule(host=HOSTS)
    def go_on(self, host):
        self.hosts[host].go_on()

    @rule(host=HOSTS)
    def lose_host(self, host):
        """Replace a host by a new one. Everything on the old one is lost."""
        self.hosts[host].kill()
        self.hosts[host].close()
        self.hosts[host] = self.new_host()


TestTrainingOnTwoHosts = pytest.mark.timeout(900)(TrainingOnTwoHosts.TestCase)
TrainingOnTwoHosts.TestCase.settings = hypothesis.settings(
    max_examples=int(os.environ.get("TIERFS_STATEFUL_EXAMPLES", "10")), stateful_step_count=20, deadline=None
)
