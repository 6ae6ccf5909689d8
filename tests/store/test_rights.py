"""File modes follow the umask in the object tier. Files on the host are accessible to their owner only."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.waiting import HANG_S

from tierfs.digest import DigestKind
from tierfs.objects.backends.memory import MemoryObjects
from tierfs.store.create import create_store
from tierfs.store.offline import KnownStores
from tierfs.store.tree.host_records import HostRecords

SCRIPT = """
import sys
import tierfs

root = sys.argv[1]
tierfs.init(f"file://{root}")
options = {"ram": "128MiB", "nvme": "256MiB", "skip_instance_cache": True}
for level in ("staged", "local", "object"):
    fs = tierfs.TierFileSystem(target_protocol="file", ack=level, **options)
    fs.pipe(f"{root}/run/{level}", bytes(range(251)) * 40_000)
    fs.wait(f"{root}/run", "object")
fs.evict(f"{root}/run", "ram")
fs.evict(f"{root}/run", "nvme")
fs.find(root)
assert fs.cat(f"{root}/run/local")
fs.pipe(f"{root}/run/last", b"x")
print("done", flush=True)
sys.stdin.read()
"""


def modes_below(directory):
    found = {}
    for path in [directory, *directory.rglob("*")]:
        if path.is_symlink():  # has no mode of its own
            continue
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            continue
        kind = "directory" if stat.S_ISDIR(status.st_mode) else "socket" if stat.S_ISSOCK(status.st_mode) else "file"
        found[str(path.relative_to(directory))] = kind, stat.S_IMODE(status.st_mode)
    return found


def check_closed(directory):
    found = modes_below(directory)
    assert len(found) > 1
    assert not {name: oct(mode) for name, (_, mode) in found.items() if mode & 0o077}, directory


@pytest.mark.parametrize(("umask", "modes"), [(0o022, (0o644, 0o755)), (0, (0o666, 0o777))])
def test_the_umask_counts_in_the_object_tier_and_nowhere_else(tmp_path, umask, modes):
    state, root = tmp_path / "state", tmp_path / "store"
    with tempfile.TemporaryDirectory(dir=os.environ["TIERFS_SHM_DIR"]) as shared:
        environment = os.environ | {"TIERFS_STATE_DIR": str(state), "TIERFS_SHM_DIR": shared}
        with subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            umask=umask,
        ) as process:
            assert process.stdout.readline() == b"done\n"
            (segments,) = Path(shared).iterdir()
            check_closed(segments)
            check_closed(state)
            process.stdin.close()
            assert process.wait(HANG_S) == 0
        check_closed(state)
    published = modes_below(root)
    assert any("chunks" in name for name in published)
    for kind, mode in zip(("file", "directory"), modes, strict=True):
        assert {each for found, each in published.values() if found == kind} == {mode}


def test_known_stores_are_private_files(tmp_path):
    descriptor, _ = create_store(MemoryObjects("/rights"), "x://a", digest=DigestKind.XXH3_128, random_bytes=bytes(16))
    records = HostRecords("0123", tmp_path / "state")
    records.add("a", "1", b"record")
    before = os.umask(0)
    try:
        KnownStores(tmp_path / "state").remember("x://a", descriptor, ("a",))
        records.flush()
    finally:
        os.umask(before)
    assert not records.failures
    assert {"known", "records.sqlite"} < modes_below(tmp_path / "state").keys()
    check_closed(tmp_path / "state")
