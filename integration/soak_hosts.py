"""Hosts of the soak: a state directory, a folder of segments and a mount, on small filesystems that can be full."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from support.killing import Zygote

WRITERS = 3


class Slot:
    """A writer's place: a directory of the store, and the process that works there now."""

    def __init__(self, host, number):
        self.host, self.number = host, number
        self.directory, self.zygote = f"h{host.number}w{number}", "torch" if number == WRITERS else ""
        self.child = self.socket = self.flight = self.died_at = None


class Host:
    """A host: a state directory, a folder of segments, writers, commands, a flusher and a mount."""

    def __init__(self, number, base, slots):
        self.number, self.commands = number, []
        self.state, self.shm, self.mounted = (base / f"{name}{number}" for name in ("state", "shm", "mount"))
        self.slots = [Slot(self, each) for each in range(slots)]
        self.flusher = self.mount = self.due_at = None
        self.is_older_due = self.has_conflicts = False
        self.node = None  # its place in a network of peers
        # Nothing can be written to the directory itself while the mount is away.
        mount_small(self.mounted, "64k")
        self.mounted /= "at"
        self.mounted.mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(self.mounted.parent)], check=True)
        self.make()

    def make(self, *paths):
        """Mount new filesystems for the state directory and the segments."""
        for path in paths or (self.state, self.shm):
            unmount(path)
            mount_small(path, "64m" if path == self.shm else "160m")


def unmount(path):
    subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)


def mount_small(path, size):
    """Mount a filesystem of its own, so that it can be full."""
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"mode=700,size={size}", "tierfs-soak", str(path)], check=True)


def fill(directory):
    """Take all that is left of a filesystem. Return the file that has it."""
    with (directory / "ballast").open("ab") as file, contextlib.suppress(OSError):
        while True:  # a page may become free meanwhile
            free = os.statvfs(directory)
            os.posix_fallocate(file.fileno(), file.tell(), max(1, free.f_bfree) * free.f_frsize)
            file.seek(0, os.SEEK_END)
    return directory / "ballast"


def older_zygote(base, commit, program):
    """Return a process that forks flushers with the code of an older commit."""
    root = Path(__file__).parents[1]
    (base / "older").mkdir()
    archive = subprocess.run(["git", "archive", commit, "tierfs"], cwd=root, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=base / "older", input=archive.stdout, check=True)
    for kernels in (root / "tierfs").glob("_kernels*.so"):
        shutil.copy(kernels, base / "older" / "tierfs")
    os.environ["PYTHONPATH"] = str(base / "older")
    try:
        return Zygote(program)
    finally:
        del os.environ["PYTHONPATH"]
