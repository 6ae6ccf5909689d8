"""``tierfs cp``: copy files and directories into a store, out of it, and between stores."""

from __future__ import annotations

import argparse
import io
import sys
import threading
from dataclasses import dataclass, field
from typing import cast

from tierfs.cli.files.parallel import Stopped, run_in_parallel
from tierfs.cli.files.places import LocalPlace, Place, StorePlace, any_place, sent_bytes
from tierfs.cli.files.selection import Selection, add_selection_arguments, sources_of
from tierfs.cli.files.targets import add_target_arguments, clash, final_place, refuse_below_file, target_of
from tierfs.cli.files.transfer import ContentSource, ContentTarget, StreamSource, StreamTarget, transfer
from tierfs.cli.terminal.output import counted, print_result, printable
from tierfs.cli.terminal.progress import Progress, add_progress_argument
from tierfs.errors import InvalidInputError
from tierfs.store import Store
from tierfs.store.tree.kind import Kind

HELP = "copy files into a store, out of it, within it or between stores"
EXAMPLES = """\
tierfs cp model.safetensors tierfs::s3://bucket/run/
tierfs cp -r tierfs::s3://bucket/run/step_1000 /data/step_1000
tierfs cp -r tierfs::s3://bucket/run/step_1000 tierfs::s3://bucket/kept/
tierfs cp -r /data/model tierfs::s3://bucket/model --exclude '*.tmp' --dry-run
tierfs cp tierfs://NAME/config.json -      # to stdout; as SOURCE, - is stdin"""

_STREAM = "-"


@dataclass(slots=True)
class _CopyPlan:
    """All files and directories to copy. The plan is complete and checked before anything is copied."""

    files: list[tuple[ContentSource, ContentTarget]] = field(default_factory=list)
    directories: list[Place] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)  # of each target, with that of its source
    store: Store | None = None  # of the target

    @property
    def total_bytes(self) -> int | None:
        """Bytes to copy, or None if unknown."""
        sizes = [source.size for source, _ in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def add(self, content: ContentSource, source: Place, place: Place) -> None:
        """Add one file. Raise if another file already goes to the same place."""
        if place.url in self.urls:
            raise InvalidInputError(
                f"two sources have the same target {place.url}: copy them one by one", path=place.url
            )
        self.urls[place.url] = source.url
        self.files.append((content, place.target()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(
        parser, described="tierfs:: URL for a path in a store; everything else is a local path, - is stdin"
    )
    parser.add_argument("-r", "--recursive", action="store_true", help="copy directories, with everything in them")
    add_selection_arguments(parser)
    add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    is_stream = _STREAM in (*arguments.sources, arguments.target)
    plan = _plan_stream(arguments) if is_stream else _plan(arguments)
    if arguments.dry_run:
        moves = [{"source": source, "target": target} for target, source in plan.urls.items()]
        document = {"files": len(plan.files), "bytes": plan.total_bytes, "dry_run": True, "would_copy": moves}
        lines = [f"would copy {printable(each['source'])} -> {printable(each['target'])}" for each in moves]
        total = f"would copy {counted(len(plan.files), plan.total_bytes or 0)}"
        return print_result(arguments, document, *lines, total)
    before = 0 if plan.store is None else sent_bytes(plan.store)
    with Progress("cp", total_bytes=plan.total_bytes, wanted=arguments.progress) as progress:

        def copy_one(item: tuple[ContentSource, ContentTarget], stop: threading.Event) -> None:
            def advance(count: int) -> None:
                if stop.is_set():
                    raise Stopped
                progress.advance(count)

            transfer(*item, advance)

        for place in plan.directories:
            place.make_directory()
        run_in_parallel(copy_one, plan.files)
    if arguments.target == _STREAM:
        return 0
    new = None if plan.store is None else sent_bytes(plan.store) - before
    document = {"files": len(plan.files), "bytes": progress.bytes, "new_bytes": new}
    return print_result(arguments, document, f"copied {counted(len(plan.files), progress.bytes, new)}")


def _plan(arguments: argparse.Namespace) -> _CopyPlan:
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
                plan.add(source.source(), source, final)
        else:
            _plan_directory(plan, source, final, chosen)
    return plan


def _plan_directory(plan: _CopyPlan, source: Place, final: Place, chosen: Selection) -> None:
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


def _plan_stream(arguments: argparse.Namespace) -> _CopyPlan:
    if len(arguments.sources) > 1 or arguments.sources == [arguments.target] or arguments.dry_run:
        raise InvalidInputError("with - for stdin or stdout, give one SOURCE and one TARGET, and no --dry-run")
    if arguments.target == _STREAM:
        if arguments.json:
            raise InvalidInputError("with - as TARGET, the file goes to stdout: omit --json")
        source = any_place(arguments.sources[0])
        kind = source.kind()
        if kind is None:
            raise source.missing()
        if kind == "directory":
            raise InvalidInputError(f"{source.url} is a directory: only a file can go to stdout", path=source.url)
        return _CopyPlan([(source.source(), StreamTarget(sys.stdout.buffer))])
    if sys.stdin is None:
        raise InvalidInputError("stdin is closed: there is nothing to copy")
    target = any_place(arguments.target, write=True)
    target_kind = target.kind()
    if arguments.target.endswith("/") or target_kind == "directory":
        raise InvalidInputError(f"{target.url} is a directory: name the file to write stdin to", path=target.url)
    if target_kind is None:
        refuse_below_file(target)
    store = target.store if isinstance(target, StorePlace) else None
    return _CopyPlan([(StreamSource(cast("io.BufferedReader", sys.stdin.buffer)), target.target())], store=store)
