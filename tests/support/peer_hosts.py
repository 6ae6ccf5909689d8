"""Hosts on one machine: each has a state directory, a flusher process and an address of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import fsspec

from support import forked_flusher
from tierfs.host.host import Host
from tierfs.host.rpc.protocol import connect

LEASE_S = 2


class PeerHost:
    """A host with a flusher that runs until `kill` or `lose`.

    Args:
        base: Holds the state directories of all hosts.
        name: The host's name.
        url: The store, without ``tierfs::``.
        port: The TCP port on 127.0.0.1 to listen at.
        **settings: Settings of the tiers. ``bandwidth=1`` lets nothing but small files reach the object tier.
    """

    def __init__(self, base: Path, name: str, url: str, port: int, **settings):
        self.state = base / name
        self.state.mkdir(mode=0o700)
        self.url = url
        tiers = {"ram": "64MiB", "nvme": "256MiB", "peers": 1, "peer_ram": "64MiB", "peer_nvme": "64MiB"}
        self.settings = {**tiers, "peer_listen": f"127.0.0.1:{port}", **settings}
        self._flusher = None

    def start(self):
        arguments = ["flusher", "run", f"tierfs::{self.url}"]
        for name, value in {"state_dir": self.state, **self.settings}.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)]
        self._flusher = self._spawn(arguments)
        until(lambda: any(map(self._answers, self.state.glob("stores/*"))), 60)
        return self

    @property
    def pid(self):
        return self._flusher.pid

    def _spawn(self, arguments):
        return forked_flusher.zygote.start(forked_flusher.run, arguments, str(self.state / "sidecar.log"), daemon=True)

    def _answers(self, directory):
        connection = connect(directory, 1)
        if connection is not None:
            connection.close()
        return connection is not None

    def open(self, **options):
        """Return a filesystem of a process of this host, and the store's root."""
        settings = {**self.settings, "state_dir": str(self.state), **options}
        return fsspec.core.url_to_fs(f"tierfs::{self.url}", skip_instance_cache=True, **settings)

    def status(self):
        fs, root = self.open()
        return fs.status(root)

    def log(self):
        return (self.state / "sidecar.log").read_text()

    def signal(self, number):
        """Send a signal to the host's flusher, and to one that a program has started."""
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (directory / "cmdline").read_bytes().split(b"\0")
                if b"flusher" in words and os.fsencode(self.state) in words:
                    os.kill(int(directory.name), number)
        if self._flusher is not None and self._flusher.exitcode is None:
            os.kill(self._flusher.pid, number)

    def kill(self):
        """Kill the flusher. What the host has stays."""
        self.signal(signal.SIGKILL)
        if self._flusher is not None:
            self._flusher.join(60)

    def lose(self):
        """Kill the flusher, and remove all that the host had."""
        self.kill()
        self.remove()

    def remove(self):
        with contextlib.suppress(OSError):
            shutil.rmtree(Host(self.state).segments)
        shutil.rmtree(self.state, ignore_errors=True)

    def close(self):
        if self._flusher is not None:
            self.kill()
        if self.state.exists():
            self.remove()


def until(check, seconds):
    """Wait until ``check()`` is true, and return its value."""
    end = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
    return value


def bare(url):
    """Return a filesystem without local tiers, and the store's root."""
    state = os.environ["TIERFS_STATE_DIR"]
    return fsspec.core.url_to_fs(f"tierfs::{url}", skip_instance_cache=True, ram="0", nvme="0", state_dir=state)
