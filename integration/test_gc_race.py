"""A race of gc in a loop, four writers that deduplicate against old chunks, and two that delete and rename.

It takes half a minute; ``TIERFS_RACE_S=60`` makes it longer.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import tierfs
from tierfs.store import find, load, verify
from tierfs.store.maintenance.gc import GcOptions, collect

HERE = Path(__file__).parent
SECONDS = float(os.environ.get("TIERFS_RACE_S", "15"))
LEASE_S, GRACE_S = 1, 4
# A chunk is old after a grace and 2 s, and may be deleted after the same time again. This is the first deletion.
FIRST_DELETION_S = 2 * (GRACE_S + 2)


def test_no_manifest_ever_misses_a_chunk(tmp_path, monkeypatch):
    for name in ("TIERFS_RAM", "TIERFS_NVME"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("TIERFS_STATE_DIR", str(tmp_path / "state"))
    url = f"file://{tmp_path}/store"
    store = tierfs.init(url, lease_s=LEASE_S, grace_s=GRACE_S)
    roles = ["gc", *["write"] * 4, *["remove"] * 2]
    workers = [
        subprocess.Popen(
            [sys.executable, HERE / "gc_race_worker.py", url, role, str(seed), str(SECONDS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for seed, role in enumerate(roles)
    ]
    looks = 0
    while any(worker.poll() is None for worker in workers):
        report = verify(store)
        # A chunk may be deleted after its manifest, so each damage is checked again.
        lost = [damage for damage in report.damage if damage.path and not damage.path.startswith(".tierfs")]
        for damage in lost:
            try:
                load(store, damage.path)
            except FileNotFoundError:
                continue
        looks += 1
    shown = [worker.communicate()[0] for worker in workers]
    print("\n".join(text.strip().rpartition("\n")[2] for text in shown), f"{looks} looks", sep="\n")
    assert all(worker.returncode == 0 for worker in workers), shown
    deleted = sum(map(int, re.findall(r"deleted (\d+)", shown[0])))
    assert deleted > (SECONDS - FIRST_DELETION_S) / 6, "gc had nothing to do"
    load_all(store)
    for _ in range(2):
        store.clock.sleep(GRACE_S + 3)
        collect(store)
    left = collect(store, GcOptions(dry_run=True))
    assert (left.condemned.count, left.waiting.count, left.young.count, left.deleted.count) == (0, 0, 0, 0)
    assert verify(store).damage == []
    load_all(store)


def load_all(store):
    for entry in find(store, "", detail=False):
        if not entry.is_directory:
            load(store, entry.path)
