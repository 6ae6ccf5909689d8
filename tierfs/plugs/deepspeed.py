"""DeepSpeed 0.19: `save_checkpoint` and `load_checkpoint` of an engine, with its checkpoints in a store."""

from __future__ import annotations

import contextlib
import os
import posixpath
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import torch
from deepspeed import comm
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from tierfs.errors import NotFoundError
from tierfs.plugs import announce, say_files_loaded


def save_checkpoint(engine: Any, url: str, tag: str | None = None, *, ack: str | None = None, **options: Any) -> None:
    """Save a checkpoint as ``engine.save_checkpoint`` does. Call it on all ranks.

    The file ``latest`` names the checkpoint once all ranks have saved their files.

    Args:
        engine: What ``deepspeed.initialize`` returned.
        url: A directory in a store, in place of a local one.
        tag: Name of the checkpoint; by default ``global_stepN``.
        ack: The level that each file must reach; ``None`` for the configured one. On several nodes that is ``"object"``.
        **options: Other arguments of ``engine.save_checkpoint``, such as ``client_state``.
    """
    if comm.get_rank() == 0:
        announce("DeepSpeed's checkpoints", url, ack)
    with _in_store(engine, url, ack) as files:
        engine.save_checkpoint(files.directory, tag, save_latest=False, **options)
        if comm.get_rank() == 0:
            files.fs.pipe_file(files.latest, files.tag.encode())
        comm.barrier()


def load_checkpoint(engine: Any, url: str, tag: str | None = None, **options: Any) -> tuple[str | None, Any]:
    """Load a checkpoint that `save_checkpoint` saved. Its files are pickles, as always with DeepSpeed: trust them.

    The arguments are those of `save_checkpoint`; without a tag, it loads the one that was saved last. ``options`` are
    other arguments of ``engine.load_checkpoint``. Returns the checkpoint's URL and its ``client_state``, or twice
    ``None`` if nothing was saved and no tag is given. Raises `NotFoundError` if no checkpoint has this tag.
    """
    with _in_store(engine, url, None) as files:
        if tag is None and not files.fs.exists(files.latest):
            return None, None
        tag = tag or files.fs.cat_file(files.latest).decode()
        names, begun = files.prepare(tag), time.monotonic()
        found, client_state = engine.load_checkpoint(files.directory, tag, **options)
        if found and comm.get_rank() == 0:
            say_files_loaded(files.fs, f"{url.rstrip('/')}/{tag}", engine.global_steps, names, begun)
        return found and f"{url.rstrip('/')}/{tag}", client_state


class TierCheckpointEngine(CheckpointEngine):
    """DeepSpeed's files in a store. ``directory`` stands for the URL where DeepSpeed wants a local path."""

    def __init__(self, url: str, directory: str, ack: str | None) -> None:
        super().__init__()
        self.fs, self.root = fsspec.url_to_fs(url, **({"ack": ack} if ack else {}))
        self.directory, self.latest = directory, posixpath.join(self.root, "latest")

    def create(self, info: Any) -> None:
        self.tag: str = info.tag

    def save(self, state_dict: Any, path: str) -> None:
        with self.fs.open(self._at(path), "wb") as file:
            torch.save(state_dict, file)

    def load(self, path: str, map_location: Any = None) -> Any:
        with self.fs.open(self._at(path), "rb") as file:
            return torch.load(file, map_location=map_location, weights_only=False)

    def commit(self, info: Any) -> bool:
        """Store the files that DeepSpeed wrote into the directory by itself: scripts, and offloaded tensors."""
        for path in filter(os.path.isfile, Path(self.directory).rglob("*")):
            self.fs.put_file(str(path), self._at(path))
        return True

    def prepare(self, tag: str) -> list[str]:
        """Make an empty file for each one that `load` reads, because DeepSpeed looks for them. Fetch the others.

        Returns:
            The paths of all files of the checkpoint in the store.
        """
        found: list[str] = self.fs.find(posixpath.join(self.root, tag))
        if not found:
            raise NotFoundError(f"{self.fs.unstrip_protocol(self.root)} has no checkpoint {tag!r}")
        for name in found:
            path = Path(self.directory, posixpath.relpath(name, self.root))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch() if path.suffix == ".pt" else self.fs.get_file(name, str(path))
        return found

    def _at(self, path: str | Path) -> str:
        return posixpath.join(self.root, os.path.relpath(path, self.directory))


@contextlib.contextmanager
def _in_store(engine: Any, url: str, ack: str | None) -> Iterator[TierCheckpointEngine]:
    former = engine.checkpoint_engine
    with tempfile.TemporaryDirectory(prefix="tierfs-deepspeed-") as directory:
        engine.checkpoint_engine = TierCheckpointEngine(url, directory, ack)
        try:
            yield engine.checkpoint_engine
        finally:
            engine.checkpoint_engine = former
