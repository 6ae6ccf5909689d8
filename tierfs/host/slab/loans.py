"""Loans: slots that one process filled, and another makes a file of.

The lender makes a file in the host's folder of segments, ``<its id>-<number>.loan``, which names the segments concerned. Who
borrows holds that file locked, shared, for as long as it relies on the slots. Who wants to free them ends the loan
first: it locks the file exclusively and removes it. So nothing is freed under a borrower, be the lender dead or alive,
and one that comes too late finds no loan. A borrower that dies holds no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tierfs.errors import NotFoundError, StoreError
from tierfs.host.slab.segment_file import OwnedFd

__all__ = ["BorrowedLoan", "Loans"]

_NAME = re.compile(r"([0-9a-f]{16})-[0-9a-f]{8}\.loan")
_OFFERED, _TAKEN = b"-", b"+"


class Loans:
    """The loans of a host. Safe for use by many threads and processes.

    Args:
        directory: The host's folder of segments.

    Attributes:
        directory: As given.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __repr__(self) -> str:
        return f"Loans({str(self.directory)!r})"

    def lend(self, owner: str, segments: Iterable[str]) -> Path:
        """Offer slots in segments to another process.

        Args:
            owner: The id of this process.
            segments: Their ids, 32 hex digits each.

        Returns:
            The loan's file, for `BorrowedLoan`. It stays until somebody ends the loan.

        Raises:
            StoreError: The file cannot be made.
        """
        path = self.directory / f"{owner}-{secrets.token_hex(4)}.loan"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"{path} cannot be made: {error.strerror}", path=str(path), tier="ram") from error
        OwnedFd(fd).write(_OFFERED + "\n".join(segments).encode())
        return path

    def end(self, path: Path, *, only_taken: bool = False) -> bool:
        """End a loan, unless somebody has it.

        Args:
            path: Its file.
            only_taken: Leave one that nobody has had yet.

        Returns:
            Whether it is over: nobody has it, and nobody will.
        """
        with _locked(path) as fd:
            if fd is None:
                return not path.exists()
            if only_taken and os.pread(fd, 1, 0) != _TAKEN:
                return False
            path.unlink(missing_ok=True)
        return True

    def end_all(self, segment: str) -> bool:
        """End all loans of slots in this segment, whose owner is gone. Returns whether nobody has one."""
        named = [path for path, _ in self._files() if segment in _segments_of(path)]
        return all(self.end(path) for path in named)

    def sweep(self, is_alive: Callable[[str], bool]) -> None:
        """End those that dead lenders left and nobody has."""
        for path, owner in self._files():
            if not is_alive(owner):
                self.end(path)

    def _files(self) -> Iterator[tuple[Path, str]]:
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.directory):
                match = _NAME.fullmatch(name)
                if match:
                    yield self.directory / name, match[1]


class BorrowedLoan:
    """A loan that this process has, until it lets go of it or dies.

    Args:
        path: Its file.

    Raises:
        NotFoundError: It is over.
        StoreError: It cannot be had.
    """

    def __init__(self, path: Path) -> None:
        gone = NotFoundError(f"{path.name}: what was lent was taken back", path=str(path), tier="ram")
        try:
            self._fd: OwnedFd | None = OwnedFd(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC))
        except FileNotFoundError:
            raise gone from None
        except OSError as error:
            raise StoreError(f"{path} cannot be opened: {error.strerror}", path=str(path), tier="ram") from error
        fcntl.flock(self._fd.number, fcntl.LOCK_SH)
        if not os.fstat(self._fd.number).st_nlink:
            raise gone
        self._fd.write(_TAKEN)

    def release(self) -> None:
        """Let go of it. May be called twice."""
        fd, self._fd = self._fd, None
        if fd is not None:
            # Closing is not enough where a forked child has the open file, too.
            fcntl.flock(fd.number, fcntl.LOCK_UN)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """The file, locked exclusively; None where it is gone or somebody has it."""
    try:
        fd = OwnedFd(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
        fcntl.flock(fd.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (FileNotFoundError, BlockingIOError):
        yield None
    else:
        yield fd.number


def _segments_of(path: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="ascii")[len(_OFFERED) :].split("\n")
    return []
