"""The report of ``tierfs demo``: compares two runs loss by loss, and lists the cost of their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tierfs.units import format_bytes

_ROWS_BEFORE = 3
_ROWS_AFTER = 6
_ROWS_UNEQUAL_MAX = 10


@dataclass(frozen=True, slots=True)
class LossRow:
    """The losses of one step in both runs, as hexadecimal floats; None if a run did not make the step."""

    step: int
    uninterrupted: str | None
    resumed: str | None

    @property
    def equal(self) -> bool:
        """Whether both runs made the step and their losses agree in every bit."""
        return self.uninterrupted is not None and self.uninterrupted == self.resumed


@dataclass(frozen=True, slots=True)
class CompletedSave:
    """One completed save: its name, logical bytes, the seconds that training was blocked, and the level it reached."""

    name: str
    logical_bytes: int
    blocked_s: float
    level: str


def compare_losses(uninterrupted: Mapping[int, str], resumed: Mapping[int, str], *, last: int) -> list[LossRow]:
    """Pair the losses of two runs for each step up to ``last``; None where a run lacks the step."""
    return [LossRow(step, uninterrupted.get(step), resumed.get(step)) for step in range(1, last + 1)]


@dataclass(frozen=True, slots=True)
class Proof:
    """The proof of one resume: each part of the state was compared with the save, and steps were replayed."""

    step: int
    proven: bool
    replayed: int
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of the demo.

    Attributes:
        rows: Every step from 1 to the last. Up to ``resumed_from``, the resumed run's losses are those of the process
            that was killed later.
        killed_at: The step whose save was killed.
        terminated_at: The step at which the resumed run received SIGTERM and saved.
        proofs: One for each resume.
        digests: Digests of the final states of the uninterrupted and of the resumed run.
        stored_bytes: Bytes that each run added to the object tier, by the run's name.
        training_s: Seconds that all runs together spent in steps and saves.
    """

    url: str
    parameters: int
    killed_at: int
    resumed_from: int
    terminated_at: int
    proofs: Sequence[Proof]
    rows: Sequence[LossRow]
    digests: tuple[str, str]
    checkpoints: Sequence[CompletedSave]
    stored_bytes: Mapping[str, int]
    training_s: float

    @property
    def equal(self) -> bool:
        """Whether each resume is proven, and the losses after the first one and the final states agree in every bit."""
        after = [row for row in self.rows if row.step > self.resumed_from]
        proven = all(proof.proven for proof in self.proofs)
        return proven and bool(after) and all(row.equal for row in after) and self.digests[0] == self.digests[1]

    @property
    def logical_bytes(self) -> int:
        """Bytes of all completed checkpoints."""
        return sum(checkpoint.logical_bytes for checkpoint in self.checkpoints)

    @property
    def blocked_s(self) -> float:
        """Seconds that training was blocked for all completed checkpoints."""
        return sum(checkpoint.blocked_s for checkpoint in self.checkpoints)

    def as_document(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "url": self.url,
            "parameters": self.parameters,
            "killed_at": self.killed_at,
            "resumed_from": self.resumed_from,
            "terminated_at": self.terminated_at,
            "proofs": [
                {"step": proof.step, "proven": proof.proven, "replayed": proof.replayed} for proof in self.proofs
            ],
            "state_digest": {"uninterrupted": self.digests[0], "resumed": self.digests[1]},
            "losses": [asdict(row) | {"equal": row.equal} for row in self.rows],
            "checkpoints": [asdict(one) for one in self.checkpoints],
            "totals": {
                "checkpoints": len(self.checkpoints),
                "logical_bytes": self.logical_bytes,
                "stored_bytes": sum(self.stored_bytes.values()),
                "stored_bytes_by_run": dict(self.stored_bytes),
                "blocked_s": self.blocked_s,
                "training_s": self.training_s,
            },
        }

    def as_text(self) -> str:
        """Return the report for people: the losses around the kill, the verdict, the checkpoints, and all in words."""
        parts = (self._loss_lines(), self._verdict_lines(), self._checkpoint_lines(), self._closing_lines())
        return "\n\n".join("\n".join(lines) for lines in parts)

    def _loss_lines(self) -> list[str]:
        """Show the steps around each resume, the last step, and the first unequal steps."""
        shown_steps = {*range(self.resumed_from - _ROWS_BEFORE + 1, self.killed_at + _ROWS_AFTER + 1)}
        shown_steps |= {self.terminated_at, self.terminated_at + 1, *(row.step for row in self.rows[-1:])}
        shown_steps |= set([row.step for row in self.rows if not row.equal][:_ROWS_UNEQUAL_MAX])
        lines = [f"{'step':>6}  {'uninterrupted':>24}  {'resumed':>24}  equal"]
        shown = 0
        for row in self.rows:
            if row.step not in shown_steps:
                continue
            if shown and row.step > shown + 1:
                lines.append(f"{'...':>6}")
            shown = row.step
            lines.append(
                f"{row.step:>6}  {_loss(row.uninterrupted)}  {_loss(row.resumed)}  {'yes' if row.equal else 'NO'}"
            )
            if row.step == self.resumed_from:
                lines.append(f"{'':>6}  resumed here, after the save of step {self.killed_at} was killed")
            if row.step == self.terminated_at:
                lines.append(f"{'':>6}  resumed here, after SIGTERM to one rank made all ranks save this step")
        return lines

    def _verdict_lines(self) -> list[str]:
        after = [row for row in self.rows if row.step > self.resumed_from]
        different = [row.step for row in after if not row.equal]
        unproven = [proof for proof in self.proofs if not proof.proven]
        if unproven:
            return [f"DIFFERENT: the resume at step {unproven[0].step} is not proven", unproven[0].text]
        if self.equal:
            losses = "the loss after resuming is" if len(after) == 1 else f"all {len(after)} losses after resuming are"
            proven = [
                f"PROVEN at step {proof.step}: each part of the state equals what was saved{_again(proof)}"
                for proof in self.proofs
            ]
            return [*proven, f"EQUAL: {losses} those of the uninterrupted run, bit for bit, and so is the final state"]
        if different:
            return [f"DIFFERENT: {len(different)} of {len(after)} losses differ, first at step {different[0]}"]
        return ["DIFFERENT: the losses are equal, but the final state is not"]

    def _checkpoint_lines(self) -> list[str]:
        """Show one line per checkpoint, one per run with the bytes that it added to the store, and the sum."""
        names = [one.name for one in self.checkpoints] + [_count(run, 99) for run in self.stored_bytes]
        width = max(len(name) for name in names)
        lines = [f"{'checkpoint':<{width}}  {'logical':>10}  {'stored':>10}  {'blocked':>9}  level"]

        def add(name: str, logical_bytes: int, stored: str, blocked_s: float, level: str = "") -> None:
            sizes = f"{format_bytes(logical_bytes):>10}  {stored:>10}"
            lines.append(f"{name:<{width}}  {sizes}  {blocked_s * 1000:>6.0f} ms  {level}".rstrip())

        for run, stored_bytes in self.stored_bytes.items():
            of_run = [one for one in self.checkpoints if one.name.startswith(f"{run}/")]
            for one in of_run:
                add(one.name, one.logical_bytes, "", one.blocked_s, one.level)
            logical_bytes = sum(one.logical_bytes for one in of_run)
            blocked_s = sum(one.blocked_s for one in of_run)
            add(_count(run, len(of_run)), logical_bytes, format_bytes(stored_bytes), blocked_s)
        stored_bytes = sum(self.stored_bytes.values())
        add(_count("all", len(self.checkpoints)), self.logical_bytes, format_bytes(stored_bytes), self.blocked_s)
        return lines

    def _closing_lines(self) -> list[str]:
        """Say in two sentences what happened, and name the next step."""
        if not self.equal:
            return ["The resumed run is not the uninterrupted run: this is a bug. Report it, with this output."]
        blocked = self.blocked_s / self.training_s if self.training_s else 0.0
        stored = f"{len(self.checkpoints)} checkpoints take {format_bytes(sum(self.stored_bytes.values()))}"
        return [
            "A training was killed in the middle of a save and later stopped by SIGTERM, and lost nothing that was saved.",
            f"Saving took {blocked:.1%} of its time; {stored}, not {format_bytes(self.logical_bytes)}.",
            "Next: docs/tutorial/first-store.md makes a store, docs/how-to/training.md saves your own training.",
        ]


def _again(proof: Proof) -> str:
    return f"; {proof.replayed} replayed steps have the recorded losses" if proof.replayed else ""


def _count(run: str, count: int) -> str:
    return f"{run}: {count} checkpoint{'s' if count != 1 else ''}"


def _loss(value: str | None) -> str:
    """Format a loss as a decimal and, exactly, as a hexadecimal float."""
    return f"{'-':>24}" if value is None else f"{float.fromhex(value):>8.4f} {_short(value):>15}"


def _short(value: str) -> str:
    """Strip the zeros at the end of a hexadecimal float's fraction."""
    fraction, _, exponent = value.partition("p")
    return f"{fraction.rstrip('0').rstrip('.')}p{exponent}"
