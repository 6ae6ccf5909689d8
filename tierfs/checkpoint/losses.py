"""Find the checkpoints and tensors that are lost when files of a store cannot be read any more."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tierfs.checkpoint.catalog import candidates, step_of
from tierfs.dcp.checkpoint import open_checkpoint
from tierfs.errors import CorruptionError, FormatError, NotFoundError
from tierfs.format.checkpoint import metadata_file
from tierfs.format.keys import inside
from tierfs.store import Store

Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CheckpointLoss:
    """The losses of a checkpoint.

    Attributes:
        path: The path of its directory.
        step: The training step, if the directory's name contains it.
        files: The names of the lost or damaged files in the directory.
        names: The tensors and objects that cannot be loaded, sorted.
        is_whole: Whether nothing of it can be loaded, because its metadata is lost.
    """

    path: str
    step: int | None
    files: tuple[str, ...]
    names: tuple[str, ...]
    is_whole: bool = False


def checkpoint_losses(store: Store, lost: Mapping[str, Ranges], gone: Collection[str]) -> list[CheckpointLoss]:
    """Return the losses of each checkpoint that lost something.

    Args:
        store: The store.
        lost: Paths of files with unreadable parts, each with the offset and length of these parts in bytes.
        gone: Paths of files that are lost as a whole.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    found = []
    for path in gone:
        directory, _, name = path.rpartition("/")
        if name == metadata_file():
            found.append(CheckpointLoss(directory, step_of(directory), (name,), (), is_whole=True))
    for candidate in candidates(store, ""):
        for rank in candidate.ranks:
            loss = _loss(store, candidate.directory, rank, lost, gone)
            if loss is not None:
                found.append(loss)
    return found


def _loss(
    store: Store, directory: str, rank: int | None, lost: Mapping[str, Ranges], gone: Collection[str]
) -> CheckpointLoss | None:
    step, metadata = step_of(directory), metadata_file(rank)
    if inside(directory, metadata) in lost:
        return CheckpointLoss(directory, step, (metadata,), (), is_whole=True)
    try:
        checkpoint = open_checkpoint(store, directory, rank=rank)
    except (CorruptionError, FormatError, NotFoundError):
        return None  # not a checkpoint, or already listed because of its metadata
    missing: dict[str, Ranges] = {}
    for name in checkpoint.files():
        path = inside(directory, name)
        if path in gone:
            missing[name] = ((0, 1 << 62),)
        elif path in lost:
            missing[name] = lost[path]
    if not missing:
        return None
    names = {
        fqn
        for fqn, place in checkpoint.places()
        for begin, length in missing.get(place.file, ())
        if begin < place.at + place.length and place.at < begin + length
    }
    return CheckpointLoss(directory, step, tuple(sorted(missing)), tuple(sorted(names)))
