"""Ray Train 2.60: a run's storage in a store, an upload function for checkpoints, and a policy for Ray's notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import fsspec
import ray.train
from pyarrow.fs import FSSpecHandler, PyFileSystem

from tierfs.errors import InvalidInputError
from tierfs.plugs import announce, checked_url
from tierfs.train import Context


def storage(url: str, *, ack: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the arguments of ``RunConfig`` that put a run's storage into a store.

    Give them as ``RunConfig(name=..., **storage(url))``: Ray refuses the URL of a directory itself.

    Every node must reach its object tier. ``ack`` is the level at which each file is done; ``None`` for the configured
    one. A node that is lost takes along what is not at ``"object"``. ``options`` are those of the filesystem.
    """
    fs, path = fsspec.url_to_fs(checked_url(url), **({"ack": ack} if ack else {}), **options)
    announce("checkpoints and results of Ray", url, ack)
    return {"storage_path": path, "storage_filesystem": PyFileSystem(FSSpecHandler(fs))}


def run_url(name: str = "") -> str:
    """Return the URL of a path in the run's directory, for `tierfs.train.Manager` or `TierWriter`. For workers."""
    fs, path = _place()
    return str(fs.unstrip_protocol(f"{path}/{name}".rstrip("/")))


def upload(ack: str | None = None) -> Callable[[Any, str], Any]:
    """Return a ``checkpoint_upload_fn`` for ``ray.train.report``, which uploads a local directory into the run's storage.

    ``ack`` is the level at which it returns, such as ``"staged"``; ``None`` for that of `storage`.
    """

    def upload_fn(checkpoint: Any, checkpoint_dir_name: str) -> Any:
        fs, path = _place()
        target = f"{path}/{checkpoint_dir_name}"
        with checkpoint.as_directory() as directory:
            fs.put(f"{directory}/", target, recursive=True, ack=ack)
        return ray.train.Checkpoint(target, filesystem=PyFileSystem(FSSpecHandler(fs)))

    return upload_fn


def _place() -> tuple[Any, str]:
    context = ray.train.get_context().get_storage()
    fs = getattr(getattr(context.storage_filesystem, "handler", None), "fs", None)
    if not hasattr(fs, "ack"):
        raise InvalidInputError("the run's storage is not in a store: give RunConfig(**tierfs.plugs.ray.storage(URL))")
    return fs, context.experiment_fs_path


@dataclass(slots=True)
class Notice:
    """A save policy: saves once when Ray announces that a node of this run will be taken away.

    Training goes on, because Ray takes a run that returns for a finished one. Ray restarts it when the node is gone.
    Ray is asked at each step of which ``every`` is a divisor. All workers wait for each other there.
    """

    every: int = 1
    is_uniform: bool = field(default=True, init=False)
    _seen: frozenset[str] = field(default=frozenset(), init=False)

    def should_save(self, step: int, previous: Sequence[int], *, context: Context) -> bool:
        """Return whether Ray has announced a node that it had not announced before."""
        if step % self.every:
            return False
        info = ray.train.get_preemption_info()
        nodes = frozenset(info.preempted_node_ids) if info is not None else frozenset()
        is_new = not nodes <= self._seen
        self._seen |= nodes
        return is_new
