"""``tierfs init``: create a store, or find the existing one."""

from __future__ import annotations

import argparse

from tierfs.cli.arguments import add_url_argument
from tierfs.cli.files.places import find_store
from tierfs.cli.terminal.output import add_json_argument, align, print_json
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import ReadOnlyError
from tierfs.session import init

HELP = "make a store at a URL, or find the existing one"
EXAMPLES = """\
tierfs init s3://bucket/run
tierfs init /data/checkpoints
tierfs init tierfs://NAME --digest blake3"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    parser.add_argument(
        "--digest",
        choices=("xxh3-128", "blake3"),
        default="xxh3-128",
        help="digest that names contents (default: %(default)s); blake3 is for writers that are not trusted, and needs tierfs[fast]; cannot be changed later",
    )
    parser.add_argument(
        "--lease",
        type=int,
        metavar="SECONDS",
        help="duration of a writer's lease (default: 60); cannot be changed later",
    )
    parser.add_argument(
        "--grace",
        type=int,
        metavar="SECONDS",
        help="how long replaced or deleted bytes stay readable, and gc waits (default: an hour, or six leases); cannot be changed later",
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        found = find_store(arguments.url)
    except ReadOnlyError:
        # The search looked above the URL and was refused. The store may still be created at the URL itself.
        found = None
    with Progress("init"):
        store = init(arguments.url, digest=arguments.digest, lease_s=arguments.lease, grace_s=arguments.grace)
    descriptor = store.descriptor
    made = found is None
    if arguments.json:
        print_json(
            {
                "url": store.url,
                "made": made,
                "uuid": descriptor.uuid,
                "digest": descriptor.digest_kind.label,
                "single_writer": descriptor.single_writer,
                "cannot_promise": descriptor.endpoint.missing,
                "host_local": descriptor.endpoint.host_local,
            }
        )
        return 0
    rows = [
        ("made" if made else "found", store.url),
        ("uuid", descriptor.uuid),
        ("digest", descriptor.digest_kind.label),
        ("endpoint lacks", ", ".join(descriptor.endpoint.missing) or "nothing"),
        ("writers", "one process at a time" if descriptor.single_writer else "any number"),
    ]
    if descriptor.endpoint.host_local:
        rows.append(("place", "this host: the store is lost with it"))
    print("\n".join(align(rows)))
    return 0
