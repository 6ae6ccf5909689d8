"""The handle of a file that is open for reading."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import re
import sys
import threading
from typing import Any

from fsspec.core import PickleableTextIOWrapper

from tierfs.digest import BLOCK_BYTES
from tierfs.errors import InvalidInputError
from tierfs.format.checkpoint import ROOT
from tierfs.store import Reader

READ_AHEAD_BLOCKS = 4
SMALL_READ_BYTES_MAX = READ_AHEAD_BLOCKS * BLOCK_BYTES
CACHED_BLOCKS_MAX = 8
METADATA_HEAD = b'{"checksum":"'
SHARD_NAME = re.compile(r"rank-[0-9]+-[0-9a-f]+\.safetensors")


class ReadFile(io.BufferedReader):
    """A file at one version, open for reading. Large reads go straight into the caller's buffer.

    Attributes:
        size: Length of the file in bytes.
        blocksize: Needed by fsspec's ``blockcache::`` to set up its cache. Reads do not use that cache, because tierfs
            has its own.
    """

    blocksize = BLOCK_BYTES

    def __init__(self, fs: Any, path: str, reader: Reader, details: dict[str, Any]) -> None:
        super().__init__(_RawReader(path, reader), max(1, min(BLOCK_BYTES, reader.length)))
        self.fs = fs
        self.path = path
        self._reader = reader
        self.size = reader.length
        self.details = details

    @property
    def full_name(self) -> str:
        """The path with its protocol."""
        return str(self.fs.unstrip_protocol(self.path))

    def info(self) -> dict[str, Any]:
        """Return the result of ``fs.info`` when the file was opened."""
        return self.details

    @property
    def closed(self) -> bool:
        return super().closed

    @closed.setter
    def closed(self, value: bool) -> None:
        """Ignore the value. ``blockcache::`` assigns it after it has closed the handle."""

    def close(self) -> None:
        """Close the handle. A second call does nothing.

        Raises:
            InvalidInputError: An unpickling error is being handled, because other code took a file of `TierWriter` for
                a pickle. The message says how to load the checkpoint.
        """
        error = sys.exc_info()[1]
        is_misread = not self.closed and isinstance(error, pickle.UnpicklingError) and self._is_of_a_checkpoint()
        super().close()
        if is_misread:
            raise InvalidInputError(
                f"{self.path} is not a pickle: it belongs to a checkpoint in tierfs' own format, which torch.load and "
                "torch's own readers cannot read. Load the checkpoint's directory by dcp.load(state, "
                "storage_reader=tierfs.dcp.TierReader(URL)), or set TIERFS_DCP=1 and call dcp.load(state, "
                "checkpoint_id=URL). `tierfs checkpoint export` converts it to torch's formats",
                path=self.path,
            ) from error

    def _is_of_a_checkpoint(self) -> bool:
        """Whether `TierWriter` made this file."""
        name = self.path.rpartition("/")[2]
        if name.endswith(ROOT):
            return self._fetch_range(0, len(METADATA_HEAD)) == METADATA_HEAD
        return SHARD_NAME.fullmatch(name) is not None

    def _fetch_range(self, start: int, end: int) -> bytes:
        out = bytearray(max(0, min(end, self.size) - start))
        self._reader.read_into(start, memoryview(out))
        return bytes(out)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reopen the file at the same position when unpickled. The version may be a newer one then."""
        return _reopen, (self.fs, self.path, self.tell())


def _reopen(fs: Any, path: str, position: int) -> Any:
    file = fs.open(path, "rb")
    file.seek(position)
    return file


def _reduce_text(file: Any) -> Any:
    """Pickle a handle that fsspec opened in text mode. `ReadFile` does the same for a binary one."""
    if not isinstance(file.buffer, ReadFile):
        return file.__reduce__()
    return _reopen_text, (file.args, file.tell())


def _reopen_text(args: Any, position: int) -> Any:
    file = PickleableTextIOWrapper(*args)
    file.seek(position)
    return file


# fsspec's own reduction loses text that was read ahead. From Python 3.12 on, pickle uses that of io.TextIOWrapper
# instead.
copyreg.pickle(PickleableTextIOWrapper, _reduce_text)


class _RawReader(io.RawIOBase):
    """Unbuffered reads. Small reads go through a few cached blocks, with read-ahead if they are sequential.

    The cached blocks lie in one buffer that is reused as a ring, because the first touch of new memory is slow.
    """

    mode = "rb"

    def __init__(self, path: str, reader: Reader) -> None:
        self.name = path
        self._reader = reader
        self._at = 0
        self._next = 0
        self._kept = memoryview(b"")
        self._slots: dict[int, int] = {}  # by the number of a block, its slot in `_kept`
        self._free_slot = 0
        self._lock = threading.Lock()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        raise io.UnsupportedOperation(
            f"{self.name} has no descriptor to read from: use read(), or copy the file with fs.get(path, local) and open that"
        )

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._reader.length}
        if whence not in base:
            raise ValueError(f"whence must be 0, 1 or 2, not {whence}")
        target = base[whence] + offset
        if target < 0:
            raise ValueError(f"cannot seek to {target}, before the start of the file")
        self._at = target
        return target

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        count = max(0, min(len(out), self._reader.length - self._at))
        if count > SMALL_READ_BYTES_MAX:
            self._reader.read_into(self._at, out[:count])
        elif count:
            with self._lock:
                self._read_small(out[:count])
        self._at += count
        return count

    def readall(self) -> bytes:
        out = bytearray(max(0, self._reader.length - self._at))
        self._reader.read_into(self._at, memoryview(out))
        self._at += len(out)
        return bytes(out)

    def _read_small(self, out: memoryview) -> None:
        last = (self._at + len(out) - 1) // BLOCK_BYTES
        done = 0
        while done < len(out):
            index, start = divmod(self._at + done, BLOCK_BYTES)
            if index not in self._slots:
                self._keep(index, last)
            begin = self._slots[index] * BLOCK_BYTES
            count = min(BLOCK_BYTES - start, len(out) - done)
            out[done : done + count] = self._kept[begin + start : begin + start + count]
            done += count

    def _keep(self, index: int, last: int) -> None:
        """Fetch blocks from ``index`` to ``last``, at most `READ_AHEAD_BLOCKS`; read ahead if reads are sequential."""
        blocks = -(-self._reader.length // BLOCK_BYTES)
        if not self._kept:
            self._kept = memoryview(bytearray(min(CACHED_BLOCKS_MAX, blocks) * BLOCK_BYTES))
        ahead = READ_AHEAD_BLOCKS if index == self._next and index else 1
        count = min(max(ahead, last - index + 1), READ_AHEAD_BLOCKS, blocks - index)
        if (self._free_slot + count) * BLOCK_BYTES > len(self._kept):
            self._free_slot = 0
        taken = range(self._free_slot, self._free_slot + count)
        self._slots = {block: slot for block, slot in self._slots.items() if slot not in taken}
        begin = index * BLOCK_BYTES
        length = min(count * BLOCK_BYTES, self._reader.length - begin)
        self._reader.read_into(begin, self._kept[taken.start * BLOCK_BYTES :][:length])
        self._slots |= {index + number: slot for number, slot in enumerate(taken)}
        self._next, self._free_slot = index + count, taken.stop
