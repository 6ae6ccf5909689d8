"""Which of the local tiers a command is about."""

from __future__ import annotations

import argparse

__all__ = ["add_tier_argument"]


def add_tier_argument(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Declare ``--tier``."""
    parser.add_argument(
        "--tier",
        choices=["ram", "nvme"],
        default=default,
        help=f"the host's shared memory, or its disk (default: {default})",
    )
