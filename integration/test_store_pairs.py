"""Any two of door, level, tiers, upkeep, host and change are used together, over S3, FUSE and processes.

``TIERFS_TEST_PAIRS`` is the number of sets of draws, ``TIERFS_TEST_SEED`` the first seed. A set takes a minute or two.
A share of the cases is a share of the draws in each set.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from drawing import drawn
from leftovers import end_flushers
from servers import ministack

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "mount"), str(HERE.parent / "tests")]

import mounts
from support.pairs import pairs, run_each
from support.store_pairs import AXES, Cli, World

import tierfs

ministack.require()
mounts.require()

SEED = int(os.environ.get("TIERFS_TEST_SEED", "1"))
SETS = int(os.environ.get("TIERFS_TEST_PAIRS", "1"))


class RealMount:
    """The door ``mount``, with the kernel. Each is a mount of its own."""

    def __init__(self, world, settings):
        directory = Path(settings["state_dir"]) / f"mnt{world.count()}"
        directory.mkdir()
        self._mount = tierfs.mount(world.url, directory, options=world.options, **settings)
        world.ends.callback(self._mount.close)

    def write(self, path, content):
        file = self._mount.directory / path
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)

    def read(self, path):
        return (self._mount.directory / path).read_bytes()

    def rename(self, path, target):
        (self._mount.directory / path).rename(self._mount.directory / target)

    def remove(self, path):
        (self._mount.directory / path).unlink()

    def file(self, path):
        return path


class Commands(Cli):
    """The door ``cli``, with a process for each command."""

    def __init__(self, world, settings):
        super().__init__(world, settings)
        self._environment |= {
            "AWS_ENDPOINT_URL": world.options["endpoint_url"],
            "AWS_ACCESS_KEY_ID": world.options["key"],
            "AWS_SECRET_ACCESS_KEY": world.options["secret"],
        }

    def _run(self, *arguments):
        command = [sys.executable, "-m", "tierfs.cli", *map(str, arguments)]
        subprocess.run(command, env={**os.environ, **self._environment}, check=True, timeout=120)


@pytest.fixture(scope="module")
def s3():
    with ministack.running() as server:
        yield server


@pytest.mark.parametrize("seed", range(SEED, SEED + SETS))
def test_acknowledged_files_are_kept_and_garbage_is_not(s3, tmp_path, seed):
    world = World(f"tierfs::s3://{s3.new_root()}", tmp_path, {"mount": RealMount, "cli": Commands}, **s3.options)
    try:
        run_each(drawn(pairs(AXES, seed), seed), world.run, seed)
        world.check()
    finally:
        world.close()
        end_flushers(tmp_path)
