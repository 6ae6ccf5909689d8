"""The same random operations in a mount and in tmpfs: results, errors, names, modes and bytes are the same."""

import os
import shutil
import tempfile

import mounts
import pytest

mounts.require()

import differ

OPERATIONS = int(os.environ.get("TIERFS_TEST_MOUNT_OPERATIONS", "1500"))
SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))


@pytest.fixture
def reference():
    path = tempfile.mkdtemp(dir="/dev/shm", prefix="tierfs-reference-")
    yield path
    shutil.rmtree(path)


def test_one_thread_with_remounts(hosts, local, reference):
    print(f"seed {SEED}")
    host = hosts(local)
    differ.run([host.start(), reference], OPERATIONS * 2 // 5, SEED, remount=host.remount)


def test_one_thread_with_local_tiers_before_s3(hosts, bucket, reference):
    print(f"seed {SEED}")
    url, options = bucket
    host = hosts(f"tierfs::{url}", options=options, ack="staged")
    differ.run([host.start(), reference], OPERATIONS // 10, SEED + 1, remount=host.remount, rounds=2)


def test_eight_threads(mounted, reference):
    print(f"seed {SEED}")
    differ.run([mounted, reference], OPERATIONS // 2, SEED + 2, threads=8)
