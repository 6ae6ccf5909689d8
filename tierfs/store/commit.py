"""Commit of a checkpoint whose files come from several hosts: announced first, published when all of them are there.

No host knows when another's files have reached the object tier. So the metadata is put there under a name that nobody
takes for a checkpoint's, and whoever sees that every file that it names is there publishes it: the flusher that
published the last one, a reader, or a person. docs/reference/checkpoint-format.md, "Commit".
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tierfs.errors import ConflictError, CorruptionError, FormatError, NotFoundError, StoreError, TierfsError
from tierfs.format.checkpoint import ROOT, SEQUENCE_MAX, SaveMark, turn_of
from tierfs.format.keys import directory_prefix, inside, record_key
from tierfs.format.manifest import Manifest, Row
from tierfs.host.pending.levels import Level
from tierfs.store.announced import PENDING, AnnouncedSaves, Waiting
from tierfs.store.offline import ask_briefly
from tierfs.store.replaced import remove_replaced
from tierfs.store.store import Store
from tierfs.store.tree.records import (
    Observed,
    blindly,
    observe,
    observe_draft,
    observe_published,
    observe_to_replace,
    publish,
)
from tierfs.store.tree.references import write_references
from tierfs.store.tree.walk import live_records
from tierfs.store.write.preconditions import ensure_chunks_durable, listed_rows, refuse_foreign
from tierfs.store.write.staging import is_staged
from tierfs.store.write.writer import WriteMode, Writer

__all__ = ["PART", "Commits", "part_of"]

# In the manifest of a file that a checkpoint may wait for; and of one of which nobody is told before it is in the object tier:
# then no checkpoint that names it waits for it.
PART: Mapping[str, object] = {"checkpoint_part": True}
PART_IN_PLACE: Mapping[str, object] = {"checkpoint_part": "in place"}
ATTEMPTS_MAX = 8
POLL_S = 0.25
LISTED_MAX = 1000  # what S3 gives at once
_logger = logging.getLogger("tierfs.store")


class Commits:
    """The saves of one store that have been announced. Safe for use by many threads.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._announced = AnnouncedSaves(store)

    def __repr__(self) -> str:
        return f"Commits({self._store.url!r})"

    def begin(self, path: str, save_id: str) -> tuple[SaveMark, bool]:
        """Look once at where a save goes that begins now.

        While the object tier is unreachable, what this host saw last of the checkpoint counts.

        Args:
            path: The checkpoint's metadata.
            save_id: Hexadecimal digits, drawn at random.

        Returns:
            The save's mark, greater than that of any that began before, as far as can be seen; and whether no record lies at the
            path: see `publish`.

        Raises:
            ReadOnlyError: Metadata that tierfs did not write lies there.
            StoreError, CorruptionError, FormatError: It cannot be told, or there is no mark greater.
        """
        before, is_new = self._seen(path)
        sequence = max([self._store.clock.now_ns(), *(mark.sequence + 1 for mark in before)])
        if sequence > SEQUENCE_MAX:
            raise FormatError(
                f"{self._store.where(path)}: no save can follow one of sequence {sequence - 1}: remove that", path=path
            )
        return SaveMark(sequence, save_id), is_new

    def _seen(self, path: str) -> tuple[list[SaveMark], bool]:
        """`_look`, as far as can be seen in a moment."""
        store = self._store
        if store.tiers is None:
            return self._look(path)
        try:
            return ask_briefly(store, lambda: self._look(path))
        except StoreError as error:
            if not error.transient:
                raise
            there = (observe_draft(store, path) or blindly(store, path, error)).manifest
            return _turns(there), False

    def _look(self, path: str) -> tuple[list[SaveMark], bool]:
        """The saves that are published or announced at a path, and whether no record lies there."""
        store = self._store
        directory, _, name = path.rpartition("/")
        there = observe_draft(store, path)  # before the object tier is asked: drafts move down
        listed = self._names(directory) if name == ROOT else None
        is_new = there is None and listed is not None and record_key(path) not in listed
        if there is None and not is_new:
            there = observe_published(store, path)
            is_new = there.version is None
        manifest = there.manifest if there is not None else None
        if manifest is None:
            refuse_foreign(store, path)
        before = _turns(manifest)
        if name == ROOT and (listed is None or directory_prefix(inside(directory, PENDING)) in listed):
            before += [mark for mark, _ in self._announced.find(directory)]
        return before, is_new

    def _names(self, directory: str) -> set[str] | None:
        """The keys in a directory; ``None`` where they are more than one request tells."""
        listed = self._store.objects.list(directory_prefix(directory), delimiter=True)
        found = {item.key for item in itertools.islice(listed, LISTED_MAX)}
        return found if len(found) < LISTED_MAX else None

    def publish(self, path: str, document: bytes, mark: SaveMark, *, is_new: bool = False) -> None:
        """Write a checkpoint's metadata at the store's level, behind the files that this host closed before.

        Args:
            path: The metadata's.
            document: Its content.
            mark: The save's.
            is_new: No record lay at the path when the save began. Then it is not looked at again, unless the put, which is on
                condition, finds something there; but where the flusher puts it, it is: for that a conflict is one for good.

        Raises:
            ConflictError: A save that began later is published already.
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
                # One that began before may have been published in the meantime. What the flusher keeps is not written again.
                if not isinstance(error, ConflictError) or writer.is_done or attempt + 1 == ATTEMPTS_MAX:
                    raise
            else:
                return

    def announce(self, directory: str, document: bytes, mark: SaveMark) -> None:
        """Put a checkpoint's metadata where it is found when every file that it names is there, then see if they are.

        From then on the save is committed when they are, even where this host cannot look now.

        Args:
            directory: The checkpoint's.
            document: The metadata.
            mark: The save's.

        Raises:
            ConflictError: A save that began later is published already.
            StoreError, CapacityError, ReadOnlyError: The object tier failed.
        """
        self.check_turn(inside(directory, ROOT), mark)
        path = inside(directory, f"{PENDING}/{mark.save_id}")
        writer = Writer(self._store, path, mode=WriteMode.CREATE, metadata=mark.as_metadata(), level=Level.OBJECT)
        writer.write(document)
        writer.commit()
        try:
            self.advance(directory)
        except TierfsError as error:
            _logger.warning("%s: whether the save is complete is seen later: %s", self._store.where(directory), error)

    def check_turn(self, path: str, mark: SaveMark) -> None:
        """See that no save that began later than this one is published.

        Raises:
            ConflictError: One is.
            StoreError, CorruptionError, FormatError, ReadOnlyError: It cannot be told.
        """
        self._check_turn(path, observe(self._store, path).manifest, mark)

    def check_stands(self, path: str, mark: SaveMark) -> None:
        """See that a save that does not wait any more is the published one.

        Raises:
            ConflictError: One that began later is.
            NotFoundError: It was removed.
            StoreError, CorruptionError, FormatError, ReadOnlyError: It cannot be told.
        """
        there = observe(self._store, path).manifest
        self._check_turn(path, there, mark)
        if turn_of(there) != mark:
            raise NotFoundError(
                f"{self._store.where(path)} is not of save {mark.save_id}, which is not announced any more either: it was "
                "removed",
                path=path,
            )

    def _check_turn(self, path: str, there: Manifest | None, mark: SaveMark) -> None:
        other = turn_of(there)
        if other is not None and other > mark:
            whose = f"is of save {other.save_id}, which began" if other.save_id else "is of no save, and was written"
            raise ConflictError(
                f"{self._store.where(path)} {whose} later than save {mark.save_id}: that one stands, this one is superseded",
                path=path,
            )

    def is_any(self, directory: str) -> bool:
        """Whether a save to this directory is announced; one request.

        Raises:
            StoreError, ReadOnlyError: It cannot be told.
        """
        return self._announced.is_any(directory)

    def advance(self, directory: str) -> list[Waiting]:
        """Publish the newest save of a directory that is complete, and forget those that began before it.

        Returns:
            Those that have to wait, the newest first.

        Raises:
            StoreError, CapacityError, ReadOnlyError, CorruptionError, FormatError: It cannot be told or done.
        """
        announced = self._announced.find(directory)
        if not announced:
            return []
        there = self._there(directory)
        root = self._root(directory)
        waiting = []
        for mark, found in announced:
            if _is_over(mark, root):
                # Over for good once the other one is in the object tier: until then it may be lost with this host.
                if root.draft is None:
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
            self.note_published(directory)
        return waiting

    def note_published(self, directory: str, names: Iterable[str] | None = None) -> None:
        """Do what is due once a checkpoint's metadata is in the object tier: remove what it replaced, write its reference list.

        Args:
            directory: Of the checkpoint.
            names: All files in it, where this process wrote them into a new directory: then nothing has to be looked up.
        """
        if names is not None:
            write_references(self._store, directory, names)
            return
        try:
            root = observe(self._store, inside(directory, ROOT))
            if root.manifest is not None and root.manifest.previous and SaveMark.of(root.manifest.metadata) is not None:
                remove_replaced(
                    self._store,
                    directory,
                    self._announced.files(root) | {ROOT},
                    PART,
                    lambda: self._announced.waited_for(directory),
                )
        except TierfsError as error:
            _logger.info(
                "%s: what was replaced there stays until the next save: %s", self._store.where(directory), error
            )
        write_references(self._store, directory)

    def overtake(self, path: str, record: Manifest, rows: Sequence[Row]) -> bool:
        """See that of two saves the later one stands, where another was published in the meantime.

        Returns:
            Whether it does: not where what is there is of no save, or nothing, or this is none.

        Raises:
            StoreError, CapacityError, ReadOnlyError, CorruptionError, FormatError: It cannot be told or done.
        """
        mark, there = SaveMark.of(record.metadata), observe(self._store, path)
        turn = turn_of(there.manifest)
        if mark is None or turn is None:
            return False
        if turn > mark and turn.save_id:
            # As a conflict that is kept it would hold up every later save of this host to the directory.
            _logger.warning(
                "%s is of save %s, which began later: save %s of this host is superseded, and not published",
                self._store.where(path),
                turn.save_id,
                mark.save_id,
            )
            return True
        return turn == mark or (turn < mark and self._replace(path, mark, record, rows))

    def wait(self, directory: str, timeout_s: float | None, mark: SaveMark | None = None) -> None:
        """Wait until a save that was announced in a directory does not have to wait any more; by default until none has.

        Raises:
            TimeoutError: It has, still; names what is missing.
            CorruptionError: What it consists of cannot be read: it is never published.
            StoreError, ReadOnlyError, CorruptionError, FormatError: As `advance`.
        """
        clock = self._store.clock
        deadline = None if timeout_s is None else clock.monotonic() + timeout_s
        while waiting := [save for save in self.advance(directory) if mark in {None, save.mark}]:
            for save in waiting:
                if save.problem:
                    raise CorruptionError(f"{self._store.where(directory)}: {save}", path=directory)
            if deadline is not None and clock.monotonic() >= deadline:
                raise TimeoutError(
                    f"{self._store.where(directory)}: {waiting[0]}; the hosts that hold them publish them, unless they are "
                    "lost: then the save is"
                )
            clock.sleep(POLL_S)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _there(self, directory: str) -> set[str]:
        """Names of the files of a directory that are in the object tier."""
        return {path.rpartition("/")[2] for path, _ in live_records(self._store, directory, deep=False)}

    def _root(self, directory: str) -> Observed:
        return observe_to_replace(self._store, inside(directory, ROOT))

    def _publish(self, directory: str, mark: SaveMark, found: Observed) -> bool:
        """Make a complete save the checkpoint, unless one that began later is. False if it cannot be done from here."""
        store, manifest = self._store, found.manifest
        assert manifest is not None
        record = replace(manifest, write_id=store.random_bytes(16))
        is_done = self._replace(inside(directory, ROOT), mark, record, listed_rows(store, found))
        if is_done:
            _logger.info("%s is complete: save %s", store.where(directory), mark.save_id)
        return is_done

    def _replace(self, path: str, mark: SaveMark, record: Manifest, rows: Sequence[Row]) -> bool:
        for attempt in range(ATTEMPTS_MAX):
            root = observe_to_replace(self._store, path)
            if root.draft is not None:
                return False  # a save of this host alone is on its way: its flusher sees the end of that
            if _is_over(mark, root):
                return True
            table, indirect, term = ensure_chunks_durable(self._store, path, rows)
            try:
                new = replace(record, previous=root.previous, rows=table, indirect=indirect)
                publish(self._store, root, new, term=term)
            except ConflictError:
                if attempt + 1 == ATTEMPTS_MAX:
                    raise
            else:
                return True
        return False


def part_of(store: Store) -> Mapping[str, object]:
    """The note in the manifest of a part that is saved at a store's level."""
    return PART_IN_PLACE if store.ack is Level.OBJECT else PART


def _turns(manifest: Manifest | None) -> list[SaveMark]:
    turn = turn_of(manifest)
    return [] if turn is None else [turn]


def _is_over(mark: SaveMark, root: Observed) -> bool:
    """Whether a save is published, or one that began later."""
    there = turn_of(root.manifest)
    return there is not None and there >= mark
