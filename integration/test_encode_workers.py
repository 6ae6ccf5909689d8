"""The flusher's processes that encode, killed while they do: what it stores is what was written, and it says what became of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
import safetensors.numpy

MIB = 1 << 20
FILES = 6
PATIENCE_S = 120


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="where there is one processor the flusher has none")
@pytest.mark.parametrize("is_killing", [False, True])
def test_what_is_stored_is_what_was_written_whatever_becomes_of_them(tmp_path: Path, is_killing: bool) -> None:
    url = f"file://{tmp_path}/store"
    subprocess.run([sys.executable, "-m", "tierfs.cli", "init", url], check=True, capture_output=True)
    fs, path = fsspec.url_to_fs(
        f"tierfs::{url}", state_dir=str(tmp_path / "state"), ack="staged", ram="1GiB", nvme=0, codecs="all"
    )
    rng = np.random.default_rng(1)
    state = rng.normal(0, 0.02, 64 * MIB // 4).astype("<f4")
    wanted = "worker_deaths" if is_killing else "worker_blocks"
    deadline = time.monotonic() + PATIENCE_S
    pids: set[int] = set()
    step = 0
    while step < FILES or not fs.status(path)["codecs"].get(wanted):
        assert time.monotonic() < deadline
        # A neighbour of the file before, so that there are differences; each of several tensors, of its own widths.
        state = state + rng.normal(0, 1e-5, state.size).astype("<f4")
        tensors = {
            "a": state[: 20 * MIB // 4],
            "b": state[20 * MIB // 4 :],
            "c": (state.view("<u4") >> 16).astype("<u2"),
        }
        with fs.open(f"{path}/run/step_{step}/state.safetensors", "wb") as file:
            file.write(safetensors.numpy.save(tensors))
        step += 1
        while fs.status(path)["queue_files"]:
            assert time.monotonic() < deadline
            found = children(fs.status(path)["flusher"]["pid"])
            pids |= set(found)
            for pid in found[: 1 if is_killing else 0]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
    fs.wait(path, "object")
    codecs = fs.status(path)["codecs"]
    assert codecs["plane_blocks"] > 0
    assert codecs["dplane_blocks"] > 0
    if is_killing:
        assert codecs["worker_deaths"] > 0
    else:
        assert codecs["worker_blocks"] > 0
        assert "worker_deaths" not in codecs
    checked = subprocess.run(
        [sys.executable, "-m", "tierfs.cli", "verify", f"tierfs::{url}"], check=False, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    elsewhere, _ = fsspec.url_to_fs(f"tierfs::{url}", state_dir=str(tmp_path / "elsewhere"), ram=0, nvme=0)
    loaded = safetensors.numpy.load(elsewhere.cat(f"{path}/run/step_{step - 1}/state.safetensors"))
    assert all(np.array_equal(loaded[name], tensors[name]) for name in tensors)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "tierfs.cli",
            "flusher",
            "stop",
            f"tierfs::{url}",
            "--state-dir",
            str(tmp_path / "state"),
        ],
        check=True,
        capture_output=True,
    )
    end = time.monotonic() + PATIENCE_S
    while any(map(running, pids)):
        assert time.monotonic() < end
        time.sleep(0.05)
