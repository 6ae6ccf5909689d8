"""A newer version beside files that an older one left pending: published if it knows their layout, else refused aloud.

The newer version is a copy of the package with higher numbers, in processes of its own.
"""

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tierfs

PACKAGE = Path(tierfs.__file__).parent
WAIT_S = 120
NUMBERS = {  # the file that has the number of a layout
    "segment": "host/slab/segment_file.py",
    "tier": "host/nvme/head.py",
    "draft": "host/pending/record.py",
}
ACT = """
import hashlib, os, random, sys, fsspec
what, url, path, level = sys.argv[1:]
fs, root = fsspec.url_to_fs(url)
if what == "save":
    fs.pipe_file(f"{root}/{path}", random.Random(path).randbytes(300_000), ack=level)
    sys.stdout.flush()
    os._exit(0)  # as a killed process, it leaves its memory
print(hashlib.sha256(fs.cat_file(f"{root}/{path}")).hexdigest())
"""
TRAIN = """
import random, sys, fsspec
url, *paths = sys.argv[1:]
fs, root = fsspec.url_to_fs(url)
for path in paths:
    fs.pipe_file(f"{root}/{path}", random.Random(path).randbytes(300_000), ack="staged")
    print("saved", flush=True)
    sys.stdin.readline()
try:
    fs.wait(root, "object", timeout=60)
    print("published")
except Exception as error:
    print(type(error).__name__, error)
"""


class Version:
    """A version of tierfs on one host, run in processes."""

    def __init__(self, source, environment):
        self.environment = {**environment, "PYTHONPATH": str(source)}

    def run(self, *words):
        command = [sys.executable, "-P", *map(str, words)]
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=WAIT_S, check=False
        )

    def command(self, *words):
        return self.run("-m", "tierfs.cli", *words)

    def act(self, *words):
        return self.run("-c", ACT, *words)


def newer_copy(directory, *layouts):
    """Copy the package as version 99, in which these layouts have a number more."""
    shutil.copytree(PACKAGE, directory / "tierfs", ignore=shutil.ignore_patterns("__pycache__"))
    own = directory / "tierfs" / "__init__.py"
    own.write_text(re.sub(r'__version__ = ".*"', '__version__ = "99.0"', own.read_text()))
    for layout in layouts:
        path = directory / "tierfs" / NUMBERS[layout]
        text, count = re.subn(
            r"^((?:DRAFT_)?VERSION = )(\d+)$",
            lambda match: f"{match[1]}{int(match[2]) + 1}",
            path.read_text(),
            flags=re.MULTILINE,
        )
        assert count == 1
        path.write_text(text)
    return directory


def kill_flushers(state):
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            words = (directory / "cmdline").read_bytes().split(b"\0")
            environment = (directory / "environ").read_bytes()
        except OSError:
            continue
        if b"flusher" in words and f"TIERFS_STATE_DIR={state}\0".encode() in environment + b"\0":
            os.kill(int(directory.name), signal.SIGKILL)


@pytest.fixture
def host(tmp_path):
    """The environment of a host whose flusher sends nothing but small files, and the URL of a store."""
    for name in ("state", "shm"):
        (tmp_path / name).mkdir(mode=0o700)
    ours = {"TIERFS_STATE_DIR": tmp_path / "state", "TIERFS_SHM_DIR": tmp_path / "shm", "TIERFS_RAM": "64MiB"}
    ours |= {"TIERFS_NVME": "64MiB", "TIERFS_BANDWIDTH": "1", "TIERFS_LOG": "error"}
    environment = {**os.environ, **{name: str(value) for name, value in ours.items()}}
    url = f"tierfs::file://{tmp_path}/store"
    made = Version(PACKAGE.parent, environment).command("init", f"{tmp_path}/store")
    assert made.returncode == 0, made.stderr
    yield environment, url
    kill_flushers(tmp_path / "state")


def content(path):
    return hashlib.sha256(random.Random(path).randbytes(300_000)).hexdigest()


@pytest.mark.parametrize("level", ["staged", "local"])
def test_a_newer_version_with_the_same_layouts_publishes(level, host, tmp_path):
    environment, url = host
    old, new = Version(PACKAGE.parent, environment), Version(newer_copy(tmp_path / "newer"), environment)
    assert old.act("save", url, "run/old", level).returncode == 0
    environment.pop("TIERFS_BANDWIDTH")
    new.environment.pop("TIERFS_BANDWIDTH")
    assert new.act("save", url, "run/new", "local").returncode == 0  # it replaces the flusher of the older version
    waited = new.command("wait", url, "--timeout", WAIT_S)
    assert waited.returncode == 0, waited.stderr
    assert [new.act("read", url, path, "").stdout.strip() for path in ("run/old", "run/new")] == [
        content("run/old"),
        content("run/new"),
    ]


@pytest.mark.parametrize(
    ("layouts", "level"),
    [(("tier",), "local"), (("segment",), "staged"), (("segment", "tier", "draft"), "local"), (("draft",), "local")],
    ids="-".join,
)
def test_another_layout_is_refused_aloud_and_the_old_version_loses_nothing(layouts, level, host, tmp_path):
    environment, url = host
    if level == "staged":
        environment["TIERFS_NVME"] = "0"
    old, new = Version(PACKAGE.parent, environment), Version(newer_copy(tmp_path / "newer", *layouts), environment)
    assert old.act("save", url, "run/old", level).returncode == 0
    kill_flushers(tmp_path / "state")
    for tried in (new.act("read", url, "run/old", ""), new.command("wait", url, "--timeout", "5")):
        assert tried.returncode != 0
        assert "version" in tried.stderr, tried.stderr
    new.command("status", url)
    new.command("gc", url)
    kill_flushers(tmp_path / "state")
    old.environment.pop("TIERFS_BANDWIDTH")
    assert old.act("read", url, "run/old", "").stdout.strip() == content("run/old")
    waited = old.command("wait", url, "--timeout", WAIT_S)
    assert waited.returncode == 0, waited.stderr
    if "tier" not in layouts:
        return
    refused = new.command("status", url)
    assert "tierfs forget" in refused.stderr  # also when nothing is pending
    old.command("flusher", "stop", url)
    assert old.command("forget", url, "--yes").returncode == 0
    assert new.act("read", url, "run/old", "").stdout.strip() == content("run/old")


@pytest.mark.parametrize("layouts", [(), ("segment",)], ids=["same", "segment"])
def test_a_running_trainer_never_hears_of_a_level_that_is_not_reached(layouts, host, tmp_path):
    environment, url = host
    old, new = Version(PACKAGE.parent, environment), Version(newer_copy(tmp_path / "newer", *layouts), environment)
    new.environment.pop("TIERFS_BANDWIDTH")
    command = [sys.executable, "-P", "-c", TRAIN, url, "run/first", "run/old"]
    with subprocess.Popen(
        command, env=old.environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout.readline() == "saved\n"
        new.act("save", url, "run/new", "local")  # its flusher takes the place of the older one
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "saved\n"
        said, _ = trainer.communicate("\n", WAIT_S)
    if not layouts:
        assert said == "published\n"
        return
    assert said.startswith("FormatError"), said
    assert "tierfs wait URL" in said
    assert "delete" not in said
    kill_flushers(tmp_path / "state")
    old.environment.pop("TIERFS_BANDWIDTH")
    waited = old.command("wait", url, "--timeout", WAIT_S)
    assert waited.returncode == 0, waited.stderr
    assert old.act("read", url, "run/old", "").stdout.strip() == content("run/old")
