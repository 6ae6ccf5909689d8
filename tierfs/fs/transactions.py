"""fsspec's transactions: files are published when one ends, in the order in which they were opened."""

from __future__ import annotations

from typing import Any

from fsspec.transaction import Transaction

from tierfs.errors import AlreadyExistsError, InvalidInputError

__all__ = ["TierTransaction"]


class TierTransaction(Transaction):
    """Files written, not yet published. Several writes to one path publish only the last one.

    Each file is published whole, one after the other; where one cannot be, those after it are discarded.
    """

    fs: Any

    def check(self, path: str, mode: str) -> None:
        """Refuse what would need a file that this transaction has not published yet.

        Raises:
            AlreadyExistsError: An exclusive create of a file that is written already.
            InvalidInputError: An append to one.
        """
        if mode == "wb" or not any(file.path == path and file.pending for file in self.files):
            return
        if mode == "xb":
            raise AlreadyExistsError(f"{path} is written in this transaction already", path=path)
        raise InvalidInputError(f"{path} is written in this transaction: append to it after the transaction", path=path)

    def complete(self, commit: bool = True) -> None:
        """Publish the files, or discard them.

        Raises:
            InvalidInputError: A file was not closed; none is published.
            TierfsError: A file could not be published; those before it are.
        """
        unclosed = next((file.path for file in self.files if not file.closed), None)
        last = {file.path: file for file in self.files if file.pending}
        for file in self.files:
            if last.get(file.path) is not file:
                file.discard()
        fs = self.fs
        try:
            super().complete(commit=commit and unclosed is None)
        finally:  # which fsspec before 2026.9 leaves out where a file fails
            while self.files:
                self.files.popleft().discard()
            fs._intrans, fs._transaction, self.fs = False, None, None
        if commit and unclosed is not None:
            raise InvalidInputError(
                f"{unclosed} was not closed before the end of the transaction: nothing of it is published",
                path=unclosed,
            )
