"""A mount compared with a bare mfusepy passthrough and with rclone's mount, and the time of listings.

python integration/bench/mount.py [--bytes 1GiB] [--files 10000] [--git-files 2000] [--rounds 3] [--json]

In each round, every mount writes and reads once. Reads are of 4 MiB, after the kernel's pages are dropped.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from harness import Aims, parser, say
from leftovers import end_flushers
from servers import ministack
from servers.server import Server, find_program

import tierfs
from tierfs.session import init, open_store, parse_url
from tierfs.store import save
from tierfs.units import parse_size

PIECE_BYTES = 4 << 20
MOUNT_S = 20
FULL_FILES, FULL_GIT_FILES = 10_000, 2_000


def write(path: Path, size: int, pool: memoryview) -> float:
    """Return the seconds until a new file of this size is synced and closed."""
    begin = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for number, offset in enumerate(range(0, size, PIECE_BYTES)):
        start = number * 1_000_003 % (len(pool) - PIECE_BYTES)  # no two pieces have a block in common
        os.write(fd, pool[start : start + min(PIECE_BYTES, size - offset)])
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - begin


def read(path: Path, size: int, buffer: bytearray) -> float:
    """Return the seconds to read a file of this size from start to end."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.perf_counter()
    done = 0
    while count := os.readv(fd, [buffer]):
        done += count
    seconds = time.perf_counter() - begin
    os.close(fd)
    assert done == size, f"{path}: {done} of {size} bytes"
    return seconds


@contextlib.contextmanager
def mounted_by(command: list[str], directory: Path, environment: dict[str, str]) -> Iterator[Path]:
    """Run a mount program in the foreground, and yield its mount point."""
    directory.mkdir()
    process = subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)
    try:
        ends = time.monotonic() + MOUNT_S
        while not os.path.ismount(directory):
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"{command[0]} did not mount")
            time.sleep(0.05)
        yield directory
    finally:
        subprocess.run(["fusermount3", "-u", "-z", directory], check=False)
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def everybody(server: Server, base: Path, size: int) -> Iterator[tuple[dict[str, Path], list[str]]]:
    """Yield the mounts by name, and the errors of those that failed."""
    found, missing = {}, []
    with contextlib.ExitStack() as mounts:
        url = f"s3://{server.new_root()}"
        init(url, options=server.options)
        (base / "tierfs").mkdir()
        room = {"ram": size * 5 // 2 + (256 << 20), "nvme": size * 3}
        options = {"options": server.options, "ack": "staged", "state_dir": str(base / "state"), **room}
        mounts.enter_context(tierfs.mount(f"tierfs::{url}", base / "tierfs", **options))
        found["tierfs"] = base / "tierfs"
        shared = Path(mounts.enter_context(tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir="/dev/shm")))
        library = {"FUSE_LIBRARY_PATH": "libfuse3.so.3"}
        peers = {
            "passthrough": (
                [sys.executable, str(HERE / "mount_passthrough.py"), str(shared), str(base / "passthrough")],
                library,
            ),
            "rclone": (rclone(server, base / "rclone", base / "cache"), {"RCLONE_CONFIG": "/dev/null"}),
        }
        for name, (command, environment) in peers.items():
            try:
                found[name] = mounts.enter_context(mounted_by(command, base / name, environment))
            except (OSError, RuntimeError) as error:
                missing.append(f"{name}: {error}")
        yield found, missing


def rclone(server: Server, directory: Path, cache: Path) -> list[str]:
    """Return the command of rclone's mount of a new bucket, with the cache that allows any read and write."""
    options = server.options
    remote = f":s3,provider=Other,access_key_id={options['key']},secret_access_key={options['secret']}"
    remote += f",endpoint='{options['endpoint_url']}':{server.new_root()}"
    program = find_program("rclone") or "rclone"
    return [program, "mount", "--vfs-cache-mode", "full", "--cache-dir", str(cache), remote, str(directory)]


def streams(server: Server, base: Path, size: int, rounds: int) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return the seconds to write and sync, and to read, by mount, and the errors of mounts that failed."""
    taken: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    buffer = bytearray(PIECE_BYTES)
    with everybody(server, base, size) as (mounts, missing):
        for number in range(rounds + 1):  # the first round warms up
            pool = memoryview(os.urandom(16 * PIECE_BYTES))
            for name, directory in mounts.items():
                seconds = {"write": write(directory / "file", size, pool)}
                settle(name, directory)
                seconds["read"] = read(directory / "file", size, buffer)
                if number:
                    for what, one in seconds.items():
                        taken[name][what].append(one)
    medians = {name: {what: statistics.median(one) for what, one in by.items()} for name, by in taken.items()}
    return medians, missing


def settle(name: str, directory: Path) -> None:
    """Wait until uploads are done, so that a read has the processors to itself."""
    if name == "tierfs":
        while os.getxattr(directory / "file", "user.tierfs.level") != b"object":
            time.sleep(0.1)
        assert os.getxattr(directory / "file", "user.tierfs.tier") == b"ram"
    elif name == "rclone":
        time.sleep(6)  # rclone begins to upload five seconds after the close


def listings(base: Path, files: int, rounds: int) -> dict[str, float]:
    """Return the seconds of `ls -l` in a directory of so many files, in a new mount and again."""
    taken = defaultdict(list)
    url = f"file://{base}/store"
    init(url)
    store, _ = open_store(parse_url(url))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: save(store, f"d/file-{number:06}", b"x" * 100), range(files)))
    directory = base / "mnt"
    directory.mkdir()
    for _ in range(rounds):
        with tierfs.mount(url, directory, state_dir=str(base / "state"), ram="64MiB", nvme="0", ack="object"):
            for what in ("cold", "warm"):
                begin = time.perf_counter()
                listed = subprocess.run(
                    ["ls", "-l", directory / "d"], capture_output=True, text=True, check=True
                ).stdout
                taken[what].append(time.perf_counter() - begin)
                assert listed.count("file-") == files
    return {what: statistics.median(one) for what, one in taken.items()}


def git_status(base: Path, files: int, rounds: int) -> float:
    """Return the seconds of a `git status` in a clone that `git status` has read before."""
    url, source, directory = f"file://{base}/git-store", base / "source", base / "git"
    for number in range(files):
        path = source / f"folder-{number % 20}" / f"file-{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{number}\n" * 20)
    quiet = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}

    def git(*words: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, env=quiet, capture_output=True, text=True, check=True).stdout

    for words in (
        ("init", "-q", str(source)),
        ("-C", str(source), "add", "."),
        ("-C", str(source), "commit", "-qm", "x"),
    ):
        git(*words)
    init(url)
    directory.mkdir()
    with tierfs.mount(url, directory, state_dir=str(base / "git-state"), ram="64MiB", nvme="0", ack="object"):
        git("clone", "-q", f"file://{source}", f"{directory}/clone")
        assert git("-C", f"{directory}/clone", "status", "--porcelain") == ""
        taken = []
        for _ in range(rounds):
            begin = time.perf_counter()
            git("-C", f"{directory}/clone", "status", "--porcelain")
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def judge(found: dict[str, Any], files: int, git_files: int) -> list[dict[str, Any]]:
    """Compare the figures with the aims. Fewer files get less time."""
    aims, by = Aims(), found["streams"]
    ours = by["tierfs"]
    for peer, limits in (("passthrough", {"read": 0.7, "write": 0.6}), ("rclone", {"read": 1.0, "write": 1.0})):
        for what, limit in limits.items():
            if peer in by:
                aims.at_least(f"{what}, speed in relation to {peer}", by[peer][what] / ours[what], limit)
    part = files / FULL_FILES
    aims.at_most(f"ls -l of {files} files, cold, s", found["ls"]["cold"], 5 * part)
    aims.at_most(f"ls -l of {files} files, warm, s", found["ls"]["warm"], 0.5 * part)
    aims.at_most(f"git status of {git_files} files, warm, s", found["git status"], max(0.1, git_files / FULL_GIT_FILES))
    return aims.found


def main() -> None:
    arguments = parser(__doc__, "directory for stores, caches and state (default: the system's temporary directory)")
    arguments.add_argument("--bytes", type=parse_size, default=256 << 20)
    arguments.add_argument("--files", type=int, default=1000)
    arguments.add_argument("--git-files", type=int, default=200)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    with contextlib.ExitStack() as places:
        base = Path(places.enter_context(tempfile.TemporaryDirectory(dir=given.directory)))
        names = Path(places.enter_context(tempfile.TemporaryDirectory(prefix="tierfs-bench-", dir="/dev/shm")))
        places.callback(end_flushers, base)
        server = places.enter_context(ministack.running())
        found: dict[str, Any] = {"bytes": given.bytes, "files": given.files, "git files": given.git_files}
        found["streams"], found["missing"] = streams(server, base, given.bytes, given.rounds)
        found["ls"] = listings(names, given.files, given.rounds)
        found["git status"] = git_status(names, given.git_files, given.rounds)
    found["aims"] = judge(found, given.files, given.git_files)
    say(found, as_json=given.json)


if __name__ == "__main__":
    main()
