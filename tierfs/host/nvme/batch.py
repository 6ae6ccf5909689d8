"""Drafts of the nvme tier: each commit writes a file with its drafts, a *batch*. Its name begins with its first seq.

A batch appears by rename after its bytes and all chunks that it needs are durable. Its drafts are then *pending*. A
draft that is done is marked so in place; when all drafts of a batch are done, the file is deleted. A draft that is kept
as a conflict has a second file, ``<seq>.conflict``, with the note for the user.

The batch, with little-endian numbers; the checksum is the XXH3-128 of the 16 bytes at the start and of the table. The
second table and head are used if the first ones are damaged::

    magic "TFSBATCH" | version u16 | count u16 | table length u32 | checksum 16 |
    count states: u8, 0 pending, 255 done | table | the drafts' data, one after the other | table | magic ... checksum

    each row of the table: seq u64 | at_ns i64 | path length u32 | names u32 | data length u64 | write id length u8 |
                           write id | path | names, each with a length u8 before it
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tierfs.digest import checksum
from tierfs.host.events import Faults
from tierfs.host.filesystems import disk_errors, entries_of, flush_directory
from tierfs.host.nvme.head import VERSION, check_version

TEMPORARY = "new"
_MAGIC = b"TFSBATCH"
_HEAD = struct.Struct("<8sHHI")
_ROW = struct.Struct("<QqIIQB")
_STATES_AT = _HEAD.size + 16
_FILE = re.compile(r"([0-9a-f]{16})-[0-9a-f]{8}")
_CONFLICT = re.compile(r"([0-9a-f]{16})\.conflict")
_DONE = 0xFF
"""No single flipped bit makes it from 0."""
_logger = logging.getLogger("tierfs.local")


class BatchDraft(NamedTuple):
    """A draft in a batch.

    Attributes:
        file: The batch's file name.
        place: The draft's number in the batch; -1 if the batch is damaged, so that nothing else is known of its drafts.
        seq: The position in closing order.
        at_ns: When the draft was stored, wall clock.
        write_id: Identifies the change.
        path: Relative to the store.
        names: Names of the chunks that the draft needs from this tier.
        at: Offset of its data in the file.
        length: Bytes of its data.
    """

    file: str
    place: int
    seq: int
    at_ns: int
    write_id: bytes
    path: str
    names: tuple[bytes, ...]
    at: int
    length: int


class EncodedDraft(NamedTuple):
    """A draft to store.

    Attributes:
        write_id: Identifies the change.
        path: Relative to the store.
        data: The encoded draft.
        names: Names of the chunks that the draft needs.
    """

    write_id: bytes
    path: str
    data: bytes
    names: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class StoredDraft:
    """A draft in the nvme tier.

    Attributes:
        seq: The position in closing order.
        write_id: Identifies the change.
        path: Relative to the store.
        data: The encoded draft; empty if its batch is damaged, see ``state``. Then the path is empty, too.
        state: ``pending``. ``conflict``: another writer changed the path first. ``damaged``: its batch is damaged, or
            the tier lacks a chunk that only it had. In the latter case the draft becomes pending again when the chunk
            is written again.
        note: The reason for the state, for the user.
        at_ns: When the draft was stored, wall clock.
    """

    seq: int
    write_id: bytes
    path: str
    data: bytes
    state: str
    note: str
    at_ns: int


def encode_batch(drafts: Sequence[EncodedDraft], first_seq: int, at_ns: int) -> bytes:
    """Encode drafts that get consecutive seqs from ``first_seq`` on, and are stored at this time."""
    rows = []
    for seq, draft in enumerate(drafts, first_seq):
        path = draft.path.encode("utf-8", "surrogateescape")
        lengths = (len(path), len(draft.names), len(draft.data), len(draft.write_id))
        names = b"".join(bytes([len(name)]) + name for name in draft.names)
        rows.append(b"".join((_ROW.pack(seq, at_ns, *lengths), draft.write_id, path, names)))
    table = b"".join(rows)
    head = _HEAD.pack(_MAGIC, VERSION, len(drafts), len(table))
    head += checksum(head, table)
    return b"".join((head, bytes(len(drafts)), table, *(draft.data for draft in drafts), table, head))


def list_batches(directory: Path) -> tuple[dict[str, int], set[int]]:
    """Return the first seq of each batch in the directory, by file name, and the seqs of drafts that are conflicts.

    Raises:
        ReadOnlyError, StoreError: The directory cannot be listed.
    """
    files = [entry.name for entry in entries_of(directory)]
    batches = {file: int(match[1], 16) for file in files if (match := _FILE.fullmatch(file))}
    return batches, {int(match[1], 16) for file in files if (match := _CONFLICT.fullmatch(file))}


def read_batch(directory: Path, file: str, fallbacks: Counter[str]) -> list[BatchDraft]:
    """Read the drafts of a batch, done or not; none if the batch is gone. If both tables are damaged, it is one draft.

    Raises:
        FormatError: Another version of tierfs wrote it.
        StoreError: It cannot be read.
    """
    path = directory / file
    with disk_errors(path):
        try:
            with open(path, "rb") as batch:
                size = os.fstat(batch.fileno()).st_size
                for at in (0, max(0, size - _STATES_AT)):
                    head = os.pread(batch.fileno(), _STATES_AT, at)
                    if len(head) < _STATES_AT or not head.startswith(_MAGIC):
                        continue
                    _, version, count, length = _HEAD.unpack_from(head)
                    table_at = at - length if at else _STATES_AT + count
                    table = os.pread(batch.fileno(), min(length, size), max(0, table_at))
                    if checksum(head[: _HEAD.size], table) == head[_HEAD.size :]:
                        check_version(path, version)
                        if at:
                            fallbacks["tables_damaged"] += 1
                            _logger.warning("%s: the first table is damaged, and the second one is used", path)
                        return list(_rows(file, table, count, _STATES_AT + count + length))
        except FileNotFoundError:
            return []
    return [BatchDraft(file, -1, int(file.partition("-")[0], 16), 0, checksum(file.encode()), "", (), 0, 0)]


def done_in(directory: Path, file: str, count: int) -> set[int] | None:
    """Return the places of those of a batch's ``count`` drafts that are done, or None if the batch is gone.

    Raises:
        StoreError: The batch cannot be read.
    """
    path = directory / file
    with disk_errors(path):
        try:
            with open(path, "rb") as batch:
                states = os.pread(batch.fileno(), count, _STATES_AT)
        except FileNotFoundError:
            return None
    return {index for index, state in enumerate(states) if state == _DONE}


def _rows(file: str, table: bytes, count: int, data_at: int) -> Iterator[BatchDraft]:
    """Yield the rows of a table whose checksum is right."""
    at = 0
    for index in range(count):
        seq, at_ns, path_length, name_count, data_length, id_length = _ROW.unpack_from(table, at)
        at += _ROW.size
        write_id = table[at : at + id_length]
        at += id_length
        path = table[at : at + path_length].decode("utf-8", "surrogateescape")
        at += path_length
        names = []
        for _ in range(name_count):
            names.append(table[at + 1 : at + 1 + table[at]])
            at += 1 + table[at]
        yield BatchDraft(file, index, seq, at_ns, write_id, path, tuple(names), data_at, data_length)
        data_at += data_length


def load_draft(directory: Path, draft: BatchDraft, *, is_conflict: bool, missing: int = 0) -> StoredDraft | None:
    """Return a draft with its data, or None if its batch is gone: the draft is done.

    Args:
        directory: The directory of the batches.
        is_conflict: Whether it is kept as a conflict.
        missing: The number of its chunks that the tier lacks.

    Raises:
        StoreError: The draft cannot be read.
    """
    path, data, state, note = directory / draft.file, b"", "pending", ""
    with disk_errors(path):
        try:
            with open(path, "rb") as file:
                data = os.pread(file.fileno(), draft.length, draft.at)
        except FileNotFoundError:
            return None
        if is_conflict:
            state, note = "conflict", "kept as a conflict"
            with contextlib.suppress(FileNotFoundError):
                note = (directory / _conflict(draft.seq)).read_text("utf-8", "replace")
    if draft.place < 0:
        state, note = "damaged", "its file in the nvme tier is damaged"
    elif missing and not is_conflict:
        state, note = "damaged", f"{missing} of {len(draft.names)} chunks are not in the nvme tier"
    return StoredDraft(draft.seq, draft.write_id, draft.path, data, state, note, draft.at_ns)


class DraftBatches:
    """The drafts of an nvme tier, for its writer. Not thread-safe.

    Args:
        directory: The directory of the batches, which exists.
        faults: Called before and after every ordered step.
        fallbacks: Counts damaged tables.

    Attributes:
        drafts: The drafts that are not done, by seq.
        conflicts: The seqs of drafts that are kept as conflicts.
        last_seq: The highest seq that was in use since the tier was opened.
        used_bytes: Size of all batches.

    Raises:
        FormatError: Another version of tierfs wrote a batch.
        StoreError: The directory cannot be read or written.
    """

    def __init__(self, directory: Path, *, faults: Faults, fallbacks: Counter[str]) -> None:
        self._directory = directory
        self._fallbacks = fallbacks
        self._faults = faults
        self.drafts: dict[int, BatchDraft] = {}
        self.used_bytes = 0
        self._left: dict[str, set[int]] = {}  # seqs of each batch that are not done
        self._sizes: dict[str, int] = {}
        files, conflicts = list_batches(directory)
        with disk_errors(directory):
            (directory / TEMPORARY).unlink(missing_ok=True)
            for file, _ in sorted(files.items(), key=lambda each: each[1]):
                found = read_batch(directory, file, fallbacks)
                done = done_in(directory, file, len(found))
                self._note(file, [draft for draft in found if draft.place not in (done or ())])
                # An earlier process may have ended between a change and its flush.
                with open(directory / file, "rb") as batch:
                    os.fdatasync(batch.fileno())
                if not self._left[file]:
                    (directory / file).unlink()
                    self._forget(file)
            for seq in conflicts - set(self.drafts):
                (directory / _conflict(seq)).unlink()
            flush_directory(directory)
        self.conflicts = conflicts & set(self.drafts)
        self.last_seq = max(self.drafts, default=0)

    def _note(self, file: str, drafts: Sequence[BatchDraft]) -> None:
        self.drafts.update((draft.seq, draft) for draft in drafts)
        self._left[file] = {draft.seq for draft in drafts}
        self._sizes[file] = os.stat(self._directory / file).st_size
        self.used_bytes += self._sizes[file]

    def _forget(self, file: str) -> None:
        self.used_bytes -= self._sizes.pop(file)
        del self._left[file]

    @contextlib.contextmanager
    def adding(self, data: bytes, count: int) -> Iterator[None]:
        """Write a batch durably. It gets its name when the context ends without an error.

        The caller makes the names of the drafts' chunks durable in the context: the flush of the batch has then done
        most of that work on filesystems with a journal.

        Args:
            data: Drafts from `encode_batch`, whose seqs follow `last_seq`.
            count: The number of these drafts.

        Raises:
            StoreError, CapacityError: The batch could not be written. There is no new draft.
        """
        file = f"{self.last_seq + 1:016x}-{secrets.token_hex(4)}"
        self.last_seq += count
        with self._putting(file, data, "batch"):
            yield
        self._note(file, read_batch(self._directory, file, self._fallbacks))

    def keep_as_conflict(self, seq: int, note: str) -> None:
        if seq not in self.conflicts:
            with self._putting(_conflict(seq), note.encode("utf-8", "replace"), "conflict"):
                pass
            self.conflicts.add(seq)

    def finish(self, seqs: Collection[int]) -> list[BatchDraft]:
        """Remove drafts durably. Return those of these seqs that were there. After an error, call it again."""
        done = [self.drafts[seq] for seq in dict.fromkeys(seqs) if seq in self.drafts]
        ended: dict[str, list[BatchDraft]] = {}
        for draft in done:
            ended.setdefault(draft.file, []).append(draft)
        over = [file for file, some in ended.items() if len(some) == len(self._left[file])]
        with disk_errors(self._directory), self._step("batch.finish"):
            for file, some in ended.items():
                if file not in over:
                    self._mark_done(self._directory / file, [draft.place for draft in some])
            for file in over:
                (self._directory / file).unlink(missing_ok=True)
            if over:
                flush_directory(self._directory)
            for seq in self.conflicts.intersection(seqs):
                (self._directory / _conflict(seq)).unlink(missing_ok=True)
        for draft in done:
            del self.drafts[draft.seq]
            self._left[draft.file].discard(draft.seq)
            self.conflicts.discard(draft.seq)
        for file in over:
            self._forget(file)
        return done

    @staticmethod
    def _mark_done(path: Path, indexes: Collection[int]) -> None:
        with open(path, "r+b", buffering=0) as batch:
            for index in indexes:
                os.pwrite(batch.fileno(), bytes([_DONE]), _STATES_AT + index)
            os.fdatasync(batch.fileno())

    @contextlib.contextmanager
    def _putting(self, file: str, data: bytes, what: str) -> Iterator[None]:
        """Create a file durably. It gets its name when the context ends without an error."""
        temporary, path = self._directory / TEMPORARY, self._directory / file
        with disk_errors(path):
            try:
                with self._step(f"{what}.write"), open(temporary, "wb", opener=_open_private) as new:
                    new.write(data)
                    new.flush()
                    os.fdatasync(new.fileno())
                yield
                with self._step(f"{what}.rename"):
                    os.rename(temporary, path)
                with self._step(f"{what}.sync"):
                    flush_directory(self._directory)
            except Exception:
                # The caller hears that nothing was stored, so no reader may find it.
                for each in (temporary, path):
                    with contextlib.suppress(OSError):
                        each.unlink()
                raise

    @contextlib.contextmanager
    def _step(self, name: str) -> Iterator[None]:
        self._faults(f"before {name}")
        yield
        self._faults(f"after {name}")


def _conflict(seq: int) -> str:
    return f"{seq:016x}.conflict"


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
