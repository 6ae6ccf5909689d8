"""Choose the bases of a file's chunks: the chunks at the same places in the save before it.

A chunk's *place* is the tensor in which it begins, the offset in that tensor, and the chunk's length. So a header that
grows, or a tensor that comes or goes, shifts no other place. At each place, the newest chunk that stands alone is the
*keyframe*. Chunks of later saves are encoded against it, so no chain is longer than one. When the keyframe is old, the
next chunk stands alone again.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tierfs.codec import Span
from tierfs.errors import CorruptionError, FormatError, NotFoundError, StoreError, TierfsError
from tierfs.format.envelope import BASES_MAX
from tierfs.format.manifest import Manifest, Row
from tierfs.host.events import Counters
from tierfs.host.pending.record import Draft
from tierfs.store.encode.parents import ListedNames, find_parent, given_parent, stored_layout
from tierfs.store.encode.tensors import (
    ChunkContext,
    ChunkPart,
    TensorPlace,
    group_of,
    layout_of,
    places,
    unknown_layout,
)
from tierfs.store.read.lookup import read_envelope
from tierfs.store.read.reader import expand_rows, open_manifest
from tierfs.store.store import Store
from tierfs.store.tree.records import observe
from tierfs.threads import transfers

if TYPE_CHECKING:
    from tierfs.host.chunk_sources import ChunkSources

KEYFRAME_SAVES = 10
# The age of a keyframe that is only known from a chunk encoded against it.
KEYFRAME_AGE = KEYFRAME_SAVES // 2
SERIES_MAX = 10_000
KEYFRAMES_MAX = 200_000
SOURCE_SAMPLE = 2048
# The share of a chunk that may be derived from nothing. DERIVE does not encode a block with a larger share.
LACKING_MAX = 0.25
# Reading a delta takes one more request. A header, which a reader needs first, does not shrink enough to be worth that.
DELTA_BYTES_MIN = 64 << 10
NARROW, WIDE = 2, 4  # bytes per element
_logger = logging.getLogger("tierfs.store")


@dataclass(slots=True)
class SaveSeries:
    """The saves of one file, or of files with the same name in consecutive directories.

    Attributes:
        path: Path of the newest save.
        saves: How many saves came since this flusher began.
        term: The lease in which the keyframes were last known to be in the store.
        keyframes: By place, the newest chunk that stands alone, and its age: how many saves came after it.
        renewing: Write id of the unpublished save whose chunks stand alone where keyframes are old, if there is one.
    """

    path: str
    saves: int = 0
    term: int = 0
    keyframes: dict[TensorPlace, tuple[Row, int]] = field(default_factory=dict)
    renewing: bytes | None = None


class FilePlan(NamedTuple):
    """Facts about a file to publish.

    Attributes:
        series: The earlier saves of the file; ``None`` for a file without deltas.
        places: The places of its chunks; empty if nothing is known about it.
        contexts: The context of each chunk; empty if nothing is known about it.
    """

    series: SaveSeries | None = None
    places: Sequence[TensorPlace] = ()
    contexts: Sequence[ChunkContext] = ()


class KeyframeIndex:
    """The saves of a store that one flusher knows. Safe for use by many threads.

    Args:
        store: The store, without local tiers.

    Attributes:
        fallbacks: How many files were stored with an unknown layout or an unknown save before them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._known: dict[str, SaveSeries] = {}
        self._listed = ListedNames(store)
        self.fallbacks = Counters()

    def __repr__(self) -> str:
        return f"KeyframeIndex({len(self._known)} files)"

    def plan(self, draft: Draft, local: ChunkSources, *, derives: bool) -> FilePlan:
        """Look up the facts about a file to publish.

        An error of the object tier or a chunk that this host lost leads to a plan with fewer facts, not to an
        exception.

        Args:
            local: Copies of the file's chunks on this host.
            derives: Whether to look for tensors that are copies of others.

        Returns:
            An empty plan for a file without rows, a file with an indirect table, or a draft that is no file.
        """
        manifest = draft.record
        if not isinstance(manifest, Manifest) or not manifest.rows or manifest.indirect:
            return FilePlan()
        file = _LocalFile(manifest.rows, local)
        try:
            layout = layout_of(file.read_into, manifest.length)
        except TierfsError as error:
            text = "%s is encoded without knowledge of its tensors, because their table is no longer on this host: %s"
            self.fallbacks.fall_back("unknown_layouts", text, self._store.where(draft.path), error)
            layout = unknown_layout(0, manifest.length)
        if manifest.length < DELTA_BYTES_MIN:
            spans = list(places(layout, [row.raw_length for row in manifest.rows], group_of(draft.path)))
            return FilePlan(None, [place for place, _ in spans], [ChunkContext(tensors) for _, tensors in spans])
        series = self._series(draft)
        found, contexts = [], []
        # Until the renewing save is published, later saves still use the old keyframes. Twice the age is the limit, in
        # case that save is never published.
        is_renewed = series.renewing not in {None, manifest.write_id}
        age_max = KEYFRAME_SAVES * (2 if is_renewed else 1)
        lengths = [row.raw_length for row in manifest.rows]
        for place, tensors in places(layout, lengths, group_of(draft.path)):
            base, age = series.keyframes.get(place, (None, 0))
            if base is not None and age >= age_max:
                series.renewing, base = manifest.write_id, None
            if place[2] < DELTA_BYTES_MIN:
                base = None
            found.append(place)
            contexts.append(ChunkContext(tensors, series.saves, base))
        if derives:
            _find_sources(file, layout, manifest.rows, contexts)
        return FilePlan(series, found, contexts)

    def note(self, draft: Draft, plan: FilePlan, rows: Sequence[Row]) -> None:
        """Update the series after a file was published.

        Args:
            plan: The result of `plan` for it.
        """
        series = plan.series
        if series is None:
            return
        with self._lock:
            for place, uploaded in zip(plan.places, rows, strict=True):
                # The chunk may have been stored again under another name right before publishing.
                row = self._store.lease_cache.find(uploaded.name.digest) or uploaded
                known = series.keyframes.pop(place, None)
                if not row.bases:
                    series.keyframes[place] = row, 0
                elif known is not None:
                    series.keyframes[place] = known[0], known[1] + 1
            while len(series.keyframes) > KEYFRAMES_MAX:
                del series.keyframes[next(iter(series.keyframes))]
            if draft.record.write_id == series.renewing:
                series.renewing = None
            series.path = draft.path
            series.saves += 1
            self._remember(draft.path, series)

    def _remember(self, path: str, series: SaveSeries) -> None:
        for key in (path, group_of(path)):
            self._known.pop(key, None)
            self._known[key] = series
        while len(self._known) > SERIES_MAX:
            del self._known[next(iter(self._known))]

    def _series(self, draft: Draft) -> SaveSeries:
        """Return the saves before this one, with keyframes that are known to be in the store."""
        manifest = draft.record
        assert isinstance(manifest, Manifest)
        given = given_parent(self._store, manifest)
        with self._lock:
            keys = [draft.path, group_of(draft.path)] if given is None else [given]
            series = next((self._known[key] for key in keys if key in self._known), None)
        try:
            if series is None:
                parent = find_parent(self._listed, draft) if given is None else given
                series = (
                    SaveSeries(draft.path, term=self._store.lease_cache.ensure())
                    if parent is None
                    else self._read(parent)
                )
                with self._lock:
                    self._remember(draft.path, series)
            elif series.term != self._store.lease_cache.ensure():
                series = self._look_again(series)
        except TierfsError as error:
            text = "%s is encoded without the previous save, which cannot be read: %s"
            self.fallbacks.fall_back("unknown_parents", text, self._store.where(draft.path), error)
            return series or SaveSeries(draft.path)
        return series

    def _read(self, path: str) -> SaveSeries:
        """Read the keyframes of a save from the object tier."""
        series = SaveSeries(path, saves=1, term=self._store.lease_cache.ensure())
        manifest = observe(self._store, path).manifest
        if manifest is None:
            raise NotFoundError(f"no file exists at {self._store.where(path)}", path=path)
        if not manifest.rows:
            return series
        rows = expand_rows(self._store, manifest, path)
        self._store.lease_cache.add_listed(series.term, rows)
        layout = stored_layout(open_manifest(self._store, path, manifest))
        if layout is None:
            text = "saves after %s are encoded without it: its tensors lie in too many places to read"
            self.fallbacks.fall_back("unknown_layouts", text, self._store.where(path))
            return series
        found = [place for place, _ in places(layout, [row.raw_length for row in rows], "")]
        for place, keyframe in zip(found, transfers().map(partial(self._keyframe, path), rows), strict=True):
            if keyframe is not None:
                series.keyframes[place] = keyframe
        return series

    def _keyframe(self, path: str, row: Row) -> tuple[Row, int] | None:
        """Return the keyframe at the place of a stored chunk: the chunk itself, or else its base."""
        if not row.bases:
            return row, 1
        if len(row.bases) > 1:
            return None
        try:
            (base,) = read_envelope(self._store, row, self._store.where(path)).bases
        except (CorruptionError, FormatError) as error:
            _logger.info("later saves are encoded without this chunk: %s", error)
            return None
        # Otherwise the chunk is no delta, but was derived from the base.
        is_like_it = base.offset == 0 and base.length == base.raw_length == row.raw_length
        return (Row(base.name, base.raw_length, base.stored_length), KEYFRAME_AGE) if is_like_it else None

    def _look_again(self, series: SaveSeries) -> SaveSeries:
        """Drop the keyframes that the newest save no longer names, and renew the others for this lease."""
        term = self._store.lease_cache.ensure()
        manifest = observe(self._store, series.path).manifest
        rows = () if manifest is None else expand_rows(self._store, manifest, series.path)
        there = {name for row in rows for name in (row.name, *row.bases)}
        with self._lock:
            series.keyframes = {place: found for place, found in series.keyframes.items() if found[0].name in there}
            series.term = term
            stored = [row for row, _ in series.keyframes.values()]
        self._store.lease_cache.add_listed(term, [*stored, *rows])
        return series


class _LocalFile:
    """A file whose chunks lie on this host, unverified. Its content is only used to choose bases and codecs."""

    def __init__(self, rows: Sequence[Row], local: ChunkSources) -> None:
        self._rows = rows
        self._local = local
        self.starts = list(itertools.accumulate((row.raw_length for row in rows), initial=0))

    def parts(self, start: int, stop: int) -> list[ChunkPart]:
        """Return the parts of chunks that make up a range."""
        found = []
        index = bisect.bisect_right(self.starts, start) - 1
        while start < stop:
            end = min(stop, self.starts[index + 1])
            found.append(ChunkPart(index, start - self.starts[index], end - start))
            start, index = end, index + 1
        return found

    def read_into(self, start: int, out: memoryview) -> None:
        """Fill a buffer from an offset on.

        Raises:
            StoreError: Some of the bytes are not on this host.
        """
        at = 0
        for index, offset, length in self.parts(start, start + len(out)):
            if not self._local.peek(self._rows[index], offset, out[at : at + length]):
                raise StoreError("a chunk to be examined is not on this host", tier="ram")
            at += length


def _find_sources(file: _LocalFile, layout: Sequence[Span], rows: Sequence[Row], contexts: list[ChunkContext]) -> None:
    """Find chunks of narrow tensors that are copies of wide ones, such as the working copy of an optimizer's weights.

    Adds the sources to the contexts. Names do not matter: two tensors with the same sample are taken for
    copies.
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
            contexts[index] = replace(contexts[index], sources=tuple(parts))


def _sample(file: _LocalFile, span: Span) -> bytes | None:
    """Return some elements from the middle of a tensor, in two bytes each; ``None`` if they are not on this host."""
    # These modules import numpy, which importing the package must not do.
    from tierfs.codec.delta import derive  # noqa: PLC0415
    from tierfs.codec.numbers import elements_of  # noqa: PLC0415

    count = (span.stop - span.start) // span.width
    length = min(SOURCE_SAMPLE, count)
    raw = memoryview(bytearray(span.width * length))
    try:
        file.read_into(span.start + span.width * ((count - length) // 2), raw)
    except TierfsError as error:
        _logger.debug("cannot tell which tensor %s is a copy of: %s", span.name, error)
        return None
    if span.width == NARROW:
        return bytes(raw)
    rounded = memoryview(bytearray(NARROW * length))
    derive(raw, elements_of(rounded, NARROW))
    return bytes(rounded)


def _derived_parts(
    file: _LocalFile, inside: Iterable[Span], start: int, stop: int, sources: Mapping[str, Span]
) -> list[ChunkPart]:
    """Return the parts that a chunk is a copy of; an empty list if too much of it is a copy of nothing.

    A small rest that is a copy of nothing needs a part too. Any bytes serve for it, so it gets a part of the longest
    range.
    """
    ranges: list[list[int]] = []
    lacking: list[tuple[int, int]] = []  # index in `ranges` of a part to fill in, and its bytes
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
