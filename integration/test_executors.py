"""Scrubbing and importing on a Dask cluster of two workers and under MPI: the same store, the same findings."""

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


@pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="needs distributed")
def test_a_dask_cluster_of_two_workers_imports_a_checkpoint(root, tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from distributed import LocalCluster

    from tierfs.checkpoint import import_ as importing

    source, url = tmp_path / "source", f"tierfs::file://{root}/imported"
    state = {f"t{number}": torch.randn(500, 100) for number in range(6)} | {"step": 3}
    torch.distributed.checkpoint.save(state, checkpoint_id=source, no_dist=True)
    monkeypatch.setattr(importing, "PART_BYTES", 400_000)
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster:
        executor = f"dask:{cluster.scheduler_address}"
        assert main(["checkpoint", "import", str(source), url, "--executor", executor]) == 0
    assert main(["checkpoint", "diff", str(source), url]) == 0
    capsys.readouterr()
    assert main(["checkpoint", "show", url, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["files"]) == 3
