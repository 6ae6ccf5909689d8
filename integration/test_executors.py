"""Scrubbing on a Dask cluster of two workers, and under MPI: the same store, the same findings."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

from tierfs.cli.app import main


@pytest.fixture
def root(tmp_path, monkeypatch):
    for name in ("TIERFS_RAM", "TIERFS_NVME"):
        monkeypatch.setenv(name, "0")
    root = tmp_path / "store"
    assert main(["init", str(root)]) == 0
    for number in range(6):
        (tmp_path / "file").write_bytes(os.urandom(200_000))
        assert main(["cp", str(tmp_path / "file"), f"tierfs::file://{root}/{number}"]) == 0
    return root


@pytest.fixture
def victim(root):
    path = next((root / ".tierfs" / "chunks").rglob("*.0"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    return str(path.relative_to(root))


def check(code, out, victim):
    found = json.loads(out)
    assert (code, found["chunks"], found["prefixes_done"]) == (6, 6, 256)
    assert [each["key"] for each in found["damage"]] == [victim]


@pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="needs distributed")
def test_a_dask_cluster_of_two_workers_scrubs(root, victim, capsys):
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        capsys.readouterr()
        code = main(["scrub", str(root), "--executor", f"dask:{cluster.scheduler_address}", "--json"])
    check(code, capsys.readouterr().out, victim)


@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or shutil.which("mpiexec") is None, reason="needs mpi4py and mpiexec"
)
def test_mpi_scrubs(root, victim):
    command = ["mpiexec", "-n", "3", sys.executable, "-m", "mpi4py.futures", "-m", "tierfs.cli"]
    done = subprocess.run(
        [*command, "scrub", root, "--executor", "mpi", "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 6, done.stderr
    check(6, done.stdout, victim)
