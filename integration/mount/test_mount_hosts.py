"""Two hosts mount one store: a file that one host closes is the file that the other opens next."""

import errno
import os
import random
import subprocess
import sys
import threading
import time

import mounts
import outages
import pytest
from mounts import run

from tierfs.session import open_store, parse_url
from tierfs.store import load, verify
from tierfs.testing import TcpFaultProxy

mounts.require()

SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))


@pytest.fixture(params=["local", "bucket"])
def two(request, hosts):
    found = request.getfixturevalue(request.param)
    url, options = found if isinstance(found, tuple) else (found, {})
    return [hosts(f"tierfs::{url}", options=options, ack="object").start() for _ in range(2)]


def test_an_open_finds_what_another_host_closed_before(two):
    here, there = two
    for number in range(5):
        content = os.urandom(200_000 + number)
        (here / "file").write_bytes(content)
        assert (there / "file").read_bytes() == content
        here, there = there, here


def test_who_has_an_old_version_open_keeps_it(two):
    here, there = two
    (here / "file").write_bytes(b"old" * 100_000)
    with open(there / "file", "rb") as file:
        assert file.read(3) == b"old"
        (here / "file").write_bytes(b"new" * 100_000)
        with open(there / "file", "rb") as again:
            assert again.read() == b"new" * 100_000
        assert file.read() == (b"old" * 100_000)[3:]


def test_the_second_of_two_writers_is_told(two):
    here, there = two
    (here / "file").write_bytes(b"first")
    ours = os.open(here / "file", os.O_WRONLY)
    os.write(ours, b"ours!")
    (there / "file").write_bytes(b"theirs")
    with pytest.raises(OSError, match="Stale"):
        os.close(ours)
    assert (here / "file").read_bytes() == (there / "file").read_bytes() == b"theirs"


def test_names_of_another_host_are_seen_after_a_second(two):
    here, there = two
    (here / "d").mkdir()
    (here / "d" / "a").write_bytes(b"x")
    time.sleep(1.1)
    assert os.listdir(there / "d") == ["a"]
    os.rename(here / "d" / "a", here / "d" / "b")
    time.sleep(1.1)
    assert os.listdir(there / "d") == ["b"]
    assert not (there / "d" / "a").exists()
    (there / "d" / "b").unlink()
    time.sleep(1.1)
    assert os.listdir(here / "d") == []


def test_a_name_that_was_missing_is_found_once_another_process_makes_it(two):
    here, there = two
    assert not (here / "file").exists()
    (there / "file").write_bytes(b"theirs")
    assert (here / "file").read_bytes() == b"theirs"


def test_a_file_that_another_host_made_is_replaced_and_not_refused(two):
    here, there = two
    assert not (here / "file").exists()
    (there / "file").write_bytes(b"theirs")
    time.sleep(0.05)
    (here / "file").write_bytes(b"ours, which came later")
    assert (there / "file").read_bytes() == b"ours, which came later"


@pytest.fixture
def proxied(s3, bucket, hosts):
    """Yield a host, not mounted yet, and a proxy that can make its object tier hang."""
    url, _ = bucket
    proxy = TcpFaultProxy("127.0.0.1", s3.port)
    host = hosts(f"tierfs::{url}", options=s3.options_at(proxy.port), ack="staged", timeout=1.0)
    yield host, proxy
    proxy.close()


def test_an_object_tier_that_hangs_is_an_error_and_not_a_frozen_process(proxied):
    host, proxy = proxied
    path = host.start()
    (path / "known").write_bytes(b"k" * 100)
    outages.begin(proxy, "hang")
    began = time.monotonic()
    looks = [
        subprocess.Popen(
            [sys.executable, "-c", "import os, sys; os.stat(sys.argv[1])", path / f"unknown{number}"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(12)
    ]
    said = [look.communicate(timeout=20)[1] for look in looks]
    assert all("OSError: [Errno 5]" in one for one in said), said
    assert time.monotonic() - began < 15
    assert f"{path}: tierfs.mount: lookup of" in host.log
    # Local copies of this host stay readable.
    assert (path / "known").read_bytes() == b"k" * 100
    proxy.recover()
    assert not (path / "unknown0").exists()


def test_umount_says_what_is_not_safe_and_leaves_it_mounted(proxied):
    host, proxy = proxied
    path = host.start(ack="object")
    fd = os.open(path / "file", os.O_WRONLY | os.O_CREAT)
    os.write(fd, b"not published")
    outages.begin(proxy, "unavailable")
    began = time.monotonic()
    done = subprocess.run(
        [*mounts.PROGRAM, "umount", str(path), "--timeout", "2"], capture_output=True, text=True, check=False
    )
    assert done.returncode
    assert "file" in done.stderr
    assert time.monotonic() - began < 15
    proxy.recover()
    os.close(fd)
    run(*mounts.PROGRAM, "umount", path)
    assert os.listdir(path) == []


def test_sigterm_publishes_what_is_closed_and_ends_within_a_bound(proxied):
    host, _ = proxied
    path = host.start()
    (path / "file").write_bytes(b"x" * 3_000_000)
    process = host.mount._process
    process.terminate()
    assert process.wait(30) == 0
    assert os.listdir(path) == []
    host.start()
    assert (path / "file").read_bytes() == b"x" * 3_000_000


def test_a_process_of_the_mount_that_is_gone_can_be_unmounted_and_mounted_again(hosts, local):
    host = hosts(local)
    path = host.start()
    (path / "file").write_bytes(b"x")
    host.kill()
    with pytest.raises(OSError, match="not connected"):
        os.listdir(path)
    run(*mounts.PROGRAM, "umount", path)
    host.start()
    assert (path / "file").read_bytes() == b"x"


def test_readers_go_on_while_another_program_writes(two):
    """Every version that a reader sees is complete, and one that was written."""
    here, there = two
    (here / "file").write_bytes(b"0" * 300_000)
    stop, errors = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                content = (there / "file").read_bytes()
                assert len(content) == 300_000
                assert len(set(content)) == 1
            except BaseException as error:
                errors.append(error)
                return

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(1, 10):
        with open(here / "tmp", "wb") as file:
            file.write(str(number).encode() * 300_000)
        os.replace(here / "tmp", here / "file")
    stop.set()
    for reader in readers:
        reader.join()
    assert not errors, errors


def test_what_is_in_the_store_is_what_the_mount_shows(hosts, local):
    path = hosts(local, ack="object").start()
    (path / "d").mkdir()
    (path / "d" / "file").write_bytes(b"y" * 200_000)
    store, _ = open_store(parse_url(local))
    assert load(store, "d/file") == b"y" * 200_000
    assert verify(store).damage == []


ORDINARY = {errno.ENOENT, errno.ESTALE, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}


def test_two_hosts_that_change_the_same_names_end_up_with_the_same_files(hosts, local):
    print(f"seed {SEED}")
    paths = [hosts(local, ack="object").start() for _ in range(2)]
    errors = []

    def work(path, noise):
        def name():
            return path / noise.choice(["a", "b", "d/a", "d/b", "e/a"])

        for _ in range(100):
            try:
                match noise.randrange(7):
                    case 0 | 1:
                        content = bytes([noise.randrange(256)]) * noise.choice([10, 100_000])
                        name().write_bytes(content)
                    case 2:
                        assert len(set(name().read_bytes())) <= 1
                    case 3:
                        os.replace(name(), name())
                    case 4:
                        name().unlink()
                    case 5:
                        noise.choice([path / "d", path / "e"]).mkdir()
                    case 6:
                        os.rename(path / "d", path / "e")
            except OSError as error:
                if error.errno not in ORDINARY:
                    errors.append(error)
            except BaseException as error:
                errors.append(error)

    workers = [threading.Thread(target=work, args=(path, random.Random(SEED + n))) for n, path in enumerate(paths)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors, errors
    time.sleep(1.2)
    shown = [
        {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()} for path in paths
    ]
    assert shown[0] == shown[1]
    store, _ = open_store(parse_url(local))
    assert verify(store).damage == []
    assert {name: load(store, name) for name in shown[0]} == shown[0]
