"""A stand-in for a tensor that cannot be copied. Plans are made of it, so every rank learns of it."""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch

from tierfs.errors import InvalidInputError

__all__ = ["Refused", "refused"]


class Refused(torch.Tensor):  # type: ignore[misc]  # torch's classes are untyped here
    """Has no elements, and is never saved.

    Attributes:
        why: Names the tensor, and says what to store in its place. torch's copies of this one know no more than the default.
    """

    why = "a tensor of which there is no copy"

    def __create_write_items__(self, _fqn: str, _object: Any) -> NoReturn:
        """Refuse to be planned, by DCP's protocol for tensors that know their items."""
        raise InvalidInputError(self.why)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse to become part of an object's bytes, where nobody would look for what is missing."""
        raise InvalidInputError(self.why)


def refused(why: str) -> Refused:
    """A stand-in, which may be sent to the process that saves."""
    made: Refused = torch.Tensor._make_subclass(Refused, torch.empty(0))
    made.why = why
    return made


def _reduce(stand_in: Refused) -> tuple[Any, ...]:
    return refused, (stand_in.why,)


ForkingPickler.register(Refused, _reduce)
