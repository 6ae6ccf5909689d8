"""A store on a full disk says so, and keeps what it has."""

import os
import subprocess

import pytest

import tierfs
from tierfs.errors import CapacityError
from tierfs.store import Store, delete, find, load, save, verify


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
