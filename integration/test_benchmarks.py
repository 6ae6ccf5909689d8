"""Every benchmark runs to its end at its smallest size. The figures of such a run mean nothing and are not checked.

Of ``codec.py`` only the speeds run: the rest needs model states that ``snapshots.py`` trains for half an hour.
``device.py`` needs a GPU: `integration/device/run.sh` runs it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench"
SMALLEST = {
    "activations.py": ["--layers", "1", "--length", "64", "--rounds", "1", "--min-bytes", "16KiB", "--ram", "1MiB"],
    "tiers.py": ["--mib", "32", "--rounds", "1", "--chunks", "1000"],
    "dcp.py": ["--bytes", "16MiB", "--rounds", "1", "--only", "first"],
    "object.py": ["--bytes", "16MiB", "--rounds", "1", "--server", "ministack", "--only", "chunks"],
    "manager.py": ["--roots", "50", "--step-seconds", "0.02"],
    "plug_saves.py": ["--layers", "1", "--width", "64", "--pause", "0.05"],
    "mount.py": ["--bytes", "4MiB", "--files", "20", "--git-files", "5", "--rounds", "1"],
    "codec.py": ["--only", "speed", "--rounds", "1"],
    "peers.py": ["--bytes", "32MiB", "--rounds", "1"],
    "growth_host.py": ["--largest", "100"],
    "waits.py": ["--busy", "1", "--files", "3"],
    "page.py": ["--rounds", "1", "--saves", "1"],
    "upkeep.py": ["--chunks", "2000", "--scrub", "8MiB"],
    "replay.py": ["--params", "300k", "--steps", "3"],
    "stored.py": ["--params", "100k", "--saves", "6"],
}
AIM_MISSED = 1


@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs_to_its_end(name, tmp_path):
    pytest.importorskip("transformers" if name == "plug_saves.py" else "torch", reason="it is not installed")
    done = subprocess.run(
        [sys.executable, str(BENCH / name), *SMALLEST[name], "--json"],
        env={**os.environ, "TIERFS_STATE_DIR": str(tmp_path / "state"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, AIM_MISSED}, f"{done.stdout}\n{done.stderr}"
    assert done.stdout, done.stderr  # Python ends with 1 after an exception, too
    assert json.loads(done.stdout)
