"""fsspec's transactions. The end of a transaction publishes its files in the order in which they were opened."""

from __future__ import annotations

from typing import Any

from fsspec.transaction import Transaction

from tierfs.errors import AlreadyExistsError, InvalidInputError


class TierTransaction(Transaction):
    """The files of a transaction, written and not published yet.

    Of several writes to a path, only the last is published. The files are published one after the other, each of them
    whole. If one fails, the files after it are discarded.
    """

    fs: Any

    def check(self, path: str, mode: str) -> None:
        """Refuse to open a file in a mode that depends on a file that this transaction has not published yet.

        Raises:
            AlreadyExistsError: The transaction has written the path already, and the mode is ``xb``.
            InvalidInputError: The transaction has written the path already, and the mode is ``ab``.
        """
        if mode == "wb" or not any(file.path == path and file.pending for file in self.files):
            return
        if mode == "xb":
            raise AlreadyExistsError(f"{path} was already written in this transaction", path=path)
        raise InvalidInputError(f"{path} is written in this transaction: append to it after the transaction", path=path)

    def complete(self, commit: bool = True) -> None:
        """Publish the files, or discard them.

        Raises:
            InvalidInputError: A file was not closed. No file is published.
            TierfsError: A file could not be published. The files before it are published.
        """
        unclosed = next((file.path for file in self.files if not file.closed), None)
        last = {file.path: file for file in self.files if file.pending}
        for file in self.files:
            if last.get(file.path) is not file:
                file.discard()
        fs = self.fs
        try:
            super().complete(commit=commit and unclosed is None)
        finally:  # fsspec before 2026.9 does not clean up if a file fails
            while self.files:
                self.files.popleft().discard()
            fs._intrans, fs._transaction, self.fs = False, None, None
        if commit and unclosed is not None:
            raise InvalidInputError(
                f"{unclosed} was not closed before the end of the transaction: none of its files is published",
                path=unclosed,
            )
