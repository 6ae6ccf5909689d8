"""The reason of a failed save or load. torch wraps it in a `BaseException`, which few handlers expect."""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from tierfs.errors import TierfsError


def reason_of(error: BaseException) -> Exception:
    """Return the failure of a save or load as an `Exception`.

    If all failed ranks report the same `TierfsError`, return it. Otherwise return a `TierfsError` that lists the
    failure of each rank. An interruption also becomes a `TierfsError`. Any other exception is returned unchanged.
    """
    if not isinstance(error, CheckpointException):
        return error if isinstance(error, Exception) else TierfsError(f"interrupted by {error!r}")
    failures = {rank: failure for rank, (failure, _) in sorted(error.failures.items())}
    own = {str(failure): failure for failure in failures.values() if isinstance(failure, TierfsError)}
    if len(own) == 1 and all(isinstance(failure, TierfsError) for failure in failures.values()):
        return next(iter(own.values()))
    listed = "; ".join(f"rank {rank}: {type(failure).__name__}: {failure}" for rank, failure in failures.items())
    found = TierfsError(listed)
    found.__cause__ = error
    return found
