"""A stand-in for a tensor that cannot be copied. Planning it fails, so every rank gets the error."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch

from tierfs.errors import InvalidInputError


class Refused(torch.Tensor):  # type: ignore[misc]  # torch's classes are untyped here
    """A tensor without elements that is never saved.

    Attributes:
        why: Names the original tensor, and says what to store instead. torch's copies of this tensor have the default.
    """

    why = "a tensor that cannot be copied"

    def __create_write_items__(self, _fqn: str, _object: Any) -> NoReturn:
        """Raise, by DCP's protocol for tensors that create their own items."""
        raise InvalidInputError(self.why)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Raise: inside the bytes of an object, the missing tensor would go unnoticed."""
        raise InvalidInputError(self.why)


def refused(why: str) -> Refused:
    """Return a stand-in. It may be sent to the process that saves."""
    made: Refused = torch.Tensor._make_subclass(Refused, torch.empty(0))
    made.why = why
    return made


def _reduce(stand_in: Refused) -> tuple[Any, ...]:
    return refused, (stand_in.why,)


ForkingPickler.register(Refused, _reduce)
