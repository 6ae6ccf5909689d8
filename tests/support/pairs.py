"""Few draws of many settings: each pair of values of two axes occurs in at least one draw."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any


def pairs(axes: Mapping[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Return draws with one value for each axis, which cover all pairs of values. The seed decides their order."""
    noise = random.Random(seed)
    values = {axis: range(len(found)) for axis, found in axes.items()}
    left = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(axes, 2)
        for x, y in itertools.product(values[a], values[b])
    }
    draws = []
    while left:
        draw = dict(noise.choice(sorted(map(sorted, left))))
        for axis in noise.sample(list(axes), len(axes)):
            if axis not in draw:
                draw[axis] = max(
                    noise.sample(values[axis], len(values[axis])),
                    key=lambda value, axis=axis: sum(frozenset([(axis, value), one]) in left for one in draw.items()),
                )
        left -= {frozenset(pair) for pair in itertools.combinations(draw.items(), 2)}
        draws.append({axis: axes[axis][draw[axis]] for axis in axes})
    return draws


def run_each(draws: Iterable[Mapping[str, Any]], run: Callable[[Mapping[str, Any]], object], seed: int) -> None:
    """Run draws one after another. An error names the draw, its place and the seed."""
    for place, draw in enumerate(draws):
        try:
            run(draw)
        except Exception as error:
            raise AssertionError(f"draw {place} of TIERFS_TEST_SEED={seed}, {dict(draw)}: {error!r}") from error
