"""``tierfs mv``: move files and directories within a store. Manifests move, data does not."""

from __future__ import annotations

import argparse
import threading
from dataclasses import dataclass, field

from tierfs.cli.arguments import PLACE
from tierfs.cli.files.parallel import run_in_parallel
from tierfs.cli.files.places import StorePlace, kind_of, store_place
from tierfs.cli.files.selection import places_of
from tierfs.cli.files.targets import (
    add_target_arguments,
    clash,
    final_place,
    refuse_foreign_files,
    remove_directories,
    target_of,
)
from tierfs.cli.terminal.output import print_result
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import InvalidInputError
from tierfs.store import find, make_directory, rename

HELP = "move or rename files and directories within a store; no data is copied"
EXAMPLES = """\
tierfs mv tierfs::s3://bucket/run/step_1000 tierfs::s3://bucket/run/best
tierfs mv s3://bucket/run/a.bin s3://bucket/run/b.bin s3://bucket/kept/
tierfs mv -T /data/run/part /data/run/whole"""


@dataclass(slots=True)
class _RenamePlan:
    """All renames within a store. The plan is complete and checked before anything is renamed."""

    renames: list[tuple[str, str]] = field(default_factory=list)
    empty_directories: list[str] = field(default_factory=list)
    old_directories: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser, described=f"{PLACE}; all in one store")


def run(arguments: argparse.Namespace) -> int:
    sources = list(places_of(arguments.sources))
    target = store_place(arguments.target, is_new=True)
    plan = _plan(sources, target, arguments)

    def move_one(paths: tuple[str, str], _stop: threading.Event) -> None:
        rename(target.store, *paths)

    with Progress("mv") as progress:
        for path in plan.empty_directories:
            make_directory(target.store, path, exist_ok=True)
        run_in_parallel(move_one, plan.renames, progress)
        remove_directories(target.store, plan.old_directories)
    count = len(plan.renames)
    return print_result(arguments, {"files": count}, f"moved {count} file{'s' * (count != 1)}")


def _plan(sources: list[StorePlace], target: StorePlace, arguments: argparse.Namespace) -> _RenamePlan:
    target_kind, into = target_of(target, arguments)
    plan = _RenamePlan()
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
            _plan_directory(plan, source, final)
        else:
            refuse_foreign_files(source.store, [entry])
            if not final.path:
                raise InvalidInputError(f"{final.url} is the root of a store: name a file in it", path=final.url)
            plan.renames.append((source.path, final.path))
    _refuse_twice([name for name, _ in plan.renames], "would be moved twice")
    _refuse_twice([name for _, name in plan.renames], "would be the target of two sources")
    return plan


def _plan_directory(plan: _RenamePlan, source: StorePlace, final: StorePlace) -> None:
    entries = find(source.store, source.path, detail=False)
    files = [entry for entry in entries if not entry.is_directory]
    directories = [source.path, *(entry.path for entry in entries if entry.is_directory)]
    refuse_foreign_files(source.store, files)
    taken = final.taken()
    for entry in entries:
        relative, kind = source.relative(entry.path), kind_of(entry)
        if (there := taken.get(relative, kind)) != kind:
            raise clash(final.child(relative).url, there)
    implied = {entry.path.rpartition("/")[0] for entry in entries}
    plan.renames += [(entry.path, final.child(source.relative(entry.path)).path) for entry in files]
    plan.empty_directories += [final.child(source.relative(path)).path for path in directories if path not in implied]
    plan.old_directories += directories


def _refuse_twice(paths: list[str], problem: str) -> None:
    if len(set(paths)) < len(paths):
        first = next(path for index, path in enumerate(paths) if path in paths[:index])
        raise InvalidInputError(f"{first} {problem}: move them one by one", path=first)
