"""Take the values to save out of a user's state, a dict or a `TrainState`, and put loaded ones back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierfs.errors import InvalidInputError
from tierfs.train.run import ABOUT, About

__all__ = ["FULL_ONLY", "learning_rates", "put_back", "step_of_state", "to_load", "to_save", "with_about"]

FULL_ONLY = "optimizer"
"""The entry of a dict that a light checkpoint leaves out."""
SECTION, _, NAME = ABOUT.partition(".")


def to_save(state: Any, step: int, kind: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Collect the values to save by name, and the facts that describe them.

    Raises:
        InvalidInputError: Something is missing, or has the manager's name.
    """
    said: Mapping[str, Any] = {}
    if isinstance(state, Mapping):
        values = {name: _values_of(value) for name, value in state.items() if kind == "full" or name != FULL_ONLY}
    else:
        values, said = state.to_save(step, kind)
    if SECTION in values:
        raise InvalidInputError(f"the state has an entry called {SECTION!r}, which is the manager's")
    return values, said


def with_about(values: Mapping[str, Any], about: About) -> dict[str, Any]:
    """The same with what the checkpoint says of itself."""
    return {**values, SECTION: {NAME: about.encode()}}


def to_load(state: Any, kind: str, about: About | None) -> dict[str, Any]:
    """Collect the live tensors to load into, by name."""
    if isinstance(state, Mapping):
        return {name: _values_of(value) for name, value in state.items() if kind == "full" or name != FULL_ONLY}
    return dict(state.to_load(kind, about))


def put_back(state: Any, values: Mapping[str, Any], about: About | None) -> list[str]:
    """Give a state what was loaded. Returns what is only approximately as it was, in words."""
    if not isinstance(state, Mapping):
        return list(state.loaded(values, about))
    for name, value in values.items():
        if hasattr(state[name], "load_state_dict"):
            state[name].load_state_dict(value)
        elif isinstance(state, dict):
            state[name] = value
    return []


def step_of_state(state: Any, otherwise: int) -> int:
    """The step that a state says it is of."""
    return otherwise if isinstance(state, Mapping) else int(state.step)


def learning_rates(state: Any) -> list[float] | None:
    """Those that a state has; ``None`` where it does not say."""
    return None if isinstance(state, Mapping) else list(state.learning_rates)


def _values_of(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value
