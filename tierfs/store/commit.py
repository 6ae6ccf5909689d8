"""Commit a checkpoint whose files come from several hosts: announce it, then publish it when all its files are there.

No host knows when the files of another host have reached the object tier. So the metadata is first put under a name
that no reader takes for a checkpoint. The client that finds all named files there publishes the checkpoint: the flusher
that published the last file, a reader, or a person. docs/reference/checkpoint-format.md, "Commit".
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tierfs.errors import ConflictError, CorruptionError, FormatError, NotFoundError, StoreError, TierfsError
from tierfs.format.checkpoint import ROOT, SEQUENCE_MAX, SaveMark, turn_of
from tierfs.format.keys import directory_prefix, inside, record_key
from tierfs.format.manifest import Manifest, Row
from tierfs.host.pending.levels import Level
from tierfs.store.announced_saves import PENDING, AnnouncedSaves, Waiting
from tierfs.store.offline import ask_briefly
from tierfs.store.store import Store
from tierfs.store.tree.records import (
    Observed,
    blindly,
    found_nothing,
    observe,
    observe_draft,
    observe_published,
    observe_to_replace,
    publish,
)
from tierfs.store.tree.references import write_references
from tierfs.store.tree.walk import live_records
from tierfs.store.write.staging import ensure_chunks_durable, is_staged, listed_rows, refuse_foreign
from tierfs.store.write.writer import WriteMode, Writer

# Manifest metadata of a file that a checkpoint may have to wait for. "in place" marks a file that is in the object tier
# before the coordinator is told of it, so that no checkpoint waits for it.
PART: Mapping[str, object] = {"checkpoint_part": True}
PART_IN_PLACE: Mapping[str, object] = {"checkpoint_part": "in place"}
ATTEMPTS_MAX = 8
POLL_S = 0.25
LISTED_MAX = 1000  # the size of a page of an S3 listing
REPLACES_MAX = 64  # most saves that a mark names, 60 bytes each; more are announced only if saves keep failing
_logger = logging.getLogger("tierfs.store")


class Commits:
    """Starts, announces and publishes the saves of one store. Safe for use by many threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._announced = AnnouncedSaves(store)

    def begin(self, path: str, save_id: str, *, overwrite: bool = True) -> tuple[SaveMark, bool]:
        """Look once at the target of a new save, and choose the save's mark.

        While the object tier is unreachable, the checkpoint that this host saw last counts.

        Args:
            save_id: Hexadecimal digits, drawn at random.
            overwrite: Whether the save may replace the saves that can be seen now. It may never replace another one,
                except those that this process began before.

        Returns:
            The save's mark, greater than the mark of every earlier save that can be seen, and whether no
            record is at the path: see `publish`.

        Raises:
            ReadOnlyError: The path holds metadata that tierfs did not write.
            StoreError, CorruptionError, FormatError: The path cannot be read, or no greater mark exists.
        """
        before, is_new = self._seen(path)
        # This process may have begun others that nothing shows yet.
        before += [mark for there, mark in list(self._store.saves_begun) if there == path]
        sequence = max([self._store.clock.now_ns(), *(mark.sequence + 1 for mark in before)])
        if sequence > SEQUENCE_MAX:
            raise FormatError(
                f"{self._store.where(path)}: no save can follow one of sequence {sequence - 1}: remove that save",
                path=path,
            )
        mark = SaveMark(sequence, save_id, frozenset(sorted(before)[-REPLACES_MAX:] if overwrite else ()))
        self._store.saves_begun.append((path, mark))
        return mark, is_new

    def _seen(self, path: str) -> tuple[list[SaveMark], bool]:
        """Return the result of `_look`. If the object tier does not answer, use the state this host saw last."""
        store = self._store
        if store.tiers is None:
            return self._look(path)
        try:
            return ask_briefly(store, lambda: self._look(path))
        except StoreError as error:
            if not error.transient:
                raise
            return _turns(observe_draft(store, path) or blindly(store, path, error)), False

    def _look(self, path: str) -> tuple[list[SaveMark], bool]:
        """Return the marks of the saves published or announced at a path, and whether no record is there."""
        store = self._store
        directory, _, name = path.rpartition("/")
        there = observe_draft(store, path)  # read before the object tier, because drafts move down
        seen_ns = time.time_ns()
        listed = self._names(directory) if name == ROOT else None
        is_new = False
        if there is None:
            key = record_key(path)
            is_listed = listed is None or key in listed
            there = observe_published(store, path) if is_listed else found_nothing(store, path, key, seen_ns)
            is_new = there.version is None
        if there.manifest is None:
            refuse_foreign(store, path)
        before = _turns(there)
        if name == ROOT and (listed is None or directory_prefix(inside(directory, PENDING)) in listed):
            before += [mark for mark, _ in self._announced.find(directory)]
        return before, is_new

    def _names(self, directory: str) -> set[str] | None:
        """Return the keys in a directory. None if one request cannot list them all."""
        listed = self._store.objects.list(directory_prefix(directory), delimiter=True)
        found = {item.key for item in itertools.islice(listed, LISTED_MAX)}
        return found if len(found) < LISTED_MAX else None

    def publish(self, path: str, document: bytes, mark: SaveMark, *, is_new: bool = False) -> None:
        """Write a checkpoint's metadata at the store's level, after the files that this host closed before.

        Args:
            is_new: No record was at the path when the save began. The first attempt then does not read the path again,
                because its put is conditional. The path is read if the put finds a record. It is always read if the
                flusher publishes the metadata, because a conflict of a pending file is permanent.

        Raises:
            ConflictError: A save is published that this one may not replace.
            StoreError, CapacityError, ReadOnlyError, TimeoutError: See `Writer.commit`.
        """
        for attempt in range(ATTEMPTS_MAX):
            is_unseen = is_new and attempt == 0 and not is_staged(self._store, path, self._store.ack)
            writer = Writer(self._store, path, metadata=mark.as_metadata(), is_new=is_unseen)
            self._check_turn(path, writer.replaces, mark)
            try:
                writer.write(document)
                writer.commit()
            except BaseException as error:
                writer.abort()
                # Retry: an earlier save may have been published since. A change that the flusher holds stays there.
                if not isinstance(error, ConflictError) or writer.is_done or attempt + 1 == ATTEMPTS_MAX:
                    raise
            else:
                if writer.is_staged and self._store.ack is Level.OBJECT:
                    self.check_stands(path, mark)  # the flusher drops a save that it may not publish: see `overtake`
                return

    def announce(self, directory: str, document: bytes, mark: SaveMark) -> None:
        """Put a checkpoint's metadata under its announced name, then publish it if all its files are there.

        Once announced, the save is committed when its last file arrives, even if this host cannot check for that now.

        Raises:
            ConflictError: A save is published that this one may not replace.
            StoreError, CapacityError, ReadOnlyError: The object tier failed.
        """
        root = inside(directory, ROOT)
        self._check_turn(root, observe(self._store, root).manifest, mark)
        path = inside(directory, f"{PENDING}/{mark.save_id}")
        writer = Writer(self._store, path, mode=WriteMode.CREATE, metadata=mark.as_metadata(), level=Level.OBJECT)
        writer.write(document)
        writer.commit()
        try:
            self.advance(directory)
        except TierfsError as error:
            _logger.warning(
                "%s: cannot check now whether the save is complete: %s", self._store.where(directory), error
            )

    def check_stands(self, path: str, mark: SaveMark) -> None:
        """Check that a save that is no longer announced is the published one.

        Raises:
            ConflictError: Another save is published.
            NotFoundError: The save was removed.
            StoreError, CorruptionError, FormatError, ReadOnlyError: The published record cannot be read.
        """
        there = turn_of(observe(self._store, path).manifest)
        if there is None:
            raise NotFoundError(
                f"{self._store.where(path)} does not belong to save {mark.save_id}, which is no longer announced: that "
                "save was removed",
                path=path,
            )
        if there != mark:
            raise self._conflict(path, there, mark)

    def _check_turn(self, path: str, there: Manifest | None, mark: SaveMark) -> None:
        other = turn_of(there)
        if other is not None and other != mark and not mark.may_replace(other):
            raise self._conflict(path, other, mark)

    def _conflict(self, path: str, other: SaveMark, mark: SaveMark) -> ConflictError:
        is_later = other > mark
        whose = "no save, and was written"
        if other.save_id:
            whose = f"save {other.save_id}, which {'began' if is_later else 'was published'}"
        when = f"later than save {mark.save_id}" if is_later else f"after save {mark.save_id} began"
        return ConflictError(
            f"{self._store.where(path)} belongs to {whose} {when}: that one is kept, this one is superseded; save again "
            "if this one is right",
            path=path,
        )

    def advance(self, directory: str) -> list[Waiting]:
        """Publish the newest complete save of a directory, and delete the announcements of earlier saves.

        Returns:
            The saves that still wait for files, newest first.

        Raises:
            StoreError, CapacityError, ReadOnlyError, CorruptionError, FormatError: The state cannot be read,
                or the publication failed.
        """
        announced = self._announced.find(directory)
        if not announced:
            return []
        there = {path.rpartition("/")[2] for path, _ in live_records(self._store, directory, deep=False)}
        root = self._root(directory)
        waiting = []
        for mark, found in announced:
            if _is_over(mark, root):
                # Superseded for certain only by a save in the object tier: a draft may be lost with this host.
                if root.draft is None:
                    if (turn := turn_of(root.manifest)) is not None and turn != mark:
                        _logger.warning("an announced save is not published: %s", self._conflict(root.path, turn, mark))
                    self._announced.forget(found)
                continue
            try:
                named = self._announced.files(found)
            except (CorruptionError, FormatError) as error:
                waiting.append(Waiting(mark, (), 0, str(error)))
                continue
            missing = named - there
            if missing or not self._publish(directory, mark, found):
                waiting.append(Waiting(mark, tuple(sorted(missing)), len(named)))
                continue
            self._announced.forget(found)
            root = self._root(directory)
            write_references(self._store, directory)
        return waiting

    def overtake(self, path: str, record: Manifest, rows: Sequence[Row]) -> bool:
        """Decide between two saves, after another write of the metadata was published first.

        Returns:
            Whether that is decided: the save that may replace the other one is published now. False if ``record`` is of
            no save, nothing is at the path, or the metadata there is of no save and may not be replaced. Also False if
            this host has a pending draft of the path.

        Raises:
            StoreError, CapacityError, ReadOnlyError, CorruptionError, FormatError: The state cannot be read,
                or the publication failed.
        """
        mark, turn = SaveMark.of(record.metadata), turn_of(observe(self._store, path).manifest)
        if mark is None or turn is None:
            return False
        if mark == turn or mark.may_replace(turn):
            return self._replace(path, mark, record, rows)
        if turn.save_id:
            # Not kept as a conflict: that would block every later save of this host to the directory.
            _logger.error("a save of this host is not published: %s", self._conflict(path, turn, mark))
        return bool(turn.save_id)

    def wait(self, directory: str, timeout_s: float | None, mark: SaveMark | None = None) -> None:
        """Wait until an announced save is published or superseded; by default until all saves of the directory are.

        Raises:
            TimeoutError: A save still waits. The message names the missing files.
            CorruptionError: The list of a save's files cannot be read, so the save is never published.
            StoreError, CapacityError, ReadOnlyError, CorruptionError, FormatError: As `advance`.
        """
        clock = self._store.clock
        deadline = None if timeout_s is None else clock.monotonic() + timeout_s
        while waiting := [save for save in self.advance(directory) if mark in {None, save.mark}]:
            for save in waiting:
                if save.problem:
                    raise CorruptionError(f"{self._store.where(directory)}: {save}", path=directory)
            if deadline is not None and clock.monotonic() >= deadline:
                raise TimeoutError(
                    f"{self._store.where(directory)}: {waiting[0]}; the hosts that hold these files publish "
                    "them; if such a host is lost, so is the save"
                )
            clock.sleep(POLL_S)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _root(self, directory: str) -> Observed:
        return observe_to_replace(self._store, inside(directory, ROOT))

    def _publish(self, directory: str, mark: SaveMark, found: Observed) -> bool:
        """Publish a complete save, unless a later save is published. Return False if this host cannot do it now."""
        store, manifest = self._store, found.manifest
        assert manifest is not None
        record = replace(manifest, write_id=store.random_bytes(16))
        return self._replace(inside(directory, ROOT), mark, record, listed_rows(store, found))

    def _replace(self, path: str, mark: SaveMark, record: Manifest, rows: Sequence[Row]) -> bool:
        for attempt in range(ATTEMPTS_MAX):
            root = observe_to_replace(self._store, path)
            if root.draft is not None:
                return False  # a save of this host is pending: this host's flusher finishes it first
            if _is_over(mark, root):
                return True
            table, indirect, term = ensure_chunks_durable(self._store, path, rows)
            try:
                new = replace(record, rows=table, indirect=indirect)
                publish(self._store, root, new, term=term)
            except ConflictError:
                if attempt + 1 == ATTEMPTS_MAX:
                    raise
            else:
                _logger.info("%s is complete: save %s", self._store.where(path), mark.save_id)
                return True
        return False


def part_of(store: Store) -> Mapping[str, object]:
    """Return the metadata for the manifest of a part that is saved at a store's level."""
    return PART_IN_PLACE if store.ack is Level.OBJECT else PART


def _turns(there: Observed) -> list[SaveMark]:
    turn = turn_of(there.manifest)
    if turn is None:
        return []
    # A draft may be lost with this host. Then the saves that it would have replaced are still there.
    return [turn, *(turn.replaces or ())] if there.draft is not None else [turn]


def _is_over(mark: SaveMark, root: Observed) -> bool:
    """Return whether this save is the published one, or one that it may not replace."""
    return not mark.may_replace(turn_of(root.manifest))
