"""Ray Train 2.60: a run's storage in a store, an upload function for checkpoints, and a policy for Ray's notice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import fsspec
import ray.train
from pyarrow.fs import FSSpecHandler, PyFileSystem

from tierfs.errors import InvalidInputError
from tierfs.train import Context

_logger = logging.getLogger("tierfs.plugs")


def storage(url: str, *, ack: str | None = None, **options: Any) -> dict[str, Any]:
    """Return the arguments of ``RunConfig`` that put a run's storage into a store.

    Ray refuses the URL itself. Give them as ``RunConfig(name=..., **storage(url))``.

    Args:
        url: A tierfs URL of the directory that holds the runs. Every node must reach its object tier.
        ack: The level at which each file that Ray writes is done; ``None`` for the configured one. A node that is lost
            takes along what is not at ``"object"``.
        **options: Options of the filesystem, such as ``s3={...}``.
    """
    if not url.startswith("tierfs:"):
        raise InvalidInputError(
            f"{url!r} is not a tierfs URL: give 'tierfs::s3://bucket/runs', or give it to Ray itself"
        )
    fs, path = fsspec.url_to_fs(url, **options, **({} if ack is None else {"ack": ack}))
    level = ack or "the configured level"
    _logger.warning("tierfs: checkpoints and results of Ray go to %s; a file is done at %s", url, level)
    return {"storage_path": path, "storage_filesystem": PyFileSystem(FSSpecHandler(fs))}


def run_url(name: str = "") -> str:
    """Return the URL of a path in the run's directory, for `tierfs.train.Manager` or `TierWriter`. For workers."""
    fs, path = _place()
    return str(fs.unstrip_protocol(f"{path}/{name}".rstrip("/")))


def upload(ack: str | None = None) -> Callable[[Any, str], Any]:
    """Return a ``checkpoint_upload_fn`` for ``ray.train.report``, which uploads a local directory into the run's storage.

    Args:
        ack: The level at which a file is uploaded, such as ``"staged"``: then the flusher brings it to the bucket while
            training goes on. ``None`` for that of `storage`.
    """

    def upload_fn(checkpoint: Any, checkpoint_dir_name: str) -> Any:
        fs, path = _place()
        target = f"{path}/{checkpoint_dir_name}"
        with checkpoint.as_directory() as directory:
            fs.put(f"{directory}/", target, recursive=True, **({} if ack is None else {"ack": ack}))
        return ray.train.Checkpoint(target, filesystem=PyFileSystem(FSSpecHandler(fs)))

    return upload_fn


def _place() -> tuple[Any, str]:
    """Return the run's filesystem, and its directory there."""
    context = ray.train.get_context().get_storage()
    fs = getattr(getattr(context.storage_filesystem, "handler", None), "fs", None)
    if not hasattr(fs, "ack"):
        raise InvalidInputError("the run's storage is not in a store: give RunConfig(**tierfs.plugs.ray.storage(URL))")
    return fs, context.experiment_fs_path


@dataclass(slots=True)
class Notice:
    """A save policy: saves once when Ray announces that a node of this run will be taken away.

    Training goes on, because Ray takes a run that returns for a finished one. Ray restarts it when the node is gone.

    Args:
        every: Ask Ray at each step of which this is a divisor. All workers wait for each other there.
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
