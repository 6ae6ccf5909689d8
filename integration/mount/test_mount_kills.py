"""Kill the process of a mount at each step of a write. The next mount shows only published files, each complete."""

import contextlib
import os
import random
import threading
import time

import mounts
import pytest

from tierfs.session import open_store, parse_url
from tierfs.store import verify

mounts.require()

SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))
KILLS = int(os.environ.get("TIERFS_TEST_MOUNT_KILLS", "5"))
OLD, FIRST, SECOND = (letter * 400_000 for letter in (b"o", b"f", b"s"))
BOTH = FIRST + SECOND


class Write:
    """Write a file in steps. Each names the ``file`` and ``tmp`` that the next mount shows if the mount ends there."""

    steps = (
        ("create", {OLD}, {b""}),
        ("write_first", {OLD}, {b""}),
        ("sync", {OLD}, {FIRST}),
        ("write_second", {OLD}, {FIRST}),
        ("close", {OLD}, {BOTH}),
        ("rename", {BOTH}, {None}),
    )

    def __init__(self, path):
        self.path = path
        self.fd = -1

    def create(self):
        self.fd = os.open(self.path / "tmp", os.O_CREAT | os.O_EXCL | os.O_RDWR)

    def write_first(self):
        os.write(self.fd, FIRST)

    def sync(self):
        os.fsync(self.fd)

    def write_second(self):
        os.write(self.fd, SECOND)

    def close(self):
        fd, self.fd = self.fd, -1
        os.close(fd)

    def rename(self):
        os.replace(self.path / "tmp", self.path / "file")

    def give_up(self):
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                self.close()


def content(path):
    return path.read_bytes() if path.exists() else None


@pytest.fixture(params=["local", "bucket"])
def host(request, hosts):
    found = request.getfixturevalue(request.param)
    url, options = found if isinstance(found, tuple) else (found, {})
    return hosts(f"tierfs::{url}", options=options, ack="staged" if options else "object")


def test_after_each_step_the_next_mount_shows_what_was_published(host):
    path = host.start()
    for number, (step, *shown) in enumerate(Write.steps):
        if host.options.get("options") and step not in ("sync", "close"):
            continue  # local tiers keep published files and know nothing of the rest
        (path / "file").write_bytes(OLD)
        write = Write(path)
        for name, *_ in Write.steps[: number + 1]:
            getattr(write, name)()
        host.kill()
        write.give_up()
        mounts.detach(path, lazy=True)
        host.start()
        assert content(path / "file") in shown[0], step
        assert content(path / "tmp") in shown[1], step
        with contextlib.suppress(FileNotFoundError):
            (path / "tmp").unlink()


def test_in_the_midst_of_a_step_a_file_is_old_or_new(hosts, local):
    print(f"seed {SEED}")
    noise = random.Random(SEED)
    host = hosts(local, ack="object")
    path = host.start()
    (path / "file").write_bytes(OLD)
    for _ in range(KILLS):
        write = Write(path)

        def work(write=write):
            with contextlib.suppress(OSError):
                for name, *_ in Write.steps:
                    getattr(write, name)()

        writer = threading.Thread(target=work)
        writer.start()
        time.sleep(noise.uniform(0, 0.25))
        host.kill()
        writer.join()
        write.give_up()
        mounts.detach(path, lazy=True)
        host.start()
        assert content(path / "file") in {OLD, BOTH}
        assert content(path / "tmp") in {None, b"", FIRST, BOTH}
        with contextlib.suppress(FileNotFoundError):
            (path / "tmp").unlink()
    store, _ = open_store(parse_url(local))
    assert verify(store).damage == []
