"""``tierfs checkpoint export`` and ``import``: convert checkpoints to and from other formats."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import BinaryIO, cast

from tierfs.checkpoint.export import safetensors_pieces, state_of, write_dcp, write_state
from tierfs.checkpoint.import_ import ImportPart, PartResult, import_checkpoint, import_file, import_part
from tierfs.cli.arguments import open_executor
from tierfs.cli.files.places import LocalPlace, StorePlace, any_place, source_of, store_place
from tierfs.cli.files.targets import clash, refuse_below_file
from tierfs.cli.terminal.output import print_result, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.dcp.checkpoint import Checkpoint, open_checkpoint
from tierfs.dcp.columns import BytesPlace
from tierfs.dcp.torch_format.streams import SaveStream
from tierfs.errors import AlreadyExistsError, InvalidInputError, without_passwords
from tierfs.format.checkpoint import ROOT
from tierfs.format.keys import inside
from tierfs.localfile import naming, replacing
from tierfs.store import Writer, kind_of, load
from tierfs.units import format_bytes

_BY_ENDING = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
_OF_A_CHECKPOINT = re.compile(r"\.metadata|__[0-9]+\.metadata|.+\.distcp")


def export(arguments: argparse.Namespace) -> int:
    format_ = arguments.format or _BY_ENDING.get(os.path.splitext(arguments.other)[1].lower(), "dcp")
    source = source_of(arguments.url)
    checkpoint = open_checkpoint(source.store, source.path, rank=arguments.rank)
    target = any_place(arguments.other, write=True)
    _refuse_taken(target, format_, force=arguments.force)
    with Progress("export", total_bytes=checkpoint.length, wanted=arguments.progress) as progress:
        if format_ == "safetensors":
            pieces = safetensors_pieces(checkpoint, skip_objects=arguments.skip_objects, progress=progress.advance)
            target.check_file()
            target.fill(pieces)
        elif format_ == "torch":
            state = state_of(checkpoint, skip_objects=arguments.skip_objects, progress=progress.advance)
            with _stream_to(target) as stream:
                write_state(state, stream)
        else:
            with _new_directory(target.url) as directory:
                write_dcp(checkpoint, directory, skip_objects=arguments.skip_objects, progress=progress.advance)
    skipped = checkpoint.objects if arguments.skip_objects else {}
    named = {"url": source.url, "target": target.url, "format": format_}
    return _report(arguments, "exported", checkpoint, skipped, named)


def import_(arguments: argparse.Namespace) -> int:
    place = store_place(arguments.other, write=True)
    kind = place.kind()
    if kind == "file":
        raise clash(place.url, kind)
    if kind is None:
        refuse_below_file(place)
    if not arguments.force and kind_of(place.store, inside(place.path, ROOT)) is not None:
        raise AlreadyExistsError(
            f"{place.url} holds a checkpoint: name another directory, or add --force to replace it", path=place.url
        )
    with (
        open_executor(arguments.executor) as (executor, _),
        Progress("import", wanted=arguments.progress) as progress,
    ):
        if os.path.isfile(arguments.url):
            _refuse_executor(arguments)
            import_file(arguments.url, place.url, where=arguments.url, overwrite=arguments.force)
        else:
            source = source_of(arguments.url)
            if kind_of(source.store, source.path) == "file":
                _refuse_executor(arguments)
                content = load(source.store, source.path)
                import_file(content, place.url, where=source.url, overwrite=arguments.force)
            else:
                found = open_checkpoint(source.store, source.path, rank=arguments.rank)
                progress.expect(found.length)
                import_checkpoint(
                    found,
                    place.url,
                    overwrite=arguments.force,
                    progress=progress.advance,
                    run_parts=None if executor is None else partial(_run_parts, arguments, place.url, executor),
                )
    made = open_checkpoint(place.store, place.path)
    return _report(arguments, "imported", made, {}, {"source": without_passwords(arguments.url), "url": place.url})


def _run_parts(
    arguments: argparse.Namespace, url: str, executor: Executor, parts: Sequence[ImportPart]
) -> Iterator[PartResult]:
    """Import parts on the executor that ``--executor`` names."""
    run = partial(run_import_part, arguments.url, arguments.rank, url, overwrite=arguments.force)
    futures = [executor.submit(run, part) for part in parts]
    try:
        for future in futures:
            yield future.result()
    finally:
        for future in futures:
            future.cancel()


def run_import_part(source: str, rank: int | None, url: str, part: ImportPart, *, overwrite: bool) -> PartResult:
    """Import one part of the checkpoint at ``source`` in another process: see `import_part`."""
    place = source_of(source)
    return import_part(open_checkpoint(place.store, place.path, rank=rank), url, part, overwrite=overwrite)


def _refuse_executor(arguments: argparse.Namespace) -> None:
    if arguments.executor is not None:
        raise InvalidInputError(f"{arguments.url} is one file, and one process imports it: omit --executor")


def _report(
    arguments: argparse.Namespace,
    done: str,
    checkpoint: Checkpoint,
    skipped: Mapping[str, BytesPlace],
    named: dict[str, str],
) -> int:
    tensors, objects = len(checkpoint.tensors), len(checkpoint.objects) - len(skipped)
    length = checkpoint.length - sum(place.length for place in skipped.values())
    goal = named.get("target", named["url"])
    counted = f"{tensors} tensor{'s' * (tensors != 1)} and {objects} object{'s' * (objects != 1)}"
    document = {**named, "tensors": tensors, "objects": objects, "bytes": length}
    return print_result(arguments, document, f"{done} {counted}, {format_bytes(length)}, to {printable(goal)}")


# -- the target of an export -------------------------------------------------------------------------------------------


def _refuse_taken(target: LocalPlace | StorePlace, format_: str, *, force: bool) -> None:
    """Check that the target is free, or that ``force`` is set and the target can be replaced.

    Raises:
        AlreadyExistsError: Something is there that must not be replaced.
        InvalidInputError: The target cannot hold the format.
    """
    if format_ == "dcp" and isinstance(target, StorePlace):
        raise InvalidInputError(
            f"{target.url} is in a store, but the dcp format needs a local directory: export to one, then copy it with `tierfs cp -r`",
            path=target.url,
        )
    kind = target.kind()
    if kind is None:
        refuse_below_file(target)
        return
    wanted = "directory" if format_ == "dcp" else "file"
    if kind != wanted:
        raise AlreadyExistsError(
            f"{target.url} is a {kind}, but {format_} writes a {wanted}: choose another name", path=target.url
        )
    if not force:
        raise AlreadyExistsError(f"{target.url} already exists: choose another name, or add --force", path=target.url)
    if kind == "directory":
        _refuse_others_files(target.url)


def _refuse_others_files(directory: str) -> None:
    others = [name for name in os.listdir(directory) if not _OF_A_CHECKPOINT.fullmatch(name)]
    if others:
        raise AlreadyExistsError(
            f"{directory} was not replaced: it holds {min(others)!r}, which is not part of a checkpoint; choose another name",
            path=directory,
        )


@contextlib.contextmanager
def _stream_to(target: LocalPlace | StorePlace) -> Iterator[BinaryIO]:
    """Open a new file for writing. It gets its name when it is complete."""
    if isinstance(target, LocalPlace):
        with replacing(target.url) as file:
            yield file
        return
    target.check_file()
    with SaveStream(Writer(target.store, target.path)) as stream:
        yield cast("BinaryIO", stream)


@contextlib.contextmanager
def _new_directory(path: str) -> Iterator[str]:
    """Create a directory to fill. It gets its name, and replaces the directory of that name, when it is complete."""
    target = os.path.realpath(path)
    above = os.path.dirname(target)
    os.makedirs(above, exist_ok=True)
    temporary = os.path.join(above, f".tierfs-export-{secrets.token_hex(8)}")
    os.mkdir(temporary)
    try:
        with naming(path):
            yield temporary
        if os.path.isdir(target):
            _refuse_others_files(target)  # again: files may have appeared since the export began
            _replace(target, temporary)
        else:
            os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _replace(directory: str, new: str) -> None:
    """Give a directory's name to a new one, and remove the old one. If a rename fails, the old one keeps its name."""
    aside = f"{new}-replaced"
    os.rename(directory, aside)
    try:
        os.rename(new, directory)
    except BaseException:
        os.rename(aside, directory)
        raise
    shutil.rmtree(aside)
