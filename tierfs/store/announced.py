"""The saves of a checkpoint that were announced and are not published yet, and the files that each names.

docs/reference/checkpoint-format.md, "Commit". `tierfs.store.commit` says when one of them is published.
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
from tierfs.store.tree.delete import bury
from tierfs.store.tree.records import Observed, observe_listed
from tierfs.store.tree.walk import live_records

__all__ = ["PENDING", "AnnouncedSaves", "Waiting"]

PENDING = ".pending"
"""The directory in a checkpoint's where its announced saves lie."""
NAMED_MAX = 3  # in a message
DOCUMENTS_MAX = 8
DOCUMENT_BYTES_MAX = 1 << 30
_logger = logging.getLogger("tierfs.store")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A save that was announced and is not published yet.

    Attributes:
        mark: Which.
        missing: Names of the files that are not in the object tier, sorted.
        files: How many it consists of.
        problem: Why it cannot be told what it consists of; it can never be published then.
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
    """The announced saves of one store. Safe for use by many threads.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._named: OrderedDict[bytes, frozenset[str]] = OrderedDict()  # by write id: what was announced never changes

    def is_any(self, directory: str) -> bool:
        """Whether a save to this directory is announced; one request.

        Raises:
            StoreError, ReadOnlyError: It cannot be told.
        """
        return any(True for _ in live_records(self._store, inside(directory, PENDING)))

    def find(self, directory: str) -> list[tuple[SaveMark, Observed]]:
        """The announced saves, the newest first: each lies under its save's id. Other files there are somebody's own."""
        found = []
        for path, info in live_records(self._store, inside(directory, PENDING), deep=False):
            try:
                observed = observe_listed(self._store, path, info)
            except NotFoundError:
                continue  # published since
            except (CorruptionError, FormatError) as error:
                _logger.error("%s: what is announced there is lost: %s", self._store.where(path), error)  # noqa: TRY400 - says it all
                continue
            mark = SaveMark.of(observed.manifest.metadata) if observed.manifest is not None else None
            if mark is not None and mark.save_id == path.rpartition("/")[2]:
                found.append((mark, observed))
        return sorted(found, key=lambda pair: pair[0], reverse=True)

    def files(self, found: Observed) -> frozenset[str]:
        """Names of the files that a save consists of, by its metadata.

        Raises:
            CorruptionError, FormatError: The document is damaged, too long, or no checkpoint's metadata.
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

    def waited_for(self, directory: str) -> set[str]:
        """Names of the files of all announced saves of a directory. Raises as `files` does."""
        return set().union(*(self.files(found) for _, found in self.find(directory)))

    def forget(self, found: Observed) -> None:
        """Take back what was announced, because it is published or superseded."""
        with suppress(ConflictError, NotFoundError):  # somebody else did
            bury(self._store, found)
