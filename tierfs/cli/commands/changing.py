"""``tierfs cp``, ``mv`` and ``rm``: copy, move and delete files and directories."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from tierfs.checkpoint.step_logs import lengths_below, logs_of, remove_files
from tierfs.cli.arguments import PLACE, command, progress_option, suggested
from tierfs.cli.files.places import FilePlace, LocalPlace, StorePlace, any_place, kind_of, sent_bytes, store_place
from tierfs.cli.files.targets import (
    SELECTION,
    TARGET,
    Selection,
    clash,
    final_place,
    places_of,
    refuse_below_file,
    refuse_foreign_files,
    remove_directories,
    sources_of,
    target_of,
)
from tierfs.cli.files.transfer import FileContent, Stopped, fill_stream, read_stream, run_in_parallel
from tierfs.cli.terminal.output import counted, print_result, printable
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import CorruptionError, InvalidInputError, NotFoundError
from tierfs.format.checkpoint import ROOT
from tierfs.store import Entry, Store, copy, find, make_directory, rename
from tierfs.store.tree.kind import Kind

_STREAM = "-"


@dataclass(slots=True)
class _CopyPlan:
    """All files and directories to copy. The plan is complete and checked before anything is copied."""

    files: list[tuple[FileContent, FilePlace]] = field(default_factory=list)
    directories: list[FilePlace] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)  # of each target, with that of its source
    store: Store | None = None  # of the target

    @property
    def total_bytes(self) -> int | None:
        """Bytes to copy, or None if unknown."""
        sizes = [content.size for content, _ in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def add(self, content: FileContent, source: FilePlace, place: FilePlace) -> None:
        """Add one file. Raise if another file already goes to the same place."""
        if place.url in self.urls:
            raise InvalidInputError(
                f"two sources have the same target {place.url}: copy them one by one", path=place.url
            )
        self.urls[place.url] = source.url
        place.check_file()
        self.files.append((content, place))


@command(
    "cp",
    "copy files into a store, out of it, within it or between stores",
    """
    tierfs cp model.safetensors tierfs::s3://bucket/run/
    tierfs cp -r tierfs::s3://bucket/run/step_1000 /data/step_1000
    tierfs cp -r tierfs::s3://bucket/run/step_1000 tierfs::s3://bucket/kept/
    tierfs cp -r /data/model tierfs::s3://bucket/model --exclude '*.tmp' --dry-run
    tierfs cp tierfs://NAME/config.json -      # to stdout; as SOURCE, - is stdin
    """,
    {"sources SOURCE+": "tierfs:: URL for a path in a store; everything else is a local path, - is stdin"},
    TARGET,
    {"-r --recursive": "copy directories, with everything in them"},
    SELECTION,
    progress_option,
)
def run_cp(arguments: argparse.Namespace) -> int:
    if arguments.target == _STREAM:
        return _copy_to_stdout(arguments)
    plan = _plan_from_stdin(arguments) if _STREAM in arguments.sources else _plan_copy(arguments)
    if arguments.dry_run:
        moves = [{"source": source, "target": target} for target, source in plan.urls.items()]
        document = {"files": len(plan.files), "bytes": plan.total_bytes, "dry_run": True, "would_copy": moves}
        lines = [f"would copy {printable(each['source'])} -> {printable(each['target'])}" for each in moves]
        total = f"would copy {counted(len(plan.files), plan.total_bytes or 0)}"
        return print_result(arguments, document, *lines, total)
    before = 0 if plan.store is None else sent_bytes(plan.store)
    with Progress("cp", total_bytes=plan.total_bytes, wanted=arguments.progress) as progress:

        def copy_one(item: tuple[FileContent, FilePlace], stop: threading.Event) -> None:
            _copy(*item, partial(_advance, progress, stop))

        for place in plan.directories:
            place.make_directory()
        run_in_parallel(copy_one, plan.files)
    new = None if plan.store is None else sent_bytes(plan.store) - before
    document = {"files": len(plan.files), "bytes": progress.bytes, "new_bytes": new}
    return print_result(arguments, document, f"copied {counted(len(plan.files), progress.bytes, new)}")


def _plan_copy(arguments: argparse.Namespace) -> _CopyPlan:
    sources = list(sources_of(arguments.sources))
    target = any_place(arguments.target, write=not arguments.dry_run, is_new=True)
    chosen = Selection(arguments.include, arguments.exclude)
    if isinstance(target, LocalPlace) and all(isinstance(source, LocalPlace) for source in sources):
        raise InvalidInputError("all of these are local paths: a path in a store starts with tierfs:: or tierfs://")
    target_kind, into = target_of(target, arguments)
    plan = _CopyPlan(store=target.store if isinstance(target, StorePlace) else None)
    for source in sources:
        kind = source.kind()
        if kind is None:
            raise source.missing()
        if kind == "directory" and not arguments.recursive:
            raise InvalidInputError(f"{source.url} is a directory: add -r to copy it", path=source.url)
        final = final_place(source, kind, target, target_kind, into=into, alone=len(sources) == 1)
        if kind == "file":
            if chosen.takes(source.name):
                plan.add(source.content(), source, final)
        else:
            _plan_copied_directory(plan, source, final, chosen)
    return plan


def _plan_copied_directory(plan: _CopyPlan, source: FilePlace, final: FilePlace, chosen: Selection) -> None:
    taken = final.taken() if isinstance(final, StorePlace) else {}  # a local filesystem refuses a clash by itself
    contents = [each for each in source.contents() if chosen.is_all or (each[1] is not None and chosen.takes(each[0]))]
    # The directories above a file are created with the file.
    implied = {relative.rpartition("/")[0] for relative, _ in contents}
    if not contents and chosen.is_all:
        plan.directories.append(final)
    for relative, content in contents:
        kind: Kind = "directory" if content is None else "file"
        place = final.child(relative)
        if (there := taken.get(relative, kind)) != kind:
            raise clash(place.url, there)
        if content is not None:
            plan.add(content, source.child(relative), place)
        elif relative not in implied:
            plan.directories.append(place)


def _check_streams(arguments: argparse.Namespace) -> None:
    if len(arguments.sources) > 1 or arguments.sources == [arguments.target] or arguments.dry_run:
        raise InvalidInputError("with - for stdin or stdout, give one SOURCE and one TARGET, and no --dry-run")


def _plan_from_stdin(arguments: argparse.Namespace) -> _CopyPlan:
    _check_streams(arguments)
    if sys.stdin is None:
        raise InvalidInputError("stdin is closed: there is nothing to copy")
    target = any_place(arguments.target, write=True)
    target_kind = target.kind()
    if arguments.target.endswith("/") or target_kind == "directory":
        raise InvalidInputError(f"{target.url} is a directory: name the file to write stdin to", path=target.url)
    if target_kind is None:
        refuse_below_file(target)
    target.check_file()
    store = target.store if isinstance(target, StorePlace) else None
    return _CopyPlan(
        [(FileContent(None, lambda: read_stream(cast("io.BufferedReader", sys.stdin.buffer))), target)], store=store
    )


def _copy_to_stdout(arguments: argparse.Namespace) -> int:
    _check_streams(arguments)
    if arguments.json:
        raise InvalidInputError("with - as TARGET, the file goes to stdout: omit --json")
    source = any_place(arguments.sources[0])
    kind = source.kind()
    if kind is None:
        raise source.missing()
    if kind == "directory":
        raise InvalidInputError(f"{source.url} is a directory: only a file can go to stdout", path=source.url)
    content = source.content()
    with Progress("cp", total_bytes=content.size, wanted=arguments.progress) as progress:
        fill_stream(sys.stdout.buffer, _counted(content, progress.advance))
    return 0


def _copy(content: FileContent, target: FilePlace, advance: Callable[[int], object]) -> None:
    """Copy one file. A copy within a store writes a manifest and no data."""
    if content.stored and isinstance(target, StorePlace) and content.stored[0] is target.store:
        advance(0)
        store, entry = content.stored
        # A checkpoint's metadata has to be that of the listed files. Of any other file, the newest version will do.
        manifest = entry.manifest if entry.path.endswith(ROOT) else None
        copy(store, entry.path, target.path, write_id=None if manifest is None else manifest.write_id)
        advance(content.size or 0)
    else:
        target.fill(_counted(content, advance), content.metadata)


def _counted(content: FileContent, advance: Callable[[int], object]) -> Iterator[memoryview]:
    """Yield the content, and call ``advance`` with the length of each piece after it is written."""
    for piece in content.pieces():
        yield piece
        advance(len(piece))


def _advance(progress: Progress, stop: threading.Event, count: int) -> None:
    if stop.is_set():
        raise Stopped
    progress.advance(count)


@command(
    "mv",
    "move or rename files and directories within a store; no data is copied",
    """
    tierfs mv tierfs::s3://bucket/run/step_1000 tierfs::s3://bucket/run/best
    tierfs mv s3://bucket/run/a.bin s3://bucket/run/b.bin s3://bucket/kept/
    tierfs mv -T /data/run/part /data/run/whole
    """,
    {"sources SOURCE+": f"{PLACE}; all in one store"},
    TARGET,
)
def run_mv(arguments: argparse.Namespace) -> int:
    sources = list(places_of(arguments.sources))
    target = store_place(arguments.target, is_new=True)
    # All is planned and checked before anything is renamed.
    renames, empty, old = _plan_move(sources, target, arguments)

    def move_one(paths: tuple[str, str], _stop: threading.Event) -> None:
        rename(target.store, *paths)

    with Progress("mv") as progress:
        for path in empty:
            make_directory(target.store, path, exist_ok=True)
        run_in_parallel(move_one, renames, progress)
        remove_directories(target.store, old)
    count = len(renames)
    return print_result(arguments, {"files": count}, f"moved {count} file{'s' * (count != 1)}")


def _plan_move(
    sources: list[StorePlace], target: StorePlace, arguments: argparse.Namespace
) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """Return the paths to rename, the empty directories to make, and the directories that are empty afterwards."""
    target_kind, into = target_of(target, arguments)
    renames, empty, old = list[tuple[str, str]](), list[str](), list[str]()
    for source in sources:
        if source.store is not target.store:
            raise InvalidInputError(
                f"{source.url} and {target.url} are in two stores, {source.store.url} and {target.store.url}: "
                "copy with `tierfs cp`, then remove with `tierfs rm`",
                path=source.url,
            )
        if not source.path:
            raise InvalidInputError(
                f"{source.url} is the root of a store: name files or directories in it", path=source.url
            )
        entry = source.entry()
        kind = kind_of(entry)
        final = final_place(source, kind, target, target_kind, into=into, alone=len(sources) == 1)
        assert isinstance(final, StorePlace)
        if entry.is_directory:
            entries, directories = _moved(source, final)
            renames += [(one.path, _renamed(one.path, source, final)) for one in entries if not one.is_directory]
            implied = {one.path.rpartition("/")[0] for one in entries}
            empty += [_renamed(path, source, final) for path in directories if path not in implied]
            old += directories
        else:
            refuse_foreign_files(source.store, [entry])
            if not final.path:
                raise InvalidInputError(f"{final.url} is the root of a store: name a file in it", path=final.url)
            renames.append((source.path, final.path))
    _refuse_twice([name for name, _ in renames], "would be moved twice")
    _refuse_twice([name for _, name in renames], "would be the target of two sources")
    return renames, empty, old


def _renamed(path: str, source: StorePlace, final: StorePlace) -> str:
    return final.child(source.relative(path)).path


def _moved(source: StorePlace, final: StorePlace) -> tuple[list[Entry], list[str]]:
    """Return what lies in a directory, and the paths of the directories in it and its own, if all can be moved."""
    entries = find(source.store, source.path, detail=False)
    refuse_foreign_files(source.store, [entry for entry in entries if not entry.is_directory])
    taken = final.taken()
    for entry in entries:
        relative, kind = source.relative(entry.path), kind_of(entry)
        if (there := taken.get(relative, kind)) != kind:
            raise clash(final.child(relative).url, there)
    return entries, [source.path, *(entry.path for entry in entries if entry.is_directory)]


def _refuse_twice(paths: list[str], problem: str) -> None:
    if len(set(paths)) < len(paths):
        first = next(path for index, path in enumerate(paths) if path in paths[:index])
        raise InvalidInputError(f"{first} {problem}: move them one by one", path=first)


@command(
    "rm",
    "delete files, and with -r directories; nothing is deleted before all arguments are checked",
    """
    tierfs rm tierfs::s3://bucket/run/a.bin
    tierfs rm -r s3://bucket/run/step_1000 s3://bucket/run/step_2000
    tierfs rm -r 's3://bucket/run/step_1*' --exclude '*.json' --dry-run
    """,
    {"urls URL+": f"{PLACE}; several may be given"},
    {"-r --recursive": "delete directories, with everything in them"},
    SELECTION,
)
def run_rm(arguments: argparse.Namespace) -> int:
    with contextlib.ExitStack() as opened:
        return _remove(arguments, opened)


def _remove(arguments: argparse.Namespace, opened: contextlib.ExitStack) -> int:
    chosen = Selection(arguments.include, arguments.exclude)
    files: dict[tuple[str, str], tuple[Store, int]] = {}
    directories: list[tuple[Store, list[str]]] = []
    for place in places_of(arguments.urls):
        logs = opened.enter_context(logs_of(place.store)) if arguments.recursive and chosen.is_all else []
        logged = {(log.url, path): (log, size) for log in logs for path, size in lengths_below(log, place.path).items()}
        files |= logged
        try:
            entry = place.entry()
        except NotFoundError:
            if not logged:
                raise
            continue
        except CorruptionError:
            # The record cannot be read, but it can be deleted.
            files[place.store.url, place.path] = place.store, 0
            continue
        if entry.is_directory and not arguments.recursive:
            raise InvalidInputError(f"{place.url} is a directory: add -r to delete it", path=place.url)
        below = find(place.store, place.path, detail=arguments.dry_run) if arguments.recursive else []

        def is_doomed(one: Entry, place: StorePlace = place) -> bool:
            return not one.is_directory and chosen.takes(place.relative(one.path) or place.name)

        doomed = list(filter(is_doomed, (entry, *below)))
        refuse_foreign_files(place.store, doomed)
        # Without a dry run, the lengths are known when the files are deleted.
        files.update({(place.store.url, one.path): (place.store, one.length) for one in doomed})
        # A file and a directory may have the same name. Where files stay, so do the directories.
        if chosen.is_all and (entry.is_directory or any(one.path != place.path for one in below)):
            directories.append((place.store, [place.path, *(one.path for one in below if one.is_directory)]))
    if arguments.dry_run:
        return _print_deleted(arguments, files)

    def delete_one(name: tuple[str, str], _stop: threading.Event) -> None:
        store, _ = files[name]
        files[name] = store, remove_files(store, [name[1]])

    with Progress("rm") as progress:
        run_in_parallel(delete_one, list(files), progress)
        for store, paths in directories:
            remove_directories(store, [path for path in paths if path])
    return _print_deleted(arguments, files)


def _print_deleted(arguments: argparse.Namespace, files: dict[tuple[str, str], tuple[Store, int]]) -> int:
    size, dry_run = sum(size for _, size in files.values()), arguments.dry_run
    paths = [store.where(path) for (_, path), (store, _) in files.items()] if dry_run else []
    document = {"files": len(files), "bytes": size, "dry_run": dry_run, "would_delete": paths}
    commands = ", ".join(suggested("gc", url) for url in {url: None for url, _ in files})
    frees = "" if dry_run or not files else f"; {commands} frees what nothing else needs"
    total = f"{'would delete' if dry_run else 'deleted'} {counted(len(files), size)}{frees}"
    return print_result(arguments, document, *(f"would delete {printable(path)}" for path in paths), total)
