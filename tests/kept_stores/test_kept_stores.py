"""Every later version reads the stores of each released version, writes on in them, collects their garbage, and verifies.

`make.py` made them with the code of that version. They never change.
"""

import json
import random
import tarfile
from pathlib import Path

import fsspec
import pytest
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from support.independent_reader import StoreReader
from support.kept_stores import STEPS, Training, digest, files, state_of, tensors
from support.waiting import until

from tierfs.cli import main
from tierfs.dcp import TierWriter
from tierfs.train import Manager, Replay

VERSIONS = sorted(path for path in Path(__file__).parent.iterdir() if (path / "expected.json").exists())
NAMES = ("files", "checkpoints", "run", "host")
ARCHIVE_BYTES_MAX = 1_000_000
OFF = {"ram": "0", "nvme": "0"}


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def version(request):
    return request.param


@pytest.fixture
def kept(version, tmp_path, monkeypatch):
    """Return a function that unpacks a store, and returns its URL and what its maker says that a reader finds."""

    def unpack(name, *, is_on_its_host=False):
        with tarfile.open(version / f"{name}.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
        state = tmp_path / ("state" if is_on_its_host else "another host")
        monkeypatch.setenv("TIERFS_STATE_DIR", str(state))
        for path in (state, *state.rglob("*")) if is_on_its_host else ():
            path.chmod(0o700 if path.is_dir() else 0o600)
        return f"tierfs::file://{tmp_path}/store", json.loads((version / "expected.json").read_text())[name]

    return unpack


def collect(url):
    """Collect all garbage, once the leases of this process and of the store's maker have run out."""
    until(lambda: main(["gc", url, "--exclusive"]) == 0)


def test_each_version_has_all_stores_and_they_are_small(version):
    assert {path.name for path in version.glob("*.xz")} == {f"{name}.tar.xz" for name in NAMES}
    assert max(path.stat().st_size for path in version.glob("*.xz")) <= ARCHIVE_BYTES_MAX


@pytest.mark.parametrize("name", NAMES)
def test_a_kept_store_reads_as_it_was_written(name, kept, tmp_path):
    url, expected = kept(name)
    assert files(url, **OFF) == expected["files"]
    reader = StoreReader(tmp_path / "store", lambda data: blake3(data).digest())
    assert {path: digest(reader.read(path)) for path in reader.files()} == expected["files"]


@pytest.mark.parametrize("name", NAMES)
def test_writes_gc_and_scrub_go_on_in_a_kept_store(name, kept, capsys):
    url, expected = kept(name)
    fs, root = fsspec.core.url_to_fs(url, ack="object", **OFF)
    data, rest = random.Random(name).randbytes(200_000), dict(expected["files"])
    fs.pipe_file(f"{root}/new", data)
    rest["new"] = digest(data)
    changed = next(path for path in rest if "/." not in path and path != "new")
    with fs.open(f"{root}/{changed}", "ab") as file:
        file.write(b"more")
    fs.mv(f"{root}/{changed}", f"{root}/moved by a later version")
    del rest[changed]
    collect(url)
    assert main(["scrub", url]) == 0
    assert main(["verify", url]) == 0, capsys.readouterr().out
    found = files(url, **OFF)
    del found["moved by a later version"]
    assert found == rest


def test_condemned_chunks_of_a_kept_store_are_deleted(kept, tmp_path):
    url, expected = kept("files")
    reader = StoreReader(tmp_path / "store", lambda data: blake3(data).digest())
    condemned = [tmp_path / "store" / name.key for each in reader.condemned() for name in each.names]
    assert condemned
    assert all(path.exists() for path in condemned)
    assert main(["gc", url]) == 0  # the list is older than its grace: what it names goes
    assert not any(path.exists() for path in condemned)
    assert files(url, **OFF) == expected["files"]


def test_kept_checkpoints_load_and_a_save_builds_on_them(kept):
    url, expected = kept("checkpoints")
    assert {path: tensors(f"{url}/{path}", **OFF) for path in expected["tensors"]} == expected["tensors"]
    for path in ("run/step_5", "replaced"):
        writer = TierWriter(f"{url}/{path}", ack="object", **OFF)
        dcp.save(state_of(5), storage_writer=writer, no_dist=True)
    again = tensors(f"{url}/run/step_5", **OFF)
    assert again == tensors(f"{url}/replaced", **OFF)
    assert again["model.frozen"] == expected["tensors"]["run/step_3"]["model.frozen"]
    assert main(["prune", f"{url}/run", "--keep", "latest:2"]) == 0
    collect(url)
    assert tensors(f"{url}/run/step_3", **OFF) == expected["tensors"]["run/step_3"]
    assert main(["verify", url]) == 0


def test_a_kept_run_resumes_at_its_last_logged_step(kept, monkeypatch):
    # A log names the torch, the CPU and the threads that made it. This one comes out the same with any of them.
    monkeypatch.setattr("tierfs.train.replay.again._doubt", lambda *_: "")
    url, expected = kept("run")
    training = Training()
    with Manager(f"{url}/run", save=[Replay(ring="8MiB", level="object")], nvme="0", ram="64MiB") as manager:
        restored = manager.restore(training.state)
        assert (restored.step, restored.replayed, restored.is_exact) == (STEPS - 1, STEPS - 1, True)
        assert training.content() == expected["content"]
        for step in range(STEPS, STEPS + 3):
            training.step(step)
            manager.step(step, training.state, metrics={"loss": 0.5})
    resumed = Training()
    with Manager(f"{url}/run", save=[Replay(ring="8MiB", level="object")], nvme="0", ram="64MiB") as manager:
        assert manager.restore(resumed.state).step == STEPS + 2
    assert resumed.content() == training.content()


def test_what_a_kept_host_had_pending_is_published(kept):
    url, expected = kept("host", is_on_its_host=True)
    options = {"ram": "64MiB", "nvme": "64MiB"}
    fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    pending = {path: digest(fs.cat_file(f"{root}/{path}")) for path in expected["pending"]}
    assert pending == expected["pending"]
    for path, found in expected["tensors"].items():
        assert tensors(f"{url}/{path}", **options) == found
    for path in (*expected["pending"], *expected["tensors"]):
        fs.wait(f"{root}/{path}", "object")
    assert fs.status(root)["conflict_files"] == 1
    published = files(url, **OFF)
    assert {path: published[path] for path in pending} == pending
    assert {path: tensors(f"{url}/{path}", **OFF) for path in expected["tensors"]} == expected["tensors"]
    assert published["shared/contended"] == expected["files"]["shared/contended"]
    assert main(["verify", url]) == 0
