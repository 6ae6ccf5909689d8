"""Writing processes are killed with SIGKILL at random moments. Every file is then an old or a new one, complete."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from drawing import SEED

import tierfs
from tierfs.store import Store, find, load, verify

KILLS = 30

WRITER = """
import itertools, random, sys, time
from tierfs.errors import TierfsError
from tierfs.store import WriteMode, Writer, copy, delete, rename, save
from tierfs.session import open_store, parse_url
root, seed = sys.argv[1], int(sys.argv[2])
noise = random.Random(seed)
store, _ = open_store(parse_url(root))
print("ready", flush=True)
while True:
    name = noise.choice(["a", "b", "run/c", "run/d"])
    byte = noise.randrange(256)
    size = noise.choice([10, 70_000, 3_000_000, 20_000_000])
    try:
        match noise.randrange(6):
            case 0 | 1 | 2:
                # Every file says of itself how long it is and what it holds.
                save(store, name, size.to_bytes(8, "little") + bytes([byte]) * size)
            case 3:
                rename(store, name, noise.choice(["a", "b", "run/c", "run/d"]))
            case 4:
                copy(store, name, "copy")
            case 5:
                delete(store, name)
    except (FileNotFoundError, TierfsError):
        pass
"""


def is_whole(content):
    size = int.from_bytes(content[:8], "little")
    return len(content) == 8 + size and len(set(content[8:])) <= 1


def test_every_file_is_whole_after_each_of_many_kills(tmp_path):
    print(f"seed {SEED}")
    noise = random.Random(SEED)
    url = f"file://{tmp_path}/store"
    store = tierfs.init(url)
    seen = 0
    for number in range(KILLS):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, url, str(SEED + 2 * number + host)], stdout=subprocess.PIPE)
            for host in range(2)
        ]
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        time.sleep(noise.uniform(0, 0.6))
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
        reader = Store(store.objects, store.descriptor, url=store.url)
        assert verify(reader).damage == []
        for entry in find(reader, ""):
            if not entry.is_directory:
                assert is_whole(load(reader, entry.path)), entry.path
                assert entry.foreign is None
                seen += 1
    assert seen > KILLS


def test_a_full_disk_is_said_and_loses_nothing(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small filesystem here: {mounted.stderr.decode().strip()}")
    try:
        store = tierfs.init(f"file://{mount}/store")
        content = os.urandom(3_000_000)
        from tierfs.errors import CapacityError
        from tierfs.store import delete, save

        save(store, "kept", content)
        with pytest.raises(CapacityError, match="free some room"):
            save(store, "too-large", os.urandom(20_000_000))
        with pytest.raises(CapacityError):
            save(store, "kept", os.urandom(20_000_000))
        fresh = Store(store.objects, store.descriptor, url=store.url)
        assert load(fresh, "kept") == content
        assert verify(fresh).damage == []
        assert [entry.path for entry in find(fresh, "")] == ["kept"]
        delete(store, "kept")
    finally:
        subprocess.run(["umount", str(mount)], check=True)
