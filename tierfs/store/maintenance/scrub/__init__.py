"""Scrubbing: verify every chunk again and again over the years, and heal damaged ones."""

from tierfs.store.maintenance.scrub.pieces import ScrubDamage, ScrubPart, ScrubPiece, scrub_piece
from tierfs.store.maintenance.scrub.rounds import ScrubOptions, ScrubReport, read_scrub_record, scrub

__all__ = [
    "ScrubDamage",
    "ScrubOptions",
    "ScrubPart",
    "ScrubPiece",
    "ScrubReport",
    "read_scrub_record",
    "scrub",
    "scrub_piece",
]
