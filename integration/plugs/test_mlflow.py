"""MLflow with its artifacts in a store: logged, listed, downloaded, deleted, and read by another host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed: docs/how-to/integration-tests.md")

import fsspec
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

import tierfs

pytestmark = pytest.mark.filterwarnings("default")  # of MLflow


@pytest.fixture(params=["url", "named"])
def root(request, tmp_path, monkeypatch):
    """Return a URL of a directory in a store, in both forms."""
    store = f"file://{tmp_path}/store"
    tierfs.init(store)
    config = tmp_path / "config.toml"
    config.write_text(f'[stores.runs]\nurl = "{store}"\n')
    monkeypatch.setenv("TIERFS_CONFIG", str(config))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"file://{tmp_path}/runs")
    return "tierfs://runs/artifacts" if request.param == "named" else f"tierfs::{store}/artifacts"


def test_artifacts_are_logged_listed_downloaded_and_deleted(root, tmp_path):
    made = tmp_path / "made"
    (made / "sub").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (made / "sub" / "weights.bin").write_bytes(os.urandom(3 << 20))
    (made / "config.json").write_text("{}")
    with mlflow.start_run(experiment_id=mlflow.create_experiment("one", artifact_location=root)) as run:
        mlflow.log_text("first", "notes/a b.txt")
        mlflow.log_text("second", "notes/a b.txt")
        mlflow.log_artifact(str(made / "config.json"))
        mlflow.log_artifacts(str(made), "model")
        mlflow.log_artifacts(str(tmp_path / "empty"), "nothing")
    client = mlflow.MlflowClient()
    listed = {
        (info.path, info.is_dir, info.file_size)
        for path in (None, "model", "model/sub", "config.json", "missing")
        for info in client.list_artifacts(run.info.run_id, path)
    }
    assert listed == {
        ("config.json", False, 2),
        ("notes", True, None),
        ("model", True, None),
        ("model/config.json", False, 2),
        ("model/sub", True, None),
        ("model/sub/weights.bin", False, 3 << 20),
    }
    assert mlflow.artifacts.load_text(f"{run.info.artifact_uri}/notes/a b.txt") == "second"
    loaded = Path(mlflow.artifacts.download_artifacts(run_id=run.info.run_id, artifact_path="model"))
    assert (loaded / "sub" / "weights.bin").read_bytes() == (made / "sub" / "weights.bin").read_bytes()
    fs, path = fsspec.url_to_fs(run.info.artifact_uri, state_dir=f"{tmp_path}/elsewhere", ram="64MiB")
    fs.wait(path, "object", timeout=60)
    assert fs.cat_file(f"{path}/config.json") == b"{}"
    repository = get_artifact_repository(run.info.artifact_uri)
    repository.delete_artifacts("model/sub")
    repository.delete_artifacts("missing")
    assert [info.path for info in repository.list_artifacts("model")] == ["model/config.json"]
    assert not Path("tierfs::file:").exists()


def test_a_missing_artifact_and_a_path_outside_are_refused(root, tmp_path):
    repository = get_artifact_repository(f"{root}/run")
    (tmp_path / "a").write_text("a")
    repository.log_artifact(str(tmp_path / "a"))
    with pytest.raises(MlflowException, match="missing"):
        repository.download_artifacts("missing")
    with pytest.raises(MlflowException, match="Invalid artifact path"):
        repository.log_artifact(str(tmp_path / "a"), "../other")
    with pytest.raises((MlflowException, ValueError)):
        repository.delete_artifacts("../run")
    assert [info.path for info in repository.list_artifacts()] == ["a"]


def test_an_address_without_a_store_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="tierfs init"):
        get_artifact_repository(f"tierfs::file://{tmp_path}/none").log_artifact(__file__)


OUTSIDE = [
    "/{root}/other",
    "/etc",
    "//other",
    "file:///etc",
    "file:other",
    "tierfs::file:///other",
    "../other",
    "a/../../other",
    "..",
    "%2e%2e/other",
    "%252e%252e/other",
    "..%2Fother",
    "%2Fother",
    "..\\other",
    "a%5C..%5C..%5Cother",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_no_method_takes_a_path_outside_its_directory(root, tmp_path, path):
    (tmp_path / "a").write_text("a")
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "b").write_text("b")
    fs, place = fsspec.url_to_fs(root)
    fs.pipe_file(f"{place}/other/v.txt", b"kept")
    repository = get_artifact_repository(f"{root}/run")
    repository.log_artifact(str(tmp_path / "a"), "a")
    path = path.format(root=place.strip("/"))
    for call in (
        repository.list_artifacts,
        repository.delete_artifacts,
        repository.download_artifacts,
        lambda outside: repository._download_file(f"{outside}/v.txt", str(tmp_path / "got")),  # traces call it
        lambda outside: repository.log_artifact(str(tmp_path / "a"), outside),
        lambda outside: repository.log_artifacts(str(tmp_path / "made"), outside),
    ):
        with pytest.raises(MlflowException, match="Invalid artifact path"):
            call(path)
    assert fs.find(place) == [f"{place}/other/v.txt", f"{place}/run/a/a"]
    assert fs.cat_file(f"{place}/other/v.txt") == b"kept"
    assert not (tmp_path / "got").exists()


def test_a_name_with_odd_letters_stays_an_artifact(root, tmp_path):
    repository = get_artifact_repository(f"{root}/run")
    for name in ("a%20b#1.txt", "model:v1", "..hidden", "50%"):
        (tmp_path / name).write_text(name)
        repository.log_artifact(str(tmp_path / name), "odd..names")
        assert Path(repository.download_artifacts(f"odd..names/{name}")).read_text() == name
