"""The announced saves of a checkpoint that are not published yet, and the files that each save names.

docs/reference/checkpoint-format.md, "Commit". `tierfs.store.commit` decides when a save is published.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass

from tierfs.errors import ConflictError, CorruptionError, FormatError, NotFoundError
from tierfs.format.checkpoint import SaveMark, named_files
from tierfs.format.keys import inside
from tierfs.store.read.reader import open_manifest
from tierfs.store.store import Store
from tierfs.store.tree.records import Observed, observe_listed, observe_to_read
from tierfs.store.tree.walk import live_records
from tierfs.store.write.staging import bury

PENDING = ".pending"
"""Name of the subdirectory of a checkpoint that holds its announced saves."""
NAMED_MAX = 3  # in a message
DOCUMENTS_MAX = 8
DOCUMENT_BYTES_MAX = 1 << 30
_logger = logging.getLogger("tierfs.store")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A save that is announced and not published yet.

    Attributes:
        mark: The save's id and sequence.
        missing: Names of the files that are not in the object tier, sorted.
        files: Number of files in the save.
        problem: Why the list of its files cannot be read. Such a save is never published. Empty if there is no problem.
    """

    mark: SaveMark
    missing: tuple[str, ...]
    files: int
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"save {self.mark.save_id} cannot be published: {self.problem}"
        named = ", ".join(self.missing[:NAMED_MAX]) + (", ..." if len(self.missing) > NAMED_MAX else "")
        return f"save {self.mark.save_id} waits for {len(self.missing)} of {self.files} files: {named}"


class AnnouncedSaves:
    """The announced saves of one store. Safe for use by many threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._named: OrderedDict[bytes, frozenset[str]] = OrderedDict()  # by write id: an announcement never changes

    def is_any(self, directory: str) -> bool:
        """Return whether a save to this directory is announced. Takes one request.

        Raises:
            StoreError, ReadOnlyError: The object tier failed.
        """
        return any(True for _ in live_records(self._store, inside(directory, PENDING)))

    def find(self, directory: str) -> list[tuple[SaveMark, Observed]]:
        """Return the announced saves with their records, newest first.

        The name of an announced save's file is its save id. Other files in that directory are ignored.
        """
        found = []
        for path, info in live_records(self._store, inside(directory, PENDING), deep=False):
            try:
                observed = observe_listed(self._store, path, info)
            except NotFoundError:
                continue  # published since
            except (CorruptionError, FormatError) as error:
                _logger.error("%s: the announced save is lost: %s", self._store.where(path), error)  # noqa: TRY400 - a trace adds nothing
                continue
            mark = SaveMark.of(observed.manifest.metadata) if observed.manifest is not None else None
            if mark is not None and mark.save_id == path.rpartition("/")[2]:
                found.append((mark, observed))
        return sorted(found, key=lambda pair: pair[0], reverse=True)

    def files(self, found: Observed) -> frozenset[str]:
        """Return the names of the files in a save, read from its metadata document.

        Raises:
            CorruptionError, FormatError: The document is damaged, too long, or not the metadata of a checkpoint.
            StoreError, ReadOnlyError: The object tier failed.
        """
        manifest = found.manifest
        assert manifest is not None
        known = self._named.get(manifest.write_id)
        if known is None:
            if manifest.length > DOCUMENT_BYTES_MAX:
                raise FormatError(
                    f"{self._store.where(found.path)}: {manifest.length} bytes are too many for a checkpoint's metadata",
                    path=found.path,
                )
            document = bytearray(manifest.length)
            open_manifest(self._store, found.path, manifest).read_into(0, memoryview(document))
            known = self._named[manifest.write_id] = named_files(bytes(document), self._store.where(found.path))
            while len(self._named) > DOCUMENTS_MAX:
                self._named.popitem(last=False)
        return known

    def readable(self, directory: str) -> Observed | None:
        """Return the newest announced save whose files can all be read here, because hosts hold those not published.

        Raises:
            StoreError, ReadOnlyError, CorruptionError, FormatError: As `files`, or a file's record cannot be read.
        """
        for _, found in self.find(directory):
            paths = [inside(directory, name) for name in self.files(found)]
            if all(observe_to_read(self._store, path).manifest is not None for path in paths):
                return found
        return None

    def waited_for(self, directory: str) -> set[str]:
        """Return the names of the files of all announced saves of a directory. Raises as `files` does."""
        return set().union(*(self.files(found) for _, found in self.find(directory)))

    def forget(self, found: Observed) -> None:
        """Delete an announcement, because its save is published or superseded."""
        with suppress(ConflictError, NotFoundError):  # another client deleted it
            bury(self._store, found)
