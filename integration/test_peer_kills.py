"""A host that saves at ``peer`` is killed, stopped and lost, and so is the host that holds its changes.

``TIERFS_TEST_ROUNDS`` is the number of rounds, ``TIERFS_TEST_SEED`` the first seed. Each round has a fresh owner, whose
writer saves until it is killed, and one or two incidents. Then the owner is lost, or comes back. Each file that was
acknowledged has to be in the store with its bytes, or replaced by a later file of the same writer, and no change may be
kept as a conflict.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import peer_writer
import pytest
from servers.server import free_ports

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]

from support.peer_hosts import LEASE_S, PeerHost, bare, until

import tierfs

pytest.importorskip("cryptography")

SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))
ROUNDS = int(os.environ.get("TIERFS_TEST_ROUNDS", "4"))
SETTLE_S = 120
INCIDENTS = ("kill owner", "kill holder", "kill both", "stop owner", "stop holder", "kill writer")
ENDS = ("lose owner", "lose owner while it sends", "owner returns")


class World:
    def __init__(self, base):
        self.base, self.url = base, f"file://{base}/store"
        tierfs.init(self.url, lease_s=LEASE_S)
        self.holder = self.host("holder")
        self.holder.start()
        self.kills = 0

    def host(self, name, **settings):
        return PeerHost(self.base, name, self.url, *free_ports(1), **settings)

    def restart(self, host):
        host.kill()
        self.kills += 1
        host.start()

    def run(self, seed):
        noise = random.Random(seed)
        bandwidth = noise.choice([{"bandwidth": 1}, {"bandwidth": 500_000}, {}])
        owner = self.host(f"owner{seed}", **bandwidth)
        owner.start()
        incidents, end = noise.sample(INCIDENTS, noise.choice([0, 1, 2])), noise.choice(ENDS)
        print(seed, bandwidth, incidents, end)
        environment = {f"TIERFS_{name.upper()}": str(value) for name, value in owner.settings.items()}
        environment |= {"TIERFS_STATE_DIR": str(owner.state)}
        log = self.base / f"written{seed}"
        command = [sys.executable, peer_writer.__file__, f"tierfs::{self.url}", str(seed), "peer"]
        with log.open("wb") as out, log.with_suffix(".errors").open("wb") as errors:
            writer = subprocess.Popen(command, env={**os.environ, **environment}, stdout=out, stderr=errors)
        try:
            until(lambda: log.read_bytes().count(b"\n") >= 2, SETTLE_S)
            for incident in incidents:
                time.sleep(noise.random() * 1.5)
                self.strike(incident, owner, writer)
            time.sleep(noise.random() * 1.5)
            if end == "lose owner":
                writer.kill()
                self.kills += 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                if end == "lose owner while it sends":
                    owner.kill()
                writer.kill()
            writer.wait()
        if end == "owner returns":
            owner.kill()
            time.sleep(noise.choice([0, LEASE_S + 1]))
            owner.settings.pop("bandwidth", None)
            owner.start()
            until(lambda: owner.status()["queue_files"] == 0, SETTLE_S)
            assert owner.status()["conflict_files"] == 0
        elif end == "lose owner":
            owner.lose()
        else:
            owner.remove()
        self.kills += 1
        self.check(seed, [int(line) for line in log.read_text().splitlines()])
        owner.close()
        until(lambda: self.holder.status()["peers"]["holds_files"] == 0, SETTLE_S)
        assert self.holder.status()["conflict_files"] == 0

    def strike(self, incident, owner, writer):
        what, _, who = incident.partition(" ")
        if who == "writer":
            writer.kill()
            self.kills += 1
            return
        hosts = {"owner": [owner], "holder": [self.holder], "both": [owner, self.holder]}[who]
        for host in hosts:
            if what == "kill":
                host.kill()
                self.kills += 1
            else:
                host.signal(signal.SIGSTOP)
        time.sleep(0 if what == "kill" else LEASE_S + 1)
        for host in hosts:
            host.start() if what == "kill" else host.signal(signal.SIGCONT)

    def check(self, seed, acknowledged):
        """Check the last acknowledged file of each path, or a later one that was not acknowledged any more."""
        last = {number - number % 3: number for number in acknowledged}
        fs, root = bare(self.url)

        def is_right(path, number):
            with contextlib.suppress(FileNotFoundError):
                found = fs.cat_file(f"{root}/run{seed}/{path}")
                return found in [peer_writer.content(seed, each) for each in range(number, path + 3)]
            return False

        for path, number in last.items():
            until(lambda path=path, number=number: is_right(path, number), SETTLE_S)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    base = tmp_path_factory.mktemp("peers")
    before = os.environ.get("TIERFS_STATE_DIR")
    os.environ["TIERFS_STATE_DIR"] = str(base / "bare")
    made = World(base)
    yield made
    print("kills:", made.kills)
    made.holder.close()
    os.environ.pop("TIERFS_STATE_DIR") if before is None else os.environ.__setitem__("TIERFS_STATE_DIR", before)


@pytest.mark.parametrize("seed", range(SEED, SEED + ROUNDS))
def test_nothing_acknowledged_at_peer_is_lost(world, seed):
    try:
        world.run(seed)
    except BaseException:
        print(world.holder.status(), world.holder.log()[-5000:])
        raise
