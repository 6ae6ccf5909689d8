"""``tierfs checkpoint show``, ``verify`` and ``diff``: read the content of checkpoints."""

from __future__ import annotations

import argparse
import bisect
import fnmatch
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TypeAlias, cast

from tierfs.checkpoint.catalog import NAMED_MAX, candidates, step_of
from tierfs.checkpoint.diff import CheckpointDifference, compare
from tierfs.checkpoint.notes import ABOUT
from tierfs.checkpoint.verify import CheckpointReport, verify_checkpoint
from tierfs.cli.commands._checkpoint_catalog import or_dash
from tierfs.cli.files.places import StorePlace, source_of
from tierfs.cli.terminal.output import align, format_time, print_json, print_result, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.codec import Codec, Reason
from tierfs.dcp.checkpoint import Checkpoint, open_checkpoint
from tierfs.dcp.columns import BytesPlace, SavedItem
from tierfs.digest import BLOCK_BYTES, local_name
from tierfs.errors import CorruptionError, NotFoundError
from tierfs.format.envelope import Block, Envelope
from tierfs.format.keys import inside
from tierfs.format.manifest import Row
from tierfs.host.pending.levels import Level
from tierfs.store import level_of, stat
from tierfs.store.read.lookup import read_envelope
from tierfs.store.read.reader import expand_rows
from tierfs.units import format_bytes

DIFFERENT = 1
"""The exit code if checkpoints differ, as in diff(1)."""


class Placement:
    """Finds the tiers and the encoding of a checkpoint's bytes. Not thread-safe.

    It looks up each file once, and reads each chunk's envelope at most once, in one request.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._store = checkpoint.store
        # By name, None for a missing file: its level, its chunks, and the offset of each chunk.
        self._files: dict[str, tuple[Level, Sequence[Row], Sequence[int]] | None] = {}
        self._envelopes: dict[Row, Envelope] = {}

    def level(self, place: BytesPlace) -> Level | None:
        """Return the level that the file of a place has reached; ``None`` if the file is missing."""
        file = self._file(place.file)
        return None if file is None else file[0]

    def tiers(self, place: BytesPlace) -> list[str]:
        """Return the tiers that hold all bytes of a place, the nearest first.

        Raises:
            CorruptionError, FormatError: The file's record is damaged, or written by an unsupported version.
            StoreError, ReadOnlyError: The object tier failed.
        """
        if self._file(place.file) is None or not place.length:
            return []
        kind, tiers = self._store.descriptor.digest_kind, self._store.tiers
        names = [local_name(kind, row.name.digest) for row, _ in self._chunks(place)]
        found = tiers.sources.holding(names) if tiers is not None and names else []
        return [*found, *(["object"] if self.level(place) is Level.OBJECT else [])]

    def coded(self, places: Iterable[BytesPlace]) -> dict[str, object]:
        """Return the encoding of the bytes at these places. Files that are not in the object tier yet do not count.

        Returns:
            ``stored``: the encoded bytes in the object tier, of which a part of a block counts in proportion. ``codecs``
            and ``reasons``: the number of blocks by the name of their codec, and by the reason for it.

        Raises:
            CorruptionError, FormatError: A record or envelope is damaged, or written by an unsupported version.
            StoreError, ReadOnlyError: The object tier failed.
        """
        stored, codecs, reasons = 0, Counter[str](), Counter[str]()
        for place in places:
            if place.length and self.level(place) is Level.OBJECT:
                for row, begin in self._chunks(place):
                    for block, size in self._blocks(row, place.at - begin, place.at + place.length - begin):
                        stored += size
                        codecs[_name(Codec, block.codec)] += 1
                        reasons[_name(Reason, block.reason)] += 1
        return {"stored": stored, "codecs": dict(codecs), "reasons": dict(reasons)}

    def _blocks(self, row: Row, start: int, end: int) -> Iterator[tuple[Block, int]]:
        """Yield each block between two offsets of a chunk, with its encoded bytes there. Offsets may lie outside."""
        if row not in self._envelopes:
            self._envelopes[row] = read_envelope(self._store, row, self._checkpoint.where)
        for number, block in enumerate(self._envelopes[row].blocks):
            begin = number * BLOCK_BYTES
            length = min(BLOCK_BYTES, row.raw_length - begin)
            shared = min(end, begin + length) - max(start, begin)
            if shared > 0:
                yield block, block.encoded_length * shared // length

    def _chunks(self, place: BytesPlace) -> Iterable[tuple[Row, int]]:
        """Return the chunks that hold a place, each with its offset in the file."""
        _, rows, starts = self._file(place.file) or (None, (), ())
        first = max(0, bisect.bisect_right(starts, place.at) - 1)
        last = bisect.bisect_left(starts, place.at + place.length)
        return zip(rows[first:last], starts[first:last], strict=True)

    def _file(self, name: str) -> tuple[Level, Sequence[Row], Sequence[int]] | None:
        if name not in self._files:
            self._files[name] = self._look(inside(self._checkpoint.directory, name))
        return self._files[name]

    def _look(self, path: str) -> tuple[Level, Sequence[Row], Sequence[int]] | None:
        try:
            level, entry = level_of(self._store, path), stat(self._store, path)
        except NotFoundError:
            return None
        rows: Sequence[Row] = ()
        if entry.manifest is not None and entry.manifest.inline is None:
            rows = expand_rows(self._store, entry.manifest, path)
        return level, rows, [0, *itertools.accumulate(row.raw_length for row in rows)][: len(rows)]


def _name(kind: type[Codec | Reason], number: int) -> str:
    """Return the name of a number in an envelope; the number itself if only a newer tierfs knows it."""
    return kind(number).name.lower().replace("_", " ") if number in set(kind) else str(number)


Note: TypeAlias = Callable[[str], object]


def show(arguments: argparse.Namespace) -> int:
    with Progress("show") as progress:
        source = source_of(arguments.url)
        checkpoint = open_checkpoint(source.store, source.path, rank=arguments.rank)
        names = _matching(checkpoint.tensors, arguments.other)
        objects = _matching(checkpoint.objects, arguments.other)
        if arguments.other is not None and not names and not objects:
            some = ", ".join(sorted([*checkpoint.tensors, *checkpoint.objects])[:NAMED_MAX])
            raise NotFoundError(
                f"no tensor of {source.url} matches {arguments.other!r}: it has {some}", path=source.url
            )
        placement = Placement(checkpoint)
        options = {"shards": arguments.shards, "codecs": arguments.codecs}
        tensors = describe_tensors(checkpoint, names, placement, progress.note, **options)
    if arguments.json:
        print_json(content_document(source, checkpoint, tensors, objects))
        return 0
    print("\n".join(align([(name, printable(or_dash(value))) for name, value in _shown(source, checkpoint)])))
    coding = ("stored", "codecs", "why") if arguments.codecs else ()
    rows = [("size", "shards", "dtype", "shape", *coding, "name")]
    for fqn, tensor in tensors.items():
        size, count = cast("int", tensor["size"]), len(checkpoint.shards(fqn))
        about = _coding_row(tensor) if arguments.codecs else ()
        rows.append(
            (format_bytes(size), str(count), str(tensor["dtype"]), str(tensor["shape"]), *about, printable(fqn))
        )
    for fqn in objects:
        size = checkpoint.object(fqn).length
        rows.append((format_bytes(size), "-", "object", "-", *["-" for _ in coding], printable(fqn)))
    if len(rows) == 1:
        return 0
    head, *lines = align(rows, right=(0, 1, 4) if arguments.codecs else (0, 1), has_head=True)
    print("", head, sep="\n")
    for line, name in zip(lines, [*names, *objects], strict=True):
        print(line)
        if arguments.shards and name in tensors:
            shown = [_shard_row(shard, placement) for shard in checkpoint.shards(name)]
            print("\n".join(f"    {text}" for text in align(shown, states=(4,))))
    return 0


def _coding_row(tensor: Mapping[str, object]) -> tuple[str, ...]:
    codecs, reasons = cast("Counter[str]", tensor["codecs"]), cast("Counter[str]", tensor["reasons"])
    return (format_bytes(cast("int", tensor["stored"])), "+".join(codecs) or "-", " + ".join(reasons) or "-")


def describe_tensors(
    checkpoint: Checkpoint, names: Iterable[str], where: Placement, note: Note, *, shards: bool, codecs: bool
) -> dict[str, dict[str, object]]:
    """Return the facts about tensors by name. ``note`` gets the progress of finding their codecs."""
    tensors = {fqn: _tensor(checkpoint, fqn, where if shards else None) for fqn in names}
    for number, (fqn, tensor) in enumerate(tensors.items() if codecs else ()):
        note(f"{number} of {len(tensors)} tensors")
        tensor.update(where.coded(shard.place for shard in checkpoint.shards(fqn)))
    return tensors


def content_document(
    source: StorePlace, checkpoint: Checkpoint, tensors: Mapping[str, Mapping[str, object]], objects: Iterable[str]
) -> dict[str, object]:
    return {
        **_summary(source, checkpoint),
        "tensors": [{"name": fqn, **tensor} for fqn, tensor in tensors.items()],
        "objects": [{"name": fqn, "size": checkpoint.object(fqn).length} for fqn in objects],
    }


def _matching(names: Iterable[str], pattern: str | None) -> list[str]:
    return [name for name in names if pattern is None or fnmatch.fnmatchcase(name, pattern)]


def _summary(source: StorePlace, checkpoint: Checkpoint) -> dict[str, object]:
    note = checkpoint.note
    return {
        "url": source.url,
        "step": note.step if note is not None and note.step is not None else step_of(source.path),
        "format": checkpoint.format,
        "created": format_time(checkpoint.created_ns, precise=True) if checkpoint.created_ns else None,
        "save_id": note.save_id if note is not None else None,
        "rank": checkpoint.rank,
        "size": checkpoint.length,
        "files": [{"name": name, "size": length} for name, length in sorted(checkpoint.files().items())],
    }


def _shown(source: StorePlace, checkpoint: Checkpoint) -> list[tuple[str, object]]:
    counts = {name: len(getattr(checkpoint, name)) for name in ("tensors", "objects")}
    size, files = f"{format_bytes(checkpoint.length)} ({checkpoint.length} bytes)", len(checkpoint.files())
    summary = {**_summary(source, checkpoint), "size": size, **counts, "files": files}
    return [(name, summary[name]) for name in ("url", "step", "format", "created", "size", *counts, "files")]


def _tensor(checkpoint: Checkpoint, fqn: str, placement: Placement | None) -> dict[str, object]:
    item = checkpoint.metadata.state_dict_metadata[fqn]
    shards = checkpoint.shards(fqn)
    return {
        "dtype": str(item.properties.dtype).removeprefix("torch."),
        "shape": list(item.size),
        "size": math.prod(item.size) * int(item.properties.dtype.itemsize),
        "shards": len(shards) if placement is None else [_shard(shard, placement) for shard in shards],
    }


def _shard(shard: SavedItem, placement: Placement) -> dict[str, object]:
    level = placement.level(shard.place)
    return {
        "offsets": list(shard.offsets),
        "shape": list(shard.sizes),
        "file": shard.place.file,
        "at": shard.place.at,
        "length": shard.place.length,
        "level": None if level is None else level.label,
        "tiers": placement.tiers(shard.place),
    }


def _shard_row(shard: SavedItem, placement: Placement) -> tuple[str, ...]:
    place = shard.place
    level = placement.level(place)
    return (
        f"at {list(shard.offsets)}",
        f"{list(shard.sizes)}",
        printable(place.file),
        f"{place.at}-{place.at + place.length}",
        "missing" if level is None else level.label,
        "+".join(placement.tiers(place)) or "-",
    )


def verify(arguments: argparse.Namespace) -> int:
    """Verify, and return the exit code of damage if there is any."""
    source = source_of(arguments.url)
    found = {candidate.directory: candidate for candidate in candidates(source.store, source.path) if candidate.ranks}
    # A directory that is no checkpoint stands for all below it. Without any, opening it raises.
    paths = [source.path] if source.path in found or not found else list(found)
    ranks = {
        path: found[path].ranks if path in found and arguments.rank is None else (arguments.rank,) for path in paths
    }
    whole, lines, documents = CheckpointReport(), list[str](), list[dict[str, object]]()
    with Progress("verify", wanted=arguments.progress) as progress:
        for path in paths:
            report = CheckpointReport()
            parts = [open_checkpoint(source.store, path, rank=rank) for rank in ranks[path]]
            progress.expect(whole.length + sum(sum(part.files().values()) for part in parts))
            for part in parts:
                report.add(verify_checkpoint(part, progress=progress.advance))
            whole.add(report)
            place = source.child(source.relative(path))
            lines += _lines(report, place.url)
            documents.append({"url": place.url, **asdict(report)})
    code = CorruptionError.exit_code if whole.damage else 0
    return print_result(arguments, {"url": source.url, **asdict(whole), "checkpoints": documents}, *lines, code=code)


def _lines(report: CheckpointReport, url: str) -> Iterator[str]:
    for damage in report.damage:
        yield f"damaged  {', '.join(map(printable, damage.names)) or '-'}"
        span = f", bytes {damage.at} to {damage.at + damage.length}" if damage.length else ""
        yield f"  file     {printable(damage.file) or '-'}{span}, {damage.tier} tier"
        yield f"  kind     {damage.kind}"
        yield f"  problem  {printable(damage.problem)}"
    if report.undigested:
        yield (
            f"files without digests, because tierfs did not write them: {', '.join(map(printable, report.undigested))}"
        )
    checked = (
        f"{report.tensors} tensors and {report.objects} objects in {report.files} files, {format_bytes(report.length)}"
    )
    yield f"checked {checked} of {printable(url)}: {f'{len(report.damage)} damaged' if report.damage else 'all sound'}"


def diff(arguments: argparse.Namespace) -> int:
    """Compare, and return 1 if the checkpoints differ."""
    sources = source_of(arguments.url), source_of(arguments.other)
    a, b = (open_checkpoint(source.store, source.path, rank=arguments.rank) for source in sources)
    with Progress("diff", total_bytes=a.length, wanted=arguments.progress) as progress:
        found = compare(a, b, progress=progress.advance)
    lines = _difference_lines(found, *sources, top=arguments.top)
    return print_result(arguments, difference_document(found, *sources), *lines, code=0 if found.is_none else DIFFERENT)


def difference_document(found: CheckpointDifference, a: StorePlace, b: StorePlace) -> dict[str, object]:
    return {
        "a": a.url,
        "b": b.url,
        "equal": found.is_none,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "unlike": [{"name": fqn, "a": one, "b": other} for fqn, (one, other) in found.unlike.items()],
        "tensors": [
            {
                "name": fqn,
                "elements": difference.elements,
                "differing": difference.differing,
                "fraction": difference.fraction,
                "relative": difference.relative,
                "max_abs": difference.max_abs,
                "not_finite": difference.not_finite,
            }
            for fqn, difference in found.tensors.items()
        ],
        "objects": found.objects,
        "equal_count": found.equal,
        "about": found.about,
    }


def _difference_lines(found: CheckpointDifference, a: StorePlace, b: StorePlace, *, top: int | None) -> Iterator[str]:
    for fqn in found.only_a:
        yield f"only in A  {printable(fqn)}"
    for fqn in found.only_b:
        yield f"only in B  {printable(fqn)}"
    for fqn, (one, other) in found.unlike.items():
        yield f"unlike     {printable(fqn)}: {one} in A, {other} in B"
    rows = [("relative", "max abs", "differing", "of", "not finite", "name")]
    tensors = list(found.tensors.items())
    if top is not None:  # those without a relative norm first: it is unknown how far they are apart
        tensors = sorted(tensors, key=lambda item: -math.inf if item[1].relative is None else -item[1].relative)[:top]
    for fqn, difference in tensors:
        relative = "-" if difference.relative is None else f"{difference.relative:.3g}"
        apart = "-" if difference.max_abs is None else f"{difference.max_abs:.6g}"
        share = f"{difference.fraction:.3%}"
        rows.append(
            (relative, apart, share, str(difference.elements), str(difference.not_finite or "-"), printable(fqn))
        )
    if found.tensors:
        head, *lines = align(rows, right=(0, 1, 2, 3, 4), has_head=True)
        yield f"           {head}"
        yield from (f"differs    {line}" for line in lines)
    if len(tensors) < len(found.tensors):
        yield f"           ... and {len(found.tensors) - len(tensors)} more tensors"
    for fqn in found.objects:
        yield f"differs    {printable(fqn)} (object)"
    if found.about:
        yield f"not counted: {ABOUT}, which says by which run, at which step and at what cost each was saved"
    count = len(found.only_a) + len(found.only_b) + len(found.unlike) + len(found.tensors) + len(found.objects)
    yield f"{found.equal} equal, {count} different: A is {printable(a.url)}, B is {printable(b.url)}"
