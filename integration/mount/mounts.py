"""Mounted stores for tests. They need /dev/fuse; a state directory stands for a host."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from leftovers import flushers
from servers.server import find_program

import tierfs
from tierfs.mount.attachment import KIND, detach, mounted_at

PROGRAM = [sys.executable, "-m", "tierfs.cli"]


def require():
    """Skip a module if nothing can be mounted."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        pytest.skip(f"/dev/fuse: {error.strerror}", allow_module_level=True)
    if os.geteuid() and shutil.which("fusermount3") is None:
        pytest.skip("fusermount3 is missing, and this is not root", allow_module_level=True)


def require_program(name, package=None):
    """Return the path of a program, or skip the test if the program is missing."""
    found = find_program(name)
    if found is None:
        pytest.skip(f"{name} is missing: apt-get install {package or name}")
    return found


def run(*command, cwd=None, timeout=120, environment=None):
    """Run a program and return its output. On failure, raise an error with the output."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **(environment or {})},
    )
    assert not done.returncode, f"{command}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


class Host:
    """A host with one mounted store, its own state directory and its own mount point.

    Args:
        base: A directory of its own.
        url: The store.
        **options: As for `tierfs.mount`.
    """

    def __init__(self, base: Path, url: str, **options) -> None:
        self.state, self.path = base / "state", base / "mnt"
        self.path.mkdir(parents=True)
        self.url = url
        self.options = {"ram": "256MiB", "nvme": "256MiB", **options, "state_dir": str(self.state)}
        self.mount = None

    @property
    def log(self):
        return (self.state / "mount" / "mount.log").read_text()

    def start(self, **options):
        self.mount = tierfs.mount(self.url, self.path, **{**self.options, **options})
        return self.path

    def remount(self):
        """Unmount cleanly, and mount again."""
        self.mount.close()
        self.start()

    def end(self):
        """Unmount in any state, and leave no process running."""
        if mounted_at(self.path) == KIND:
            detach(self.path, lazy=True)
        if self.mount is not None:
            self.kill()
        for pid in flushers(self.state):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.mount.pid, signal.SIGKILL)
        self.mount._process.wait(10)
        self.mount = None
