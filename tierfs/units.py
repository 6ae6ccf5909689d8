"""Format and parse sizes, parse times, check timeouts."""

from __future__ import annotations

import math
import re
from numbers import Real

from tierfs.errors import InvalidInputError

BINARY = 1024
# About thirty years. The system's calls refuse much longer timeouts, and JSON has no infinity.
TIMEOUT_S_MAX = 1e9
_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")
_PERCENT = re.compile(r"\s*([0-9]{1,3})(?:\.([0-9]{1,12}))?\s*%\s*")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtTpP]?)(i?)([bB]?)\s*")


def format_bytes(count: int) -> str:
    """Format a byte count with binary units and three significant digits: ``1536`` as ``"1.5 KiB"``."""
    if abs(count) < BINARY:
        return f"{count} B"
    value, power = count / BINARY, 0
    while abs(value) >= BINARY and power < len(_BINARY) - 1:
        value /= BINARY
        power += 1
    unit = _BINARY[power]
    # Three digits. ``.3g`` would print four digits before the point in exponential form.
    return f"{value:.0f} {unit}" if abs(value) >= 999.5 else f"{value:.3g} {unit}"  # noqa: PLR2004


def parse_size(text: str | float) -> int:
    """Parse ``"8GiB"``, ``"10M"`` or ``"512"``; return a whole number as it is. ``i`` means powers of 1024, else of 1000.

    Raises:
        InvalidInputError: The text is no size; or the number is negative or not whole.
    """
    if isinstance(text, Real) and not isinstance(text, bool) and 0 <= text < math.inf and text == int(text):
        return int(text)
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidInputError(f"{text!r} is not a size: write a number with a unit, like 512, 10M or 8GiB")
    number, prefix, binary, _ = match.groups()
    power = " kmgtp".index(prefix.lower() or " ")
    return int(float(number) * (BINARY if binary else 1000) ** power)


def parse_share(text: str | float, whole: int) -> int:
    """Parse a size like `parse_size`, or ``"25%"`` or ``"0.5%"`` as that share of ``whole``, rounded down.

    Raises:
        InvalidInputError: The text is neither a size nor a share, or a share over 100 %.
    """
    match = _PERCENT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return parse_size(text)
    decimals = match[2] or ""
    part, all_parts = int(match[1] + decimals), int("100" + "0" * len(decimals))
    if part > all_parts:
        raise InvalidInputError(f"{text!r} is more than 100%: write a share from 0% to 100%, or a size like 8GiB")
    return whole * part // all_parts


def parse_time(text: str, name: str) -> float:
    """Parse a time such as ``"2d"``, ``"6h"``, ``"30m"``, ``"10s"`` or ``"1w"``, and return it in seconds.

    Args:
        text: The time.
        name: The name of the argument or class that got the time, for errors.

    Raises:
        InvalidInputError: The text is not a time.
    """
    match = _TIME.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidInputError(f"{name}({text!r}): must be a number and a unit (s, m, h, d or w), like 2d")
    return float(match[1]) * _UNITS_S[match[2]]


def bounded_timeout(seconds: float | None) -> float | None:
    """Return a timeout that every call accepts: ``None``, for no limit, if it is infinite or over `TIMEOUT_S_MAX`.

    Raises:
        InvalidInputError: It is not a number.
    """
    if seconds is not None and math.isnan(seconds):
        raise InvalidInputError("a timeout of nan is not a number of seconds")
    return seconds if seconds is not None and seconds <= TIMEOUT_S_MAX else None
