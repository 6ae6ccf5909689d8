"""Names in documents for torch's dtypes, layouts and memory formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tierfs.errors import InvalidInputError


def _all_of(kind: type) -> dict[str, Any]:
    # An alias (torch.half) is the same object as the original, and its text is the original's name (torch.float16).
    found = [value for value in vars(torch).values() if isinstance(value, kind)]
    return {str(value).removeprefix("torch."): value for value in found}


DTYPES: Mapping[str, torch.dtype] = _all_of(torch.dtype)
LAYOUTS: Mapping[str, torch.layout] = _all_of(torch.layout)
MEMORY_FORMATS: Mapping[str, torch.memory_format] = _all_of(torch.memory_format)


def name_of(names: Mapping[str, Any], value: Any, fqn: str) -> str:
    """Return the name of ``value`` in documents.

    Raises:
        InvalidInputError: ``value`` has no name.
    """
    name = str(value).removeprefix("torch.")
    if names.get(name) is not value:
        raise InvalidInputError(f"{fqn}: {value!r} cannot be stored: it has no name in a checkpoint")
    return name
