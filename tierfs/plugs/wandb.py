"""Weights & Biases: references of artifacts to files in a store, with their digests. Call `register` once."""

from __future__ import annotations

import posixpath
import shutil
from typing import Any

import fsspec
from wandb.sdk.artifacts.artifact_file_cache import get_artifact_file_cache
from wandb.sdk.artifacts.artifact_manifest_entry import ArtifactManifestEntry
from wandb.sdk.artifacts.storage_handler import DEFAULT_MAX_OBJECTS, StorageHandler
from wandb.sdk.artifacts.storage_policies import wandb_storage_policy

from tierfs.errors import ConflictError, InvalidInputError, NotFoundError


def register() -> None:
    """Let ``Artifact.add_reference`` look into tierfs URLs, of which wandb keeps the name alone. Call it once."""
    make = wandb_storage_policy.make_storage_handlers
    wandb_storage_policy.make_storage_handlers = lambda session: [TierReferenceHandler(), *make(session)]


class TierReferenceHandler(StorageHandler):
    """References to a file, or to each file of a directory. An entry's digest is the content digest of the file."""

    def __init__(self) -> None:
        self._cache = get_artifact_file_cache()  # wandb sets a path there for a download without a cache

    def can_handle(self, parsed_url: Any) -> bool:
        return bool(parsed_url.scheme == "tierfs")

    def store_path(
        self, artifact: Any, path: str, name: Any = None, checksum: bool = True, max_objects: int | None = None
    ) -> list[ArtifactManifestEntry]:
        fs, root = fsspec.url_to_fs(path)
        if not checksum:
            return [ArtifactManifestEntry(path=name or posixpath.basename(root), ref=path, digest=path)]
        found = fs.find(root, detail=True)
        if not found:
            raise NotFoundError(f"{path} is not there, or has no files", path=path)
        if len(found) > (max_objects or DEFAULT_MAX_OBJECTS):
            raise InvalidInputError(f"{path} has {len(found)} files: give add_reference a max_objects above that")
        above = posixpath.dirname(root) if name is None and root in found else root
        return [
            ArtifactManifestEntry(
                path=posixpath.normpath(posixpath.join(str(name or ""), posixpath.relpath(file, above))),
                ref=fs.unstrip_protocol(file),
                digest=fs.ukey(file),
                size=info["size"],
            )
            for file, info in found.items()
        ]

    def load_path(self, manifest_entry: ArtifactManifestEntry, local: bool = False) -> Any:
        """Return the reference, or the path of a verified copy in wandb's cache. Raises `ConflictError` after a change."""
        reference, digest = str(manifest_entry.ref), manifest_entry.digest
        if not local:
            return reference
        path, is_cached, create = self._cache.check_etag_obj_path(reference, digest, manifest_entry.size or 0)
        if is_cached:
            return path
        fs, place = fsspec.url_to_fs(reference)
        if digest not in (reference, fs.ukey(place)):
            raise ConflictError(f"{reference} has changed since it was logged: log it again", path=reference)
        with fs.open(place, "rb") as source, create(mode="wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        return path
