"""``tierfs init``: create a store, or find the existing one."""

from __future__ import annotations

import argparse

from tierfs.cli.arguments import add_options, add_url_argument
from tierfs.cli.files.places import find_store
from tierfs.cli.terminal.output import align, print_result
from tierfs.cli.terminal.progress import Progress
from tierfs.errors import ReadOnlyError
from tierfs.session import init

HELP = "make a store at a URL, or find the existing one"
EXAMPLES = """\
tierfs init s3://bucket/run
tierfs init /data/checkpoints
tierfs init tierfs://NAME --digest blake3"""


_OPTIONS = {
    "--digest {xxh3-128,blake3}=xxh3-128": "digest that names contents (default: %(default)s); blake3 is for writers that are not trusted, and needs tierfs[fast]; cannot be changed later",
    "--lease SECONDS:int": "duration of a writer's lease (default: 60); cannot be changed later",
    "--grace SECONDS:int": "how long replaced or deleted bytes stay readable, and gc waits (default: an hour, or six leases); cannot be changed later",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_url_argument(parser)
    add_options(parser, _OPTIONS)


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
    document = {
        "url": store.url,
        "made": made,
        "uuid": descriptor.uuid,
        "digest": descriptor.digest_kind.label,
        "single_writer": descriptor.single_writer,
        "cannot_promise": descriptor.endpoint.missing,
        "host_local": descriptor.endpoint.host_local,
    }
    rows = [
        ("made" if made else "found", store.url),
        ("uuid", descriptor.uuid),
        ("digest", descriptor.digest_kind.label),
        ("endpoint lacks", ", ".join(descriptor.endpoint.missing) or "nothing"),
        ("writers", "one process at a time" if descriptor.single_writer else "any number"),
    ]
    if descriptor.endpoint.host_local:
        rows.append(("place", "this host: the store is lost with it"))
    return print_result(arguments, document, *align(rows))
