"""``tierfs forget``: remove what this host keeps of a store."""

from __future__ import annotations

import argparse

from tierfs.cli.terminal.output import print_result, printable
from tierfs.errors import InvalidInputError, NotFoundError, TierfsError
from tierfs.host.host import state_directory
from tierfs.host.local_state import finish_removals, forget, local_stores
from tierfs.session.compose import local_store
from tierfs.units import format_bytes

HELP = "remove what this host keeps of a store: copies, nvme tier and state; the store itself stays"
EXAMPLES = """\
tierfs forget --gone
tierfs forget --gone --yes
tierfs forget tierfs::s3://bucket/old --yes"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", nargs="?", help="the root of a store, or its id")
    parser.add_argument("--gone", action="store_true", help="every store that is no longer in its local directory")
    parser.add_argument(
        "--state-dir", metavar="DIRECTORY", help="state directory of this host (default: TIERFS_STATE_DIR)"
    )
    parser.add_argument("--yes", action="store_true", help="remove it (default: show what would be removed)")


def run(arguments: argparse.Namespace) -> int:
    """Forget stores. Return the exit code of the first one that must stay."""
    if (arguments.url is None) != arguments.gone:
        raise InvalidInputError("name a store, or give --gone")
    state, code = state_directory(arguments.state_dir), 0
    if arguments.gone:
        stores = [store for store in local_stores(state) if store.is_gone]
    else:
        stores = [local_store(state, arguments.url)._replace(place=arguments.url)]
    if arguments.yes:
        finish_removals(state)
    would = "" if arguments.yes else "would be "
    lines, document = [], []
    for store in stores:
        size, problem = 0, None
        try:
            size = forget(state, store, dry_run=not arguments.yes)
            lines.append(f"{would}removed  {printable(store.place)}: {format_bytes(size)}")
        except TierfsError as error:
            if not arguments.gone:
                raise
            if isinstance(error, NotFoundError):
                continue  # another call removed it meanwhile
            problem, code = str(error), code or error.exit_code
            lines.append(f"kept  {printable(problem)}")
        document.append({"uuid": store.uuid, "place": store.place, "bytes": size, "problem": problem})
    if not arguments.yes and code == 0 and document:
        lines.append("nothing was removed: add --yes to remove it")
    if not document:
        lines.append("every store of this host is in its place: nothing to remove")
    return print_result(arguments, {"dry_run": not arguments.yes, "stores": document}, *lines, code=code)
