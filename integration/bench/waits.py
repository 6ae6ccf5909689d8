"""What a program waits for the level `local` while other processes keep the processors busy.

    python integration/bench/waits.py [--busy 0 8 30] [--files 40] [--rounds 1] [--json]

Each figure is measured with so many processes that compute all the time, in a session of their own, as a job's ranks
have:

- ``write``: milliseconds of a file of 3 KB by ``fs.pipe_file`` at ``ack="local"``, median;
- ``fsync``: milliseconds of the same by write, fsync and close through a mount at ``local``, median;
- ``clone``: seconds of ``git clone`` of a repository of 60 files into the mount;
- ``tar``: seconds of ``tar x`` of these files into the mount.

The store is a directory with an nvme tier. All of it is on the disk, because the level needs one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
from harness import parser, say, timed

import tierfs

SMALL = os.urandom(3 << 10)
REPOSITORY_FILES = 60


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep the processors busy with so many processes while the block runs."""
    argv = [
        sys.executable,
        "-c",
        f"import os\nfor _ in range({count - 1}): os.fork() or exec('while 1: pass')\nwhile 1: pass",
    ]
    first = subprocess.Popen(argv, start_new_session=True) if count else None
    try:
        time.sleep(1 if first else 0)
        yield
    finally:
        if first is not None:
            os.killpg(first.pid, 9)
            first.wait()


@contextlib.contextmanager
def place(environment: dict[str, str]) -> Iterator[Path]:
    """Yield a directory on the disk. Stores opened in the block have their state there."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="tierfs-bench-") as name:
        os.environ |= {"TIERFS_STATE_DIR": f"{name}/state", "TIERFS_RAM": "1GiB", "TIERFS_NVME": "2GiB", **environment}
        try:
            yield Path(name)
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def mounted(url: str, directory: Path) -> Iterator[Path]:
    directory.mkdir()
    cli = [sys.executable, "-m", "tierfs.cli"]
    subprocess.run([*cli, "mount", url, directory, "--ack", "local"], check=True, stdout=subprocess.DEVNULL)
    try:
        yield directory
    finally:
        subprocess.run([*cli, "unmount", directory], check=True, stdout=subprocess.DEVNULL)


def write_and_flush(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(SMALL)
        os.fsync(file.fileno())


def repository(directory: Path) -> tuple[Path, Path]:
    """Make a git repository of small files, and a tar file of the same. Return both."""
    source, tar = directory / "source", directory / "source.tar"
    for number in range(REPOSITORY_FILES):
        path = source / f"package{number % 6}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(1500).hex().encode())
    subprocess.run(["tar", "cf", tar, "-C", directory, "source"], check=True)
    git = ["git", "-C", source, "-c", "user.name=bench", "-c", "user.email=bench@example.invalid"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "files"]):
        subprocess.run([*git, *arguments], check=True)
    return source, tar


def measured(count: int, files: int) -> dict[str, float]:
    """Return the figures beside so many busy processes."""
    with place({}) as disk:
        url = f"file://{disk}/store"
        tierfs.init(url)
        source, tar = repository(disk)
        fs, root = fsspec.url_to_fs(f"tierfs::{url}", ack="local")
        fs.pipe_file(f"{root}/first", SMALL)
        with mounted(f"tierfs::{url}", disk / "mount") as mount:
            write_and_flush(mount / "second")
            with busy(count):
                took = [timed(fs.pipe_file, f"{root}/w{number}", SMALL) for number in range(files)]
                found = {"write, ms": statistics.median(took) * 1e3}
                took = [timed(write_and_flush, mount / f"f{number}") for number in range(files)]
                found["fsync, ms"] = statistics.median(took) * 1e3
                clone = ["git", "-c", "gc.auto=0", "clone", "-q", "--no-local", source, mount / "clone"]
                found["clone, s"] = timed(lambda: subprocess.run(clone, check=True))
                found["tar, s"] = timed(lambda: subprocess.run(["tar", "xf", tar, "-C", mount], check=True))
            fs.wait(root, "object", 300)
    return found


def main() -> None:
    arguments = parser(__doc__, "directory of the stores")
    arguments.add_argument("--busy", type=int, nargs="+", default=[0, 8, 30])
    arguments.add_argument("--files", type=int, default=40)
    arguments.add_argument("--rounds", type=int, default=1)
    given = arguments.parse_args()
    tempfile.tempdir = given.directory
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what it has started
    rows: dict[str, dict[str, float]] = {}
    for count in given.busy:
        rounds = [measured(count, given.files) for _ in range(given.rounds)]
        rows[f"{count} busy"] = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    say({"date": time.strftime("%Y-%m-%d"), "rows": rows}, as_json=given.json)


if __name__ == "__main__":
    main()
