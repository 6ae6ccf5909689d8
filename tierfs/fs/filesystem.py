"""`TierFileSystem`: the fsspec interface of stores.

The core is synchronous; every asynchronous method runs it on a bounded set of threads. The class inherits from three
classes in a chain, each in its own file: `PathSpace`, `Reading`, `Changing`. This file opens and writes files, and has
the methods without a counterpart in fsspec: levels of written files, and moving files between tiers.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.compression import compr
from fsspec.core import get_compression

from tierfs import store as verbs
from tierfs.digest import BLOCK_BYTES
from tierfs.errors import AlreadyExistsError, InvalidInputError
from tierfs.fs.changing import Changing
from tierfs.fs.paths import is_hint, run_in_thread
from tierfs.fs.readfile import ReadFile
from tierfs.fs.reading import describe
from tierfs.fs.writefile import WriteFile
from tierfs.host.pending.levels import Level
from tierfs.session.settings import spans_hosts
from tierfs.session.url import TRUE
from tierfs.store import Store, WriteMode, Writer


class TextFile(io.TextIOWrapper):
    """A handle in text mode. After an exception in ``with``, or if dropped unclosed, it publishes nothing."""

    def __init__(self, buffer: Any, **text: Any) -> None:
        super().__init__(buffer, **text)  # `WriteFile.seekable` looks for this frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self.closed and isinstance(self.buffer, WriteFile | CompressedFile):
            self.buffer.give_up(error)
        self.close()

    def __del__(self) -> None:
        try:
            if self.closed:
                return
        except ValueError:
            return  # the arguments were invalid, so __init__ did not finish
        try:
            if isinstance(self.buffer, WriteFile | CompressedFile):
                self.buffer.drop()
        finally:
            self.close()


class CompressedFile(io.BufferedIOBase):
    """A handle behind a compressor. ``close`` also closes the handle below, which compressors leave open."""

    def __init__(self, compressor: Callable[..., Any], inner: ReadFile | WriteFile, mode: str) -> None:
        self._outer = compressor(inner, mode=mode)
        self._inner = inner
        self.path = inner.path

    @property
    def name(self) -> str:
        return self.path

    def readable(self) -> bool:
        return self._inner.readable()

    def writable(self) -> bool:
        return self._inner.writable()

    def seekable(self) -> bool:
        return bool(self._outer.seekable())

    def read(self, size: int | None = -1) -> bytes:
        return bytes(self._outer.read(-1 if size is None else size))

    def read1(self, size: int = -1) -> bytes:
        """Read and decompress ``size`` bytes, or up to one block if ``size`` is negative."""
        return self.read(size if size >= 0 else BLOCK_BYTES)

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        piece = self.read(len(out))
        out[: len(piece)] = piece
        return len(piece)

    def write(self, data: Any) -> int:
        self._outer.write(data)
        return memoryview(data).nbytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Seek in the decompressed bytes."""
        return int(self._outer.seek(offset, whence))

    def tell(self) -> int:
        """Return the position in the decompressed bytes."""
        return int(self._outer.tell())

    def close(self) -> None:
        """Close the compressor, then the handle below, which publishes unless the compressor failed."""
        if self.closed:
            return
        try:
            self._outer.close()
        except BaseException as error:
            self.give_up(error)
            raise
        finally:
            try:
                self._inner.close()
            finally:
                super().close()

    def give_up(self, error: BaseException) -> None:
        if isinstance(self._inner, WriteFile):
            self._inner.give_up(error)

    def drop(self) -> None:
        if isinstance(self._inner, WriteFile):
            self._inner.drop()

    def _dealloc_warn(self, source: Any) -> None:
        self.drop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self.closed:
            self.give_up(error)
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "path") and not self.closed:
            try:
                self.drop()
            finally:
                self.close()


_TEXT = ("encoding", "errors", "newline")
_STOCK_DCP = re.compile(r".*\.distcp|(__[0-9]+)?\.metadata(\.tmp)?")
"""Names of the files that torch's `FsspecWriter` writes."""


class TierFileSystem(Changing):
    """A filesystem over stores: ``tierfs::s3://bucket/run``, ``tierfs::file:///data/run``, ``tierfs://NAME/run``.

    Args:
        target_protocol: fsspec's name of the object tier's filesystem. ``None`` for named stores.
        target_options: Options of that filesystem.
        fo: Set by fsspec to the path in a chained URL. Used only by ``status()`` without a path, before any other call.
        create: Whether a write creates a store if it finds none. ``TIERFS_CREATE=1`` does the same.
        ack: The level at which a write is acknowledged: ``"staged"``, ``"local"``, ``"peer"`` or
            ``"object"``.
        ram: Budget of the ram tier, ``"8GiB"`` or ``"25%"``. ``"0"`` switches the tier off.
        nvme: Budget of the nvme tier, in the same form.
        state_dir: The state directory.
        timeout: Seconds that a write waits for room in the local tiers, and for its level.
        bandwidth: Most bytes per second that the flusher sends to the object tier. The process that starts the flusher
            decides.
        codecs: How chunks are encoded: ``"auto"`` (raw under pressure), ``"all"``, ``"off"``, or names of codecs,
            ``"zstd,plane"``. A running flusher takes the codecs of the newest write that gives some.
        device: Budget of GPU memory for each process that saves checkpoints with `TierWriter`. Off by default.
        asynchronous: As in fsspec.
        loop: As in fsspec.
        batch_size: As in fsspec.
        **options: Other options of fsspec; and ``peers``, ``peer_listen``, ``peer_domain``, ``peer_ram``,
            ``peer_nvme``, ``peer_bandwidth``, ``peer_hosts`` and ``peer_share``, see docs/reference/peers.md.

    Raises:
        InvalidInputError: An option or the object tier's filesystem is unknown.
    """

    async def _pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        await run_in_thread(self._write_now, path, [value], mode, **kwargs)

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a whole file on the calling thread. An event loop would cost as much time as writing a small file."""
        self._write_now(path, [value], mode, **kwargs)

    async def _put_file(
        self, lpath: str, rpath: str, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        await run_in_thread(self._put_now, lpath, rpath, callback, mode, **kwargs)

    def _put_now(self, lpath: str, rpath: str, callback: Any, mode: str, **kwargs: Any) -> None:
        if os.path.isdir(lpath):
            store, relative = self._locate(rpath, write=True)
            verbs.make_directory(store, relative, exist_ok=True)
            return
        with open(lpath, "rb", buffering=0) as file:
            callback.set_size(os.fstat(file.fileno()).st_size)
            self._write_now(rpath, _pieces(file, callback), mode, **kwargs)

    def _write_now(self, path: str, pieces: Iterable[Any], mode: str, **kwargs: Any) -> None:
        if mode not in ("overwrite", "create"):
            raise InvalidInputError(f"mode must be 'overwrite' or 'create', not {mode!r}")
        with self.open(path, "xb" if mode == "create" else "wb", **kwargs) as handle:
            for piece in pieces:
                handle.write(piece)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """Make an empty file, or empty an existing one. Without ``truncate``, only set its time to now."""
        with self.open(path, "wb" if truncate else "ab", **kwargs):
            pass

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Open a file. Modes: ``rb``, ``wb``, ``xb``, ``ab``, and the same in text.

        Args:
            path: A path or URL.
            mode: As for the builtin ``open``.
            block_size: Ignored; accepted as other filesystems do.
            cache_options: Ignored; accepted as other filesystems do. So are other options that tune reading, such as
                ``fill_cache``.
            compression: Name of an fsspec compression, or ``"infer"``.
            **kwargs: ``encoding``, ``errors``, ``newline`` in text mode. For writing, also ``metadata``, JSON values to
                keep with the file, and ``ack``, the level at which ``close`` returns.

        Raises:
            NotFoundError: The mode is ``rb`` and the file does not exist.
            AlreadyExistsError: The mode is ``xb`` and the path exists.
            IsADirectoryError: The path is a directory. In a bucket, a new file may have the name of a directory.
            InvalidInputError: The path is invalid, or the mode or an option is unsupported.
        """
        mode = _known(mode)
        # Some callers, such as tensorboard's writer, pass the defaults of the builtin in binary mode too.
        kwargs = {name: value for name, value in kwargs.items() if value is not None or name not in _TEXT}
        if "b" not in mode:
            text = {name: kwargs.pop(name) for name in _TEXT if name in kwargs}
            io.TextIOWrapper(io.BytesIO(), **text).close()  # refuses bad arguments before anything is opened
            return TextFile(self.open(path, f"{mode}b", compression=compression, **kwargs), **text)
        if compression is not None and (name := get_compression(self._strip(path), compression)) is not None:
            return CompressedFile(compr[name], self.open(path, mode, **kwargs), mode[0])
        return super().open(path, mode, **kwargs)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        ack: str | None = None,
        **kwargs: Any,
    ) -> ReadFile | WriteFile:
        unknown = sorted(name for name in kwargs if not is_hint(name))
        if unknown:
            raise InvalidInputError(f"unknown argument {unknown[0]!r} for open")
        level = None if ack is None else Level.parse(ack)
        if mode == "rb":
            reader, entry = self._reader(path)
            return ReadFile(self, path, reader, describe(path, entry))
        write_mode = WriteMode(mode)
        if not autocommit:
            self.transaction.check(path, mode)
        store, relative = self._locate(path, write=True)
        if not relative:
            raise IsADirectoryError(f"{path} is the root of a store")
        _check_stock_dcp(store, relative, store.ack if level is None else level)
        writer = Writer(store, relative, mode=write_mode, metadata=metadata, level=level)
        if writer.replaces is None and verbs.is_directory_nearby(store, relative):
            writer.abort()
            if write_mode is WriteMode.CREATE:
                raise AlreadyExistsError(f"{path} is a directory", path=path)
            raise IsADirectoryError(f"{path} is a directory")
        handle = WriteFile(self, path, writer, mode, autocommit=autocommit)
        self._written.add(handle)
        return handle

    def wait(self, path: str, level: str = "object", timeout: float | None = None) -> None:
        """Wait until everything that this host has written at or below ``path`` so far has reached a level.

        Args:
            path: A file or directory.
            level: ``"staged"``, ``"local"``, ``"peer"`` or ``"object"``.
            timeout: Seconds. ``None`` waits without limit.

        Raises:
            TimeoutError: The level was not reached in time. The message names the pending files.
            ConflictError: Another writer changed a path before this host's change was flushed. The other writer's
                version stands; this host's is kept as a conflict.
            TierfsError: The level cannot be reached, for the reason given.
        """
        store, relative = self._locate(path)
        verbs.wait(store, relative, Level.parse(level), timeout)

    def ack(self, path: str) -> str:
        """Return the level of the file at ``path``: ``"staged"``, ``"local"``, ``"peer"`` or ``"object"``.

        Raises:
            NotFoundError: The file does not exist.
        """
        return verbs.level_of(*self._locate(path)).label

    def prefetch(self, path: str, tier: str = "ram") -> int:
        """Copy a file, or all files below a directory, into a local tier. Return the number of bytes.

        In the nvme tier the copy stays until it is evicted. In the ram tier it lasts no longer than the process that
        holds it.

        Raises:
            InvalidInputError: The tier does not exist or is switched off.
            CapacityError: The files do not fit.
        """
        return verbs.prefetch(*self._locate(path), tier)

    def evict(self, path: str, tier: str = "nvme") -> int:
        """Drop clean copies of a file, or of all files below a directory, from a local tier. Return the bytes dropped.

        Raises:
            InvalidInputError: The tier does not exist or is switched off.
        """
        return verbs.evict(*self._locate(path), tier)

    def status(self, path: str = "") -> dict[str, Any]:
        """Return the tiers, queue, conflicts and errors of a store, as ``tierfs status --json`` prints them.

        Args:
            path: A path in the store. By default, the only store that this instance has used.
        """
        return verbs.status(self._locate(path)[0] if path else self._only_store())


def _check_stock_dcp(store: Store, path: str, level: Level) -> None:
    """Check that a file is not one that torch's own writer saves from several hosts below the object tier.

    That writer uses the same names for each save. If a host is lost before it has flushed its files, those of an
    earlier save complete the checkpoint.

    Raises:
        InvalidInputError: It is such a file.
    """
    name = path.rpartition("/")[2]
    if level < Level.OBJECT and store.tiers is not None and _STOCK_DCP.fullmatch(name) and spans_hosts():
        raise InvalidInputError(
            f"{store.where(path)}: torch's own checkpoint writer, on several hosts at ack={level.label!r}, can leave a "
            "mix of two saves if a host is lost. Set TIERFS_DCP=1 to use tierfs' writer, or give ack='object'",
            path=path,
        )


def _known(mode: str) -> str:
    """Check a mode and return it in normal order: ``r``, ``w``, ``x`` or ``a``, then ``b`` if it is binary."""
    kinds, rest = sorted(set(mode) & set("rwxa")), "".join(letter for letter in mode if letter not in "rwxa")
    if len(kinds) != 1 or len(mode) != 1 + len(rest) or rest not in {"", "b", "t"}:
        raise InvalidInputError(
            f"mode {mode!r} is not supported: files are read (rb, r), written whole (wb, xb, w, x) or appended to "
            "(ab, a)"
        )
    return kinds[0] + rest.replace("t", "")


def _pieces(file: Any, callback: Any) -> Iterable[memoryview]:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    while count := file.readinto(buffer):
        yield buffer[:count]
        callback.relative_update(count)


def _warn_if_torch_was_kept_from_asking() -> None:
    """Warn if torch, which calls tierfs at the end of its import, did not. ``TIERFS_DCP`` has no effect then."""
    asked = os.environ.get("TIERFS_DCP", "").lower() in TRUE
    if asked and "torch.distributed.checkpoint" in sys.modules and "tierfs.dcp.installing" not in sys.modules:
        logging.getLogger("tierfs.fs").warning(
            "TIERFS_DCP is set, but torch did not load tierfs when it was imported (TORCH_DEVICE_BACKEND_AUTOLOAD is "
            "%s): torch's distributed checkpoint uses its own writer and reader; call tierfs.dcp.install()",
            os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "not set"),
        )


_warn_if_torch_was_kept_from_asking()
