"""``tierfs doctor``: check this machine, and say what to change."""

from __future__ import annotations

import argparse

from tierfs.cli.arguments import require_url
from tierfs.cli.terminal.output import add_json_argument, align, print_json, printable

HELP = "check this machine, and the endpoint of URL if it is given, and advise what to change"
EXAMPLES = """\
tierfs doctor
tierfs doctor s3://bucket/run
tierfs doctor --json"""

PROBLEM_EXIT_CODE = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", nargs="?", help="also test this endpoint, as `tierfs probe` does")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks and print their results. Return 1 if one of them is a problem."""
    if arguments.url is not None:
        require_url(arguments.url)
    from tierfs.cli.commands._doctor_checks import check_endpoint, check_machine  # noqa: PLC0415 - --help does not need it

    checks = list(check_machine())
    if arguments.url:
        checks.append(check_endpoint(arguments.url))
    code = PROBLEM_EXIT_CODE if any(check.state == "problem" for check in checks) else 0
    if arguments.json:
        print_json({"ok": not code, "checks": [check._asdict() for check in checks]})
        return code
    lines = align([(check.state, check.name, printable(check.found)) for check in checks], states=(0,))
    for line, check in zip(lines, checks, strict=True):
        print(line)
        if check.advice:
            print(f"      -> {printable(check.advice)}")
    return code
