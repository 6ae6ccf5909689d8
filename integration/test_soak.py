"""A short soak: kills, faults and flipped bits on two hosts lose nothing. The seed is that of the other kill tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from drawing import SEED

pytest.importorskip("torch", reason="torch is not installed")

MINUTES = float(os.environ.get("TIERFS_SOAK_MINUTES", "3"))


@pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK) or os.geteuid(), reason="mounts need root here")
def test_nothing_acknowledged_is_lost_in_a_short_soak(tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("soak.py")), "--hours", str(MINUTES / 60)]
    command += ["--seed", str(SEED), "--report", str(tmp_path / "report.json"), "--events", str(tmp_path / "events")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "report.json").read_text())["figures"]
    print(figures)
    assert figures["operations"]["audits"] > 0
    assert sum(figures["kills"].values()) > 0
