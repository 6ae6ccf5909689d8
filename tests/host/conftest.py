"""A small filesystem in place of shared memory, so that it fills up."""

import subprocess

import pytest


@pytest.fixture
def small_shm(tmp_path):
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m,mode=1777", "tierfs-test", path], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"needs a file system of its own: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)
