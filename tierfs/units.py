"""Sizes as people write and read them."""

from __future__ import annotations

import re

from tierfs.errors import InvalidInputError

__all__ = ["format_bytes", "parse_size"]

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtTpP]?)(i?)([bB]?)\s*")


def format_bytes(count: int) -> str:
    """``1536`` as ``"1.5 KiB"``: three significant digits, binary units."""
    value = float(count)
    for unit in _BINARY:
        if abs(value) < 1024 or unit == _BINARY[-1]:  # noqa: PLR2004 - the base of binary units
            return f"{int(value)} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"  # noqa: PLR2004
        value /= 1024
    raise AssertionError(count)


def parse_size(text: str | int) -> int:
    """``"8GiB"``, ``"10M"``, ``"512"`` or a plain number as a count. ``i`` means powers of 1024, else of 1000.

    Raises:
        InvalidInputError: The text is no size.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidInputError(f"{text!r} is no size: write a number with a unit, like 512, 10M or 8GiB")
    number, prefix, binary, _ = match.groups()
    power = " kmgtp".index(prefix.lower() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)
