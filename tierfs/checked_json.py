"""Parse JSON that a store, a peer, a server or another process of this host wrote.

Python's parser raises `RecursionError` for deep nesting, takes ``NaN`` for JSON, and returns numbers that no float can
hold. Code that is handed such values fails far from here, with an error that nobody expects. `parse_value` raises one error.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Literal, NoReturn, TypeAlias

from tierfs.digest import Buffer
from tierfs.errors import FormatError

DEPTH_MAX = 100  # functions that walk through a value stay far from Python's own limit, 1000 calls
DIGITS_MAX = 300  # a float holds every such integer
_LONG = re.compile(f"[0-9]{{{DIGITS_MAX + 1}}}")
Numbers: TypeAlias = Literal["finite", "any", "integers"]


def parse_value(data: Buffer | str, where: str, *, numbers: Numbers = "finite", unique: bool = False) -> Any:
    """Return the value of a JSON text, whose size the caller has bounded.

    Args:
        data: Bytes are UTF-8.
        where: Name of the text in errors.
        numbers: ``any`` takes ``NaN`` and ``Infinity``, too; ``integers`` refuses fractions and exponents.
        unique: Whether to refuse an object in which a name occurs twice.

    Raises:
        FormatError: The text is not JSON, or a value is over `DEPTH_MAX` or `DIGITS_MAX`.
    """
    try:
        text = data if isinstance(data, str) else str(data, "utf-8")
        found = json.loads(
            text,
            parse_constant=None if numbers == "any" else _refuse,
            parse_float={"finite": _finite, "any": None, "integers": _refuse}[numbers],
            parse_int=_short if _LONG.search(text) else None,
            object_pairs_hook=_unique if unique else None,
        )
        _check_depth(found)
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError(f"{where} is not JSON that tierfs reads: {error!s:.200}", path=where) from error
    return found


def parse_object(
    data: Buffer | str, where: str, *, numbers: Numbers = "finite", unique: bool = False
) -> dict[str, Any]:
    """Return the JSON object in a text. Raises as `parse_value`, also for any other value."""
    found = parse_value(data, where, numbers=numbers, unique=unique)
    if not isinstance(found, dict):
        raise FormatError(f"{where} is not a JSON object, but {type(found).__name__}", path=where)
    return found


def _check_depth(value: object) -> None:
    level, depth = [value], 0
    while level := [
        inner
        for each in level
        if isinstance(each, (dict, list))
        for inner in (each.values() if isinstance(each, dict) else each)
    ]:
        depth += 1
        if depth > DEPTH_MAX:
            raise ValueError(f"it is nested more than {DEPTH_MAX} deep")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _short(text: str) -> int:
    return int(text) if len(text) <= DIGITS_MAX else _refuse(f"a number of {len(text)} digits")


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text:.40} is no number that is allowed here")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name occurs twice")
    return made
