"""References of wandb's artifacts to files in a store: listed with digests, downloaded, refused after a change."""

from __future__ import annotations

from pathlib import Path

import pytest

wandb = pytest.importorskip("wandb", reason="wandb is not installed: docs/how-to/integration-tests.md")

import fsspec

import tierfs
from tierfs.errors import ConflictError, InvalidInputError, NotFoundError
from tierfs.plugs.wandb import register

pytestmark = pytest.mark.filterwarnings("default")  # of wandb
CONTENT = {"a.bin": b"a" * 100_000, "sub/b.bin": b"b", "sub/empty": b""}


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Return the URL of a directory with the files of `CONTENT`."""
    tierfs.init(f"file://{tmp_path}/store")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb"))
    monkeypatch.chdir(tmp_path)
    register()
    register()
    url = f"tierfs::file://{tmp_path}/store/run"
    fs, path = fsspec.url_to_fs(url)
    fs.pipe({f"{path}/{name}": value for name, value in CONTENT.items()})
    return url


def entries(artifact):
    return {name: (entry.ref, entry.size) for name, entry in artifact.manifest.entries.items()}


def test_a_directory_and_a_file_are_referred_to_with_their_digests(store):
    artifact = wandb.Artifact("model", type="model")
    artifact.add_reference(store)
    assert entries(artifact) == {name: (f"{store}/{name}", len(value)) for name, value in CONTENT.items()}
    artifact.add_reference(f"{store}/a.bin", name="weights")
    artifact.add_reference(f"{store}/sub", name="more")
    found = entries(artifact)
    assert found["weights"] == (f"{store}/a.bin", 100_000)
    assert {"more/b.bin", "more/empty"} <= set(found)
    fs, path = fsspec.url_to_fs(store)
    assert artifact.manifest.entries["a.bin"].digest == fs.ukey(f"{path}/a.bin")
    again = wandb.Artifact("model", type="model")
    again.add_reference(store)
    again.add_reference(f"{store}/a.bin", name="weights")
    again.add_reference(f"{store}/sub", name="more")
    assert again.digest == artifact.digest
    assert again.manifest.entries.keys() == artifact.manifest.entries.keys()


def test_a_run_logs_references_offline_and_reads_them_back(store, tmp_path):
    artifact = wandb.Artifact("model", type="model")
    artifact.add_reference(store)
    with wandb.init(project="one", mode="offline", dir=str(tmp_path)) as run:
        run.log_artifact(artifact)
    policy, entry = artifact.manifest.storage_policy, artifact.manifest.entries["a.bin"]
    assert policy.load_reference(entry) == f"{store}/a.bin"
    copy = policy.load_reference(entry, local=True)
    assert Path(copy).read_bytes() == CONTENT["a.bin"]
    (tmp_path / "loaded").mkdir()
    policy.load_reference(entry, local=True, dest_path=str(tmp_path / "loaded" / "a.bin"))
    assert (tmp_path / "loaded" / "a.bin").read_bytes() == CONTENT["a.bin"]
    fs, path = fsspec.url_to_fs(store)
    fs.pipe_file(f"{path}/sub/b.bin", b"other")
    with pytest.raises(ConflictError, match="has changed"):
        policy.load_reference(artifact.manifest.entries["sub/b.bin"], local=True)


def test_a_missing_path_and_too_many_files_are_refused(store):
    artifact = wandb.Artifact("model", type="model")
    with pytest.raises(NotFoundError, match="missing"):
        artifact.add_reference(f"{store}/missing")
    with pytest.raises(InvalidInputError, match="max_objects"):
        artifact.add_reference(store, max_objects=2)
    (entry,) = artifact.add_reference(f"{store}/anything", checksum=False)
    assert (entry.path, entry.ref) == ("anything", f"{store}/anything")
