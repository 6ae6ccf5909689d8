"""Copies of errors without frames, for an owner of host memory that keeps an error and raises it later.

The frames of an error refer to tensors in that memory, and the tensors refer to its owner. The garbage collector does
not see these references, so an owner that kept the original error would live until the process ends.
"""

from __future__ import annotations

import contextlib
import copy
from typing import TypeVar

_E = TypeVar("_E", bound=BaseException)


def detached(error: _E) -> _E:
    """Copy an error and the chain of its causes, without frames. If an error cannot be copied, remove its frames."""
    causes: list[BaseException] = []
    cause = error.__cause__
    while cause is not None and cause is not error and not any(cause is known for known in causes):
        causes.append(cause)
        cause = cause.__cause__
    kept: BaseException | None = None
    for one in reversed(causes):
        kept = _with_cause(one, kept)
    return _with_cause(error, kept)


def _with_cause(error: _E, cause: BaseException | None) -> _E:
    # tblib, which Dask uses, makes copies with frames.
    made = _copy_of(error).with_traceback(None)
    made.__cause__ = cause
    made.__context__ = None
    return made


def _copy_of(error: _E) -> _E:
    with contextlib.suppress(Exception):  # an error may have any constructor
        made = copy.copy(error)
        if type(made) is type(error) and str(made) == str(error):
            return made
    with contextlib.suppress(Exception):
        # The constructor derived the message from its arguments. Do not call it again with that message.
        made = type(error).__new__(type(error), *error.args)
        made.__dict__.update(error.__dict__)
        if str(made) == str(error):
            return made
    return error
