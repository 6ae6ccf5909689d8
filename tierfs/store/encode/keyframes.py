"""What a file's chunks are encoded against: the same places of the save before it.

A chunk's *place* is the tensor that it begins in, where in that, and its length: headers that grow and tensors that come and go
shift nothing. At each place the newest chunk that stands alone is the *anchor*; those of later saves are encoded against it, so that
no chain is longer than one, until the anchor is old and the next one is to stand alone again.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from tierfs.codec import Span
from tierfs.errors import CorruptionError, FormatError, NotFoundError, StoreError, TierfsError
from tierfs.format.envelope import BASES_MAX
from tierfs.format.manifest import Manifest, Row
from tierfs.host.pending.record import Draft
from tierfs.store.encode.hints import Hint, Part, ReadRow
from tierfs.store.encode.parents import find_parent, given_parent
from tierfs.store.encode.series import group_of
from tierfs.store.encode.tensors import Place, layout_of, places, stored_layout, unknown_layout
from tierfs.store.read.fetch import read_envelope
from tierfs.store.read.reader import expand_rows, open_manifest
from tierfs.store.store import Store
from tierfs.store.transfers import transfers
from tierfs.store.tree.records import observe

__all__ = ["Lineages", "Plan"]

KEYFRAME_SAVES = 10
# Of an anchor that is known from what was encoded against it alone.
ANCHOR_AGE = KEYFRAME_SAVES // 2
LINEAGES_MAX = 10_000
ANCHORS_MAX = 200_000
SOURCE_SAMPLE = 2048
# The share of a chunk that may be derived from nothing: more than that, in a block, DERIVE does not take.
LACKING_MAX = 0.25
# Reading a delta takes a request more: a header, which is what is read first of a file, does not get so much smaller.
DELTA_BYTES_MIN = 64 << 10
NARROW, WIDE = 2, 4  # bytes of an element
_logger = logging.getLogger("tierfs.store")


class Anchor(NamedTuple):
    """A chunk that others may be encoded against, and how many saves were since."""

    row: Row
    age: int


@dataclass(slots=True)
class Lineage:
    """The saves of one file, or of one file in a row of directories.

    Attributes:
        path: Of the newest.
        saves: How many there were since this flusher began.
        term: The lease in which the anchors were last known to be in the store.
        anchors: The newest chunk that stands alone, at each place.
        renewing: The save that is under way and stands alone where anchors are old, by its write id.
    """

    path: str
    saves: int = 0
    term: int = 0
    anchors: dict[Place, Anchor] = field(default_factory=dict)
    renewing: bytes | None = None


class Plan(NamedTuple):
    """What is known of a file that is to be published.

    Attributes:
        lineage: The saves that it comes after.
        places: Of its chunks.
        hints: For each of them.
    """

    lineage: Lineage
    places: list[Place]
    hints: list[Hint]


class Lineages:
    """What one flusher knows of the saves of a store. Safe for use by many threads.

    Args:
        store: The store, without local tiers.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: dict[str, Lineage] = {}
        self._fallbacks: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"Lineages({len(self._known)} files)"

    def fallbacks(self) -> dict[str, int]:
        """How many files were stored without what was to be known of them: the save before, how they are laid out."""
        with self._lock:
            return dict(self._fallbacks)

    def _fall_back(self, what: str, text: str, *arguments: object) -> None:
        with self._lock:
            self._fallbacks[what] += 1
            is_first = self._fallbacks[what] == 1
        _logger.log(logging.WARNING if is_first else logging.DEBUG, text, *arguments)

    def plan(self, draft: Draft, read: ReadRow, *, derives: bool) -> Plan | None:
        """What is known of a file that is to be published. Whatever goes wrong, it can be stored without that.

        Args:
            draft: The file.
            read: Gets at chunks that lie on this host.
            derives: Whether to look for tensors that are copies of others.
        """
        manifest = draft.record
        if not isinstance(manifest, Manifest) or not manifest.rows or manifest.indirect:
            return None
        file = _LocalFile(manifest.rows, read)
        try:
            layout = layout_of(file.read_into, manifest.length)
        except TierfsError as error:
            text = "%s is stored without regard to its tensors, whose table is not on this host any more: %s"
            self._fall_back("unknown_layouts", text, self._store.where(draft.path), error)
            layout = unknown_layout(0, manifest.length)
        lineage = self._lineage(draft)
        found, hints = [], []
        # Those that come behind before it is published go on with what there is, unless it never is.
        is_renewed = lineage.renewing not in {None, manifest.write_id}
        age_max = KEYFRAME_SAVES * (2 if is_renewed else 1)
        lengths = [row.raw_length for row in manifest.rows]
        for place, tensors in places(layout, lengths, group_of(draft.path)):
            anchor = lineage.anchors.get(place)
            is_fresh = anchor is not None and anchor.age < age_max
            if anchor is not None and not is_fresh:
                lineage.renewing = manifest.write_id
            base = anchor.row if anchor is not None and is_fresh and place.length >= DELTA_BYTES_MIN else None
            found.append(place)
            hints.append(Hint(tensors, lineage.saves, base))
        if derives:
            _find_sources(file, layout, manifest.rows, hints)
        return Plan(lineage, found, hints)

    def note(self, draft: Draft, plan: Plan, rows: Sequence[Row]) -> None:
        """Learn from what was published: its rows, in order."""
        lineage = plan.lineage
        with self._lock:
            for place, uploaded in zip(plan.places, rows, strict=True):
                # It may have had to be stored anew right before it was published.
                row = self._store.presence.find(uploaded.name.digest) or uploaded
                known = lineage.anchors.pop(place, None)
                if not row.bases:
                    lineage.anchors[place] = Anchor(row, 0)
                elif known is not None:
                    lineage.anchors[place] = Anchor(known.row, known.age + 1)
            while len(lineage.anchors) > ANCHORS_MAX:
                del lineage.anchors[next(iter(lineage.anchors))]
            if draft.record.write_id == lineage.renewing:
                lineage.renewing = None
            lineage.path = draft.path
            lineage.saves += 1
            self._remember(draft.path, lineage)

    def _remember(self, path: str, lineage: Lineage) -> None:
        for key in (path, group_of(path)):
            self._known.pop(key, None)
            self._known[key] = lineage
        while len(self._known) > LINEAGES_MAX:
            del self._known[next(iter(self._known))]

    def _lineage(self, draft: Draft) -> Lineage:
        """The saves before this one, with anchors that are known to be in the store."""
        manifest = draft.record
        assert isinstance(manifest, Manifest)
        given = given_parent(self._store, manifest)
        with self._lock:
            keys = [draft.path, group_of(draft.path)] if given is None else [given]
            lineage = next((self._known[key] for key in keys if key in self._known), None)
        try:
            if lineage is None:
                parent = find_parent(self._store, draft) if given is None else given
                lineage = (
                    Lineage(draft.path, term=self._store.presence.ensure()) if parent is None else self._read(parent)
                )
                with self._lock:
                    self._remember(draft.path, lineage)
            elif lineage.term != self._store.presence.ensure():
                lineage = self._look_again(lineage)
        except TierfsError as error:
            text = "%s is stored without regard to the save before it, which cannot be read: %s"
            self._fall_back("unknown_parents", text, self._store.where(draft.path), error)
            return lineage or Lineage(draft.path)
        return lineage

    def _read(self, path: str) -> Lineage:
        """What the object tier tells of a save."""
        lineage = Lineage(path, saves=1, term=self._store.presence.ensure())
        manifest = observe(self._store, path).manifest
        if manifest is None:
            raise NotFoundError(f"no file is at {self._store.where(path)}", path=path)
        if not manifest.rows:
            return lineage
        rows = expand_rows(self._store, manifest, path)
        self._store.presence.hear(lineage.term, rows)
        layout = stored_layout(open_manifest(self._store, path, manifest))
        if layout is None:
            text = "what comes after %s is stored without regard to it: its tensors lie in too many places to look at"
            self._fall_back("unknown_layouts", text, self._store.where(path))
            return lineage
        found = [place for place, _ in places(layout, [row.raw_length for row in rows], "")]
        for place, anchor in zip(found, transfers().map(partial(self._anchor, path), rows), strict=True):
            if anchor is not None:
                lineage.anchors[place] = anchor
        return lineage

    def _anchor(self, path: str, row: Row) -> Anchor | None:
        """What to encode against, in place of a chunk that was stored before: itself, or else what it was encoded against."""
        if not row.bases:
            return Anchor(row, 1)
        if len(row.bases) > 1:
            return None
        try:
            (base,) = read_envelope(self._store, row, self._store.where(path)).bases
        except (CorruptionError, FormatError) as error:
            _logger.info("what comes after it is stored without regard to it: %s", error)
            return None
        # Else it was not a difference that was stored, but what the chunk is a copy of.
        is_like_it = base.offset == 0 and base.length == base.raw_length == row.raw_length
        return Anchor(Row(base.name, base.raw_length, base.stored_length), ANCHOR_AGE) if is_like_it else None

    def _look_again(self, lineage: Lineage) -> Lineage:
        """Whether the anchors may be referred to still: what names them is there, and it was heard in this lease."""
        term = self._store.presence.ensure()
        manifest = observe(self._store, lineage.path).manifest
        rows = () if manifest is None else expand_rows(self._store, manifest, lineage.path)
        there = {name for row in rows for name in (row.name, *row.bases)}
        with self._lock:
            lineage.anchors = {place: anchor for place, anchor in lineage.anchors.items() if anchor.row.name in there}
            lineage.term = term
            anchored = [anchor.row for anchor in lineage.anchors.values()]
        self._store.presence.hear(term, [*anchored, *rows])
        return lineage


class _LocalFile:
    """A file whose chunks lie on this host, unverified: what it says is only ever taken as a hint."""

    def __init__(self, rows: Sequence[Row], read: ReadRow) -> None:
        self._rows = rows
        self._read = read
        self.starts = list(itertools.accumulate((row.raw_length for row in rows), initial=0))

    def parts(self, start: int, stop: int) -> list[Part]:
        """Which parts of which chunks make up a range."""
        found = []
        index = bisect.bisect_right(self.starts, start) - 1
        while start < stop:
            end = min(stop, self.starts[index + 1])
            found.append(Part(index, start - self.starts[index], end - start))
            start, index = end, index + 1
        return found

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill a buffer from an offset on.

        Raises:
            StoreError: Some of it is not on this host.
        """
        at = 0
        for index, offset, length in self.parts(start, start + len(out)):
            if not self._read(self._rows[index], offset, out[at : at + length]):
                raise StoreError("a chunk that was to be looked at is not on this host", tier="ram")
            at += length


def _find_sources(file: _LocalFile, layout: Sequence[Span], rows: Sequence[Row], hints: list[Hint]) -> None:
    """Find tensors that others of the file are copies of, in less precision: the working copy of what an optimizer keeps.

    Whatever they are called: those that have the same sample are taken for the same.
    """
    narrow = [span for span in layout if (span.kind, span.width) == ("float", NARROW)]
    counts = {span.stop - span.start for span in narrow}
    wide: dict[tuple[int, bytes | None], Span] = {}
    for span in layout:
        count = (span.stop - span.start) // 2
        if (span.kind, span.width) == ("float", WIDE) and count in counts:
            wide.setdefault((count, _sample(file, span)), span)
    samples = {span.name: (span.stop - span.start, _sample(file, span)) for span in narrow} if wide else {}
    sources = {name: wide[sample] for name, sample in samples.items() if sample in wide and sample[1] is not None}
    if not sources:
        return
    starts = [span.start for span in layout]
    for index in range(len(rows)):
        start, stop = file.starts[index], file.starts[index + 1]
        inside = layout[bisect.bisect_right(starts, start) - 1 : bisect.bisect_left(starts, stop)]
        parts = _derived_parts(file, inside, start, stop, sources)
        if 0 < len(parts) <= BASES_MAX:
            hints[index] = replace(hints[index], sources=tuple(parts))


def _sample(file: _LocalFile, span: Span) -> bytes | None:
    """Some numbers from the middle of a tensor, in two bytes each; ``None`` where it is not on this host."""
    # They bring numpy, which importing the package must not.
    from tierfs.codec.delta.derive import derive  # noqa: PLC0415
    from tierfs.codec.scratch import elements_of  # noqa: PLC0415

    count = (span.stop - span.start) // span.width
    length = min(SOURCE_SAMPLE, count)
    raw = memoryview(bytearray(span.width * length))
    try:
        file.read_into(span.start + span.width * ((count - length) // 2), raw)
    except TierfsError as error:
        _logger.debug("what %s is a copy of cannot be told: %s", span.name, error)
        return None
    if span.width == NARROW:
        return bytes(raw)
    rounded = memoryview(bytearray(NARROW * length))
    derive(raw, elements_of(rounded, NARROW))
    return bytes(rounded)


def _derived_parts(
    file: _LocalFile, inside: Iterable[Span], start: int, stop: int, sources: Mapping[str, Span]
) -> list[Part]:
    """What a chunk is a copy of; nothing if too much of it is a copy of nothing.

    What little is has its place in the reference as well, where any bytes will do: those of a tensor beside it.
    """
    ranges: list[list[int]] = []
    lacking: list[tuple[int, int]] = []  # where in `ranges` something is to stand in, for so many bytes
    for span in inside:
        source = sources.get(span.name)
        begin, end = max(start, span.start) - span.start, min(stop, span.stop) - span.start
        if source is None or begin % 2 or end % 2:
            lacking.append((len(ranges), 2 * (end - begin)))
            ranges.append([0, 0])
        elif ranges and ranges[-1][1] == source.start + 2 * begin:
            ranges[-1][1] = source.start + 2 * end
        else:
            ranges.append([source.start + 2 * begin, source.start + 2 * end])
    longest = max(ranges, key=lambda each: each[1] - each[0])
    if sum(length for _, length in lacking) > LACKING_MAX * 2 * (stop - start):
        return []
    for at, length in lacking:
        if length > longest[1] - longest[0]:
            return []
        ranges[at] = [longest[0], longest[0] + length]
    return [part for begin, end in ranges for part in file.parts(begin, end)]
