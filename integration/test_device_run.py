"""`integration/device/run.sh` without a GPU skips, and the tests that need a GPU pass on an emulated one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: run integration/device/run.sh")


def run(command, timeout_s, **environment):
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=timeout_s,
        check=False,
    )


def test_the_gpu_script_skips_with_a_reason(tmp_path):
    done = run(["bash", "integration/device/run.sh"], 120, OUT=str(tmp_path), PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    assert "skipped: torch sees no CUDA device" in done.stdout


def test_tests_for_a_gpu_pass_on_an_emulated_one():
    options = ["-q", "-p", "support.emulated_cuda", "-p", "no:cacheprovider", "-m", "cuda", "-n", "0"]
    options += ["-k", "not plan_of_the_last_save"]  # a plan knows no device
    done = run([sys.executable, "-m", "pytest", *options, "tests/device"], 800, PYTHONPATH=str(ROOT / "tests"))
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-1000:]
