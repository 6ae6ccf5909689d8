"""Find the checkpoints below a path of a store, and the state of each: step, size, level, whether it is complete."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tierfs.checkpoint.notes import DAMAGED, DIRECTORY, METRICS, count_after, line_of, metrics_of, parse, read_lines
from tierfs.checkpoint.step_logs import lengths_below, logs_of
from tierfs.dcp.facts import Facts, read_announced_facts, read_facts
from tierfs.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError
from tierfs.format.checkpoint import ROOT, is_save_id, metadata_file, rank_of
from tierfs.format.keys import inside
from tierfs.host.pending.levels import Level
from tierfs.store import Entry, Store, find, kind_of, stat
from tierfs.store.announced_saves import PENDING
from tierfs.store.local_changes import level_seen
from tierfs.threads import transfers

_DIGITS = re.compile(r"([0-9]+)")
_VERSION = re.compile(r"-v[0-9]+\.ckpt$")
NAMED_MAX = 3
_SHARD_FILE = re.compile(r"rank-([0-9]{5,9})-[0-9a-f]{8}\.safetensors|.+\.distcp")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A directory with a checkpoint, or with the rest of one.

    Attributes:
        directory: Its path, relative to the store's root.
        ranks: The ranks that have a metadata file of their own. ``(None,)`` if one file describes all ranks. Empty if
            there are only shard files or announced saves.
        announced: Paths of the files that announce saves which are not published yet.
        unsaid: Ranks that have shard files and no metadata, in a checkpoint whose ranks saved on their own.
        listed: The files in the directory, by name, if it was listed.
        logged: The number of files of logged steps after it: see `tierfs.checkpoint.notes`.
    """

    directory: str
    ranks: tuple[int | None, ...]
    announced: tuple[str, ...] = ()
    unsaid: tuple[int, ...] = ()
    listed: Mapping[str, Entry] = field(default_factory=dict, compare=False, repr=False)
    logged: int = 0

    @property
    def step(self) -> int | None:
        """The step in the directory's name: see `step_of`."""
        return step_of(self.directory)


@dataclass(slots=True)
class Standing:
    """The state of a checkpoint, as this host sees it.

    Attributes:
        directory: Its path, relative to the store's root.
        step: The step in its metadata, else the one in the directory's name.
        format: ``tierfs``, or ``dcp`` for torch's own writers; ``None`` without readable metadata.
        kind: ``full`` or ``light``; ``None`` if no training manager saved it, or an early one.
        line: See `line_of`.
        tensors: The number of tensors; ``None`` without readable metadata.
        objects: The number of other values; ``None`` without readable metadata.
        files: The number of files that its metadata names.
        length: Bytes of tensors and objects; ``None`` without readable metadata.
        level: The lowest level that a file of it has reached; ``None`` if a file is missing or the metadata is
            unreadable.
        created_ns: The time of the save, in nanoseconds since the epoch; 0 if unknown.
        missing: The reasons why it is incomplete, in words.
        damage: Its damage, in words.
        waiting: Saves to the same directory that are announced and not published yet, in words.
        roots: The write id of each of its metadata files, by path. They identify the save.
        logged: See `Candidate`.
    """

    directory: str
    step: int | None
    format: str | None = None
    kind: str | None = None
    line: str | None = None
    tensors: int | None = None
    objects: int | None = None
    files: int = 0
    length: int | None = None
    level: Level | None = None
    created_ns: int = 0
    missing: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    roots: dict[str, bytes] = field(default_factory=dict)
    logged: int = 0

    @property
    def state(self) -> str:
        """``complete``, ``incomplete`` or ``damaged``."""
        return "damaged" if self.damage else "incomplete" if self.missing else "complete"


def step_of(directory: str) -> int | None:
    """Return the last number in a directory's name, but for Lightning's ``-v1.ckpt``; ``None`` if there is none."""
    numbers: list[str] = _DIGITS.findall(_VERSION.sub("", directory.rpartition("/")[2]))
    return int(numbers[-1]) if numbers else None


def natural_key(path: str) -> list[tuple[int, int | str]]:
    """Return a sort key that orders the numbers in paths by value."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in _DIGITS.split(path) if part]


def candidates(store: Store, path: str) -> list[Candidate]:
    """Return every directory at or below a path that holds a checkpoint or shard files, in the order of `natural_key`.

    It makes one listing and reads no record.

    Raises:
        StoreError, ReadOnlyError: The object tier cannot be listed.
    """
    ranks: dict[str, set[int | None]] = {}
    announced: dict[str, list[str]] = {}
    shards: dict[str, set[int]] = {}
    listed: dict[str, dict[str, Entry]] = {}
    logs: dict[str, list[str]] = {}
    for entry in find(store, path, detail=False):
        directory, _, name = entry.path.rpartition("/")
        if entry.is_directory:
            continue
        above, slash, _ = f"/{directory}".rpartition(f"/{DIRECTORY}/")
        if slash:
            logs.setdefault(above[1:], []).append(entry.path)
            continue
        listed.setdefault(directory, {})[name] = entry
        if directory.rpartition("/")[2] == PENDING and is_save_id(name):
            directory = directory[: -len(PENDING)].rstrip("/")
            announced.setdefault(directory, []).append(entry.path)
            ranks.setdefault(directory, set())
        elif name == ROOT:
            ranks.setdefault(directory, set()).add(None)
        elif (rank := rank_of(name)) is not None:
            ranks.setdefault(directory, set()).add(rank)
        elif (shard := _SHARD_FILE.fullmatch(name)) is not None:
            ranks.setdefault(directory, set())
            if shard[1]:
                shards.setdefault(directory, set()).add(int(shard[1]))
    with logs_of(store) as in_memory:
        for name in (name for log in in_memory for name in lengths_below(log, path)):
            logs.setdefault(f"/{name}".rpartition(f"/{DIRECTORY}/")[0][1:], []).append(name)
    return [
        # If one metadata file describes all ranks, the files of single ranks do not matter.
        Candidate(
            directory,
            (None,) if None in found else tuple(sorted(rank for rank in found if rank is not None)),
            tuple(announced.get(directory, ())),
            tuple(sorted(shards.get(directory, set()) - found)) if found and None not in found else (),
            listed.get(directory, {}),
            count_after(parse(store, logs.get(above, ()), inside(above, DIRECTORY)), step_of(directory)),
        )
        for directory, found in sorted(ranks.items(), key=lambda item: natural_key(item[0]))
        for above in [directory.rpartition("/")[0]]
    ]


def standing(store: Store, candidate: Candidate) -> Standing:
    """Return the state of one checkpoint: read its metadata, and check that each named file exists.

    This takes one request if the directory was listed, and the metadata is small. The length of a file is checked if the
    listing has it, or if the directory was not listed, by one more request for each file. No shard file is read:
    `tierfs.checkpoint.verify` finds damage inside of them.

    Raises:
        StoreError, ReadOnlyError: The object tier failed.
    """
    found = Standing(candidate.directory, candidate.step, logged=candidate.logged)
    parts = [part for rank in candidate.ranks if (part := _open(store, rank, found)) is not None]
    saves = [save for path in candidate.announced if (save := _open_announced(store, path, found)) is not None]
    if not candidate.ranks:
        parts = sorted(saves, key=lambda save: save.note.sequence if save.note is not None else -1)[-1:]
        why = "the save has not finished, another save replaced it, or its removal did not finish"
        found.missing.append(f"{ROOT} is not there: {why}")
    found.roots = {inside(part.directory, metadata_file(part.rank)): part.write_id for part in parts if part.write_id}
    found.missing += [
        f"{metadata_file(rank)} is not there: rank {rank} did not finish its save" for rank in candidate.unsaid
    ]
    if parts and not found.damage:
        _describe(store, candidate, found, parts)
    return found


def _open_announced(store: Store, path: str, found: Standing) -> Facts | None:
    """Read an announced save and describe it in ``found.waiting``. Its problems do not count as the checkpoint's."""
    try:
        save = read_announced_facts(store, path)
    except NotFoundError:
        return None  # published since the listing, or superseded
    except (CorruptionError, FormatError, InvalidInputError) as error:
        found.waiting.append(f"an announced save cannot be read: {error}")
        return None
    missing = [name for name in sorted(save.files) if not _is_published(store, inside(save.directory, name))]
    waits = f"waits for {len(missing)} of {len(save.files)} files" if missing else "is complete, but not published yet"
    found.waiting.append(
        f"save {path.rpartition('/')[2]} {waits}{': ' if missing else ''}{', '.join(missing[:NAMED_MAX])}"
    )
    return save


def _is_published(store: Store, path: str) -> bool:
    if level_seen(store, path) is not Level.OBJECT:
        return False
    try:
        return not stat(store, path).is_directory
    except (NotFoundError, CorruptionError, FormatError):
        return False


def _open(store: Store, rank: int | None, found: Standing) -> Facts | None:
    try:
        return read_facts(store, found.directory, rank=rank)
    except NotFoundError:
        found.missing.append(f"{metadata_file(rank)} was removed in the meantime")
    except (CorruptionError, FormatError, InvalidInputError) as error:
        found.damage.append(str(error))
    return None


def _describe(store: Store, candidate: Candidate, found: Standing, parts: list[Facts]) -> None:
    found.length = sum(part.length for part in parts)
    if parts[0].problem:
        found.damage.append(parts[0].problem)
        return
    files: dict[str, tuple[int, bool]] = {}
    for part in parts:
        for name, length in part.files.items():
            files[name] = (max(length, files.get(name, (0, False))[0]), part.note is not None)
    steps = {part.note.step for part in parts if part.note is not None and part.note.step is not None}
    found.step = max(steps) if steps else found.step
    found.format = parts[0].format
    found.kind = parts[0].note.kind if parts[0].note is not None else None
    found.line = line_of(parts[0])
    found.tensors = len(frozenset().union(*(part.tensors for part in parts)))
    found.objects = len(frozenset().union(*(part.objects for part in parts)))
    found.files = len(files)
    found.created_ns = max(part.created_ns for part in parts)

    def look(item: tuple[str, tuple[int, bool]]) -> tuple[Level, str, str]:
        name, (length, is_exact) = item
        return _look(store, inside(candidate.directory, name), length, candidate.listed.get(name), is_exact=is_exact)

    looked = transfers().map(look, sorted(files.items()))
    levels = [level for level, _, _ in looked]
    levels += [level_seen(store, inside(candidate.directory, metadata_file(part.rank))) for part in parts]
    found.missing += [missing for _, missing, _ in looked if missing]
    found.damage += [damage for _, _, damage in looked if damage]
    # A missing part has no level.
    found.level = None if found.missing else min(levels)


def _look(store: Store, path: str, length: int, listed: Entry | None, *, is_exact: bool) -> tuple[Level, str, str]:
    """Return a file's level and two texts: why it counts as missing, and why as damaged; empty if it does not."""
    level = level_seen(store, path)
    name = path.rpartition("/")[2]
    try:
        entry = listed or stat(store, path)
    except NotFoundError:
        return level, f"{name} is not there", ""
    except (CorruptionError, FormatError) as error:
        return level, "", f"{name}: {error}"
    if entry.is_directory:
        return level, f"{name} is a directory", ""
    if entry.manifest is None and entry.foreign is None:  # in the listing, whose records were not read
        return level, "", ""
    if entry.length < length or (is_exact and entry.length != length):
        return level, f"{name} has {entry.length} bytes, not {length}", ""
    return level, "", ""


def named_checkpoint(store: Store, directory: str, name: str) -> str:
    """Return the path of the complete checkpoint that a name means.

    Checkpoints that could not be loaded once, and those that the run left behind, do not count.

    Args:
        store: The store.
        directory: The run: the directory that holds the checkpoints themselves.
        name: ``latest``: the newest complete checkpoint. ``best``, ``best:METRIC`` or ``best:METRIC:max``: the one with
            the smallest, or greatest, value of the metric.

    Raises:
        NotFoundError: No complete checkpoint is there, or none has the metric.
        InvalidInputError: ``best`` is to be one by a metric, and the checkpoints have several.
        CorruptionError, FormatError, StoreError, ReadOnlyError: The run cannot be read.
    """
    found = [each for each in candidates(store, directory) if each.directory.rpartition("/")[0] == directory]
    found = sorted(
        (each for each in found if DAMAGED not in each.listed), key=lambda each: (each.step or 0, each.directory)
    )
    lines, foreign = read_lines(store, directory), ""
    kind, _, metric = name.partition(":")
    ordered = found[::-1] if kind == "latest" else _by_metric(store, directory, found, metric)
    for candidate in ordered:
        state = standing(store, candidate)
        if state.state != "complete":
            continue
        if lines is None or (state.line is not None and lines.holds(state.line, state.step or 0)):
            return candidate.directory
        foreign = foreign or (candidate.directory if state.line is None else "")  # no training manager saved it
    if foreign:
        return foreign
    having = f" with the metric {metric!r}" if metric else ""
    where = store.where(directory)
    if kind_of(store, directory) is None:
        raise NotFoundError(f"{where} does not exist: check the path", path=directory)
    raise NotFoundError(
        f"no complete checkpoint{having} lies in {where}: `tierfs checkpoint ls {shlex.quote(where)}` shows their states",
        path=directory,
    )


def _by_metric(store: Store, directory: str, found: Sequence[Candidate], wanted: str) -> list[Candidate]:
    """Return the candidates that have a finite value of ``METRIC`` or ``METRIC:max``, the best one first."""
    metric, _, mode = wanted.partition(":")
    metrics = {each.directory: metrics_of(store, each.directory) for each in found if METRICS in each.listed}
    known = sorted({name for values in metrics.values() for name in values})
    if not metric and len(known) > 1:
        raise InvalidInputError(
            f"the checkpoints in {store.where(directory)} have several metrics ({', '.join(known[:5])}): name one, as in "
            f"best:{known[0]} or, if the greatest is the best, best:{known[0]}:max",
            path=directory,
        )
    metric, sign = metric or next(iter(known), ""), -1 if mode == "max" else 1
    values = {path: sign * each.get(metric, math.nan) for path, each in metrics.items()}
    # Among equal values, the newest wins.
    having = [each for each in found[::-1] if math.isfinite(values.get(each.directory, math.nan))]
    return sorted(having, key=lambda each: values[each.directory])
