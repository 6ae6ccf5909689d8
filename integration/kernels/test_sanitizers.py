"""The compiled loops under AddressSanitizer and UBSan: unit tests of kernels and damaged blocks, in a package copy."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ["test_kernels.py", "test_codec_damage.py"]
FLAGS = ["-O1", "-g", "-std=c11", "-fPIC", "-shared", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def library(name: str) -> str:
    """Return the path of a library of gcc, or its name alone if gcc has none."""
    return subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_no_kernel_reads_or_writes_beside_its_buffers(tmp_path: Path) -> None:
    sanitizer = library("libasan.so")
    if not Path(sanitizer).is_absolute():
        pytest.skip("gcc has no AddressSanitizer here")
    shutil.copytree(ROOT / "tierfs", tmp_path / "tierfs", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    source, target = ROOT / "tierfs" / "_kernels.c", tmp_path / "tierfs" / "_kernels.abi3.so"
    subprocess.run(["gcc", *FLAGS, f"-I{sysconfig.get_path('include')}", source, "-o", target], check=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(ROOT / "tests" / "codec" / name for name in TESTS),
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'tests'}",
            "LD_PRELOAD": sanitizer,
            # Python frees little at exit, and memory that NumPy maps counts as leaked.
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "TIERFS_KERNELS": "1",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout[-1000:]
