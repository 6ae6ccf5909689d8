"""``tierfs cp``: copy files and directories into a store, out of it, and between stores."""

from __future__ import annotations

import argparse
import sys
import threading
from dataclasses import dataclass, field
from typing import cast

from tierfs.cli.files.parallel import Stopped, run_in_parallel
from tierfs.cli.files.places import LocalPlace, Place, StorePlace, any_place
from tierfs.cli.files.targets import add_target_arguments, clash, final_place, refuse_below_file, target_of
from tierfs.cli.files.transfer import ContentSource, ContentTarget, RawInput, StreamSource, StreamTarget, transfer
from tierfs.cli.terminal.output import add_json_argument, print_json
from tierfs.cli.terminal.progress import Progress, add_progress_argument
from tierfs.errors import InvalidInputError
from tierfs.store.tree.kind import Kind

HELP = "copy files into a store, out of it, within it or between stores"
EXAMPLES = """\
tierfs cp model.safetensors tierfs::s3://bucket/run/
tierfs cp -r tierfs::s3://bucket/run/step_1000 /data/step_1000
tierfs cp -r tierfs::s3://bucket/run/step_1000 tierfs::s3://bucket/kept/
tierfs cp tierfs://NAME/config.json -      # to stdout; as SOURCE, - is stdin"""

_STREAM = "-"


@dataclass(slots=True)
class _CopyPlan:
    """All files and directories to copy. The plan is complete and checked before anything is copied."""

    files: list[tuple[ContentSource, ContentTarget]] = field(default_factory=list)
    directories: list[Place] = field(default_factory=list)
    urls: set[str] = field(default_factory=set)

    @property
    def total_bytes(self) -> int | None:
        """Bytes to copy, or None if unknown."""
        sizes = [source.size for source, _ in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def add(self, source: ContentSource, place: Place) -> None:
        """Add one file. Raise if another file already goes to the same place."""
        if place.url in self.urls:
            raise InvalidInputError(
                f"two sources have the same target {place.url}: copy them one by one", path=place.url
            )
        self.urls.add(place.url)
        self.files.append((source, place.target()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(
        parser, described="tierfs:: URL for a path in a store; everything else is a local path, - is stdin"
    )
    parser.add_argument("-r", "--recursive", action="store_true", help="copy directories, with everything in them")
    add_progress_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    plan = _plan_stream(arguments) if _STREAM in (*arguments.sources, arguments.target) else _plan(arguments)
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
    if arguments.json:
        print_json({"files": len(plan.files), "bytes": progress.bytes})
    return 0


def _plan(arguments: argparse.Namespace) -> _CopyPlan:
    sources = [any_place(text) for text in arguments.sources]
    target = any_place(arguments.target, write=True)
    if isinstance(target, LocalPlace) and all(isinstance(source, LocalPlace) for source in sources):
        raise InvalidInputError("all of these are local paths: a path in a store starts with tierfs:: or tierfs://")
    target_kind, into = target_of(target, arguments)
    plan = _CopyPlan()
    for source in sources:
        kind = source.kind()
        if kind is None:
            raise source.missing()
        if kind == "directory" and not arguments.recursive:
            raise InvalidInputError(f"{source.url} is a directory: add -r to copy it", path=source.url)
        final = final_place(source, kind, target, target_kind, into=into, alone=len(sources) == 1)
        if kind == "file":
            plan.add(source.source(), final)
        else:
            _plan_directory(plan, source, final)
    return plan


def _plan_directory(plan: _CopyPlan, source: Place, final: Place) -> None:
    taken = final.taken() if isinstance(final, StorePlace) else {}  # a local filesystem refuses a clash by itself
    contents = list(source.contents())
    # The directories above a file are created with the file.
    implied = {relative.rpartition("/")[0] for relative, _ in contents}
    if not contents:
        plan.directories.append(final)
    for relative, content in contents:
        kind: Kind = "directory" if content is None else "file"
        place = final.child(relative)
        if (there := taken.get(relative, kind)) != kind:
            raise clash(place.url, there)
        if content is not None:
            plan.add(content, place)
        elif relative not in implied:
            plan.directories.append(place)


def _plan_stream(arguments: argparse.Namespace) -> _CopyPlan:
    if len(arguments.sources) > 1 or arguments.sources == [arguments.target]:
        raise InvalidInputError("with - for stdin or stdout, give one SOURCE and one TARGET")
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
    return _CopyPlan([(StreamSource(cast("RawInput", sys.stdin.buffer)), target.target())])
