"""MLflow 3: artifacts of runs and models in a store. MLflow finds this by itself for ``tierfs:`` URLs."""

from __future__ import annotations

import os
import posixpath
import re
from urllib.parse import unquote

import fsspec
from mlflow.entities import FileInfo
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository, verify_artifact_path

from tierfs.plugs import logger

_LEAVES = re.compile(r"(^|/)\.\.(/|$)|^/|\\|^file:|^[\w+.:-]+://", re.IGNORECASE)
"""Matches a path that leads out of the directory to which it belongs, as MLflow's clients and servers may read it."""


class TierArtifactRepository(ArtifactRepository):
    """Artifacts below a tierfs URL, such as ``mlflow.create_experiment(name, artifact_location=URL)`` sets."""

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        super().__init__(artifact_uri, tracking_uri, registry_uri)
        self._fs, self._root = fsspec.url_to_fs(artifact_uri)
        logger.info("tierfs: MLflow's artifacts go to %s; a file is done at the configured level", artifact_uri)

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        verify_artifact_path(artifact_path)
        self._fs.put_file(local_file, self._at(artifact_path, os.path.basename(local_file)))

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        verify_artifact_path(artifact_path)
        if os.listdir(local_dir):
            self._fs.put(f"{os.path.abspath(local_dir)}/", f"{self._at(artifact_path)}/", recursive=True)

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        place = self._at(path)
        if not self._fs.isdir(place):
            return []
        return sorted(map(self._info, self._fs.ls(place, detail=True)), key=lambda info: str(info.path))

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        place = self._at(artifact_path)
        if self._fs.exists(place):
            self._fs.rm(place, recursive=True)

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        self._fs.get_file(self._at(remote_file_path), local_path)

    def _at(self, *parts: str | None) -> str:
        """Return a path in the store. Raises `MlflowException` for one that leaves the directory of the artifacts."""
        given = [part for part in parts if part]
        for part in given:
            read, before = str(part), ""
            while read != before and not _LEAVES.search(read):
                read, before = unquote(read), read
            if read != before:
                raise MlflowException(
                    f"Invalid artifact path: {part!r} leaves {self.artifact_uri}: give a relative path"
                )
        return posixpath.join(self._root, *given)

    def _info(self, entry: dict[str, object]) -> FileInfo:
        is_directory = entry["type"] == "directory"
        path = posixpath.relpath(str(entry["name"]), self._root)
        return FileInfo(path, is_directory, None if is_directory else entry["size"])
