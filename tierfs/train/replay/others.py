"""`Others`: finds the values of a state that changed although no logged gradient explains it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tierfs.dcp.tensorbytes import SAFETENSORS_NAMES
from tierfs.train.replay.parts import HOOK, REST, SELDOM, Parts, form_of, is_of_model
from tierfs.train.replay.sample import Sample, inner, versions
from tierfs.train.values import digests_of, pack

DIGESTED_MAX = 16 << 20
"""A look always computes the digests of this many bytes on the CPU of what seldom changes, the smallest tensors first.

That takes some milliseconds. Of the others it looks at the version, the address and a sample first.
"""
ALL = -1
"""Stands for the turn of a look that computes all digests."""


class Others:
    """The tensors and values beside the optimizers' own, as they were at the last look.

    Attributes:
        digests: Of the tensors, by name.
    """

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self._sample = Sample()
        self._turn = 0
        self._seen: dict[str, tuple[int, int, bytes]] = {}
        self._fixed = ""

    def begin(self, parts: Parts, turn: int) -> str:
        """Look for the first time in a chain. Return why nothing can be logged; empty if it can."""
        self._fixed = ""
        return self.look(parts, turn)[2]

    def look(self, parts: Parts, turn: int) -> tuple[dict[str, Any], list[tuple[str, torch.Tensor]], str]:
        """Return the values, the tensors that have changed since the last look, and why they cannot be logged.

        ``turn`` chooses the places of samples. A large tensor that seldom changes counts as unchanged if neither its
        version, its address nor its sample has changed. With ``ALL``, only its digest decides.
        """
        values, tensors = parts.others()
        sampled, before = dict(_large(tensors)), self.digests
        same = set[str]()
        if turn != ALL and sampled.keys() == self._seen.keys():
            same = {name for name, seen in self._looks(sampled).items() if seen == self._seen[name]}
        new = digests_of({name: each for name, each in tensors.items() if name not in same})
        self.digests = new | {name: before[name] for name in same}
        if turn > self._turn or len(same) < len(sampled):
            self._turn = max(turn, self._turn)
            self._seen = self._looks(sampled)
        changed = [(name, each) for name, each in tensors.items() if self.digests.get(name) != before.get(name)]
        return values, changed, self._problem(values, tensors, changed)

    def _looks(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int, bytes]]:
        own = list(map(inner, tensors.values()))
        looks = zip(map(torch.Tensor.data_ptr, own), versions(own), self._sample.of(own, self._turn), strict=True)
        return dict(zip(tensors, looks, strict=True))

    def _problem(
        self, values: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], changed: list[tuple[str, torch.Tensor]]
    ) -> str:
        """Return why the changes since the chain began cannot be logged; empty if they can."""
        forms = [(name, form_of(each)) for name, each in tensors.items() if is_of_model(name)]
        fixed, before = pack([forms, values["hooks"]]), self._fixed
        self._fixed = fixed
        if without := tensors.keys() - self.digests.keys():
            return f"{_shown(min(without))} has a type that cannot be compared"
        if not before:
            return ""
        if fixed != before:
            return "the model has other tensors than before"
        for name, each in changed:
            if name.startswith(HOOK):
                return f"{_shown(name)} has changed, which is neither a parameter, a buffer nor extra state"
            if each.dtype not in SAFETENSORS_NAMES:
                return f"{_shown(name)} has changed, whose dtype {each.dtype} cannot be logged"
        return ""


def _shown(name: str) -> str:
    return name.removeprefix(REST).partition(".")[2]


def _large(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors whose digests are not always computed."""
    total = 0
    for name, each in sorted(tensors.items(), key=lambda item: item[1].nbytes):
        if name.startswith(SELDOM):
            total += each.nbytes
            if total > DIGESTED_MAX or each.device.type != "cpu":
                yield name, each
