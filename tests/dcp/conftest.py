"""Fixtures of the tests that save and load checkpoints."""

from support.dcp_stores import (  # noqa: F401
    all_stores_are_closed,
    plans_are_forgotten,
    store,
    url,
    without_checksums,
)
