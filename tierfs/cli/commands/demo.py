"""``tierfs demo``: train, get killed in the middle of a save, resume, and prove that nothing was lost."""

from __future__ import annotations

import argparse
import shutil
import tempfile

from tierfs import __version__
from tierfs.cli.arguments import command, require_seconds, require_torch
from tierfs.cli.terminal.output import print_result
from tierfs.demo.story import Demo, DemoPlan, say
from tierfs.errors import InvalidInputError, NotFoundError, TierfsError, without_passwords
from tierfs.host.filesystems import make_private
from tierfs.host.host import state_directory
from tierfs.host.local_state import forget
from tierfs.host.rpc.client import stop_flusher
from tierfs.session.compose import local_store, open_tiers
from tierfs.units import parse_size

_STOP_S_MAX = 30.0
_PARAMETERS_MIN = 50_000
_PARAMETERS_MAX = 10_000_000_000


@command(
    "demo",
    "train a small GPT, kill it in the middle of a save, resume, and check that the losses are equal",
    """
    tierfs demo
    tierfs demo --keep --json
    tierfs demo --url tierfs::s3://bucket/demo --steps 200 --every 20 --params 100M
    """,
    {
        "--url URL": "where to save (default: a store in a temporary directory, removed at the end)",
        "--steps N:int=24": "steps of the uninterrupted run (default: %(default)s)",
        "--every N:int=6": "steps from one save to the next (default: %(default)s)",
        "--params N=10M": "size of the model, roughly (default: %(default)s)",
        "--keep": "leave the temporary directory, and print its path",
        "--timeout SECONDS:float=600": "seconds that a phase may take (default: %(default)g)",
    },
)
def run(arguments: argparse.Namespace) -> int:
    """Run the demo and print its report. Return 0 only if the resumed run equals the uninterrupted run.

    Raises:
        InvalidInputError: An option is invalid, or torch is not installed.
        ReadOnlyError, CapacityError, StoreError: The state directory cannot be used.
        AlreadyExistsError: The URL holds an earlier demo.
        CorruptionError: The killed save appears complete, no complete checkpoint is left, or a run did not resume from
            the newest one.
        TierfsError: A rank failed or timed out.
    """
    plan = _checked(arguments)
    make_private(state_directory())  # before a rank fails because of it, with a traceback
    directory = None if arguments.url else tempfile.mkdtemp(prefix="tierfs-demo-")
    url = arguments.url.rstrip("/") if arguments.url else f"tierfs::file://{directory}"
    try:
        report = Demo(url, plan).play()
    finally:
        if directory and not arguments.keep:
            _forget(f"file://{directory}")
            shutil.rmtree(directory, ignore_errors=True)
    print_result(arguments, report.as_document(), report.as_text())
    if arguments.url or arguments.keep:
        say(f"the checkpoints are below {without_passwords(url)}")
    return 0 if report.equal else 1


def _forget(url: str) -> None:
    """Remove what this host keeps of the temporary store: its copies in shared memory are as large as two saves."""
    try:
        state = state_directory()
        store = local_store(state, url)
        for tiers in open_tiers.values():
            tiers.close()
        stop_flusher(state / "stores" / store.uuid, __version__, timeout_s=_STOP_S_MAX)
        forget(state, store, dry_run=False)
    except NotFoundError:
        return  # it ended before it saved anything
    except (TierfsError, TimeoutError) as error:
        say(f"this host keeps a part of the demo: {error}; `tierfs forget --gone --yes` removes it")


def _checked(arguments: argparse.Namespace) -> DemoPlan:
    """Check the options. An error names the invalid one."""
    require_torch("the demo trains")
    if arguments.url and not (arguments.url.startswith("tierfs") and "://" in arguments.url):
        # DCP takes a string without "://" for a local path, "tierfs::/data" included.
        raise InvalidInputError(
            f"{arguments.url!r} is not a tierfs URL: for a directory, write tierfs::file:///absolute/path",
            path=arguments.url,
        )
    if arguments.url and "memory://" in arguments.url:
        raise InvalidInputError(
            "a memory:// store exists in one process only, but the demo runs several", path=arguments.url
        )
    parameters = parse_size(arguments.params)
    if not _PARAMETERS_MIN <= parameters <= _PARAMETERS_MAX:
        raise InvalidInputError(f"--params must be between {_PARAMETERS_MIN} and {_PARAMETERS_MAX}, not {parameters}")
    if arguments.every < 1:
        raise InvalidInputError(f"--every must be at least 1, not {arguments.every}")
    if arguments.steps < 2 * arguments.every:
        raise InvalidInputError(
            f"--steps must be at least twice --every, {2 * arguments.every}: one save to resume from, one to be killed"
        )
    require_seconds("--timeout", arguments.timeout, over_0=True, may_be_infinite=True)
    return DemoPlan(arguments.steps, arguments.every, parameters, arguments.timeout)
