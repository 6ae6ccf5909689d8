"""A store as one process uses it: found by its URL, opened once, composed with its local tiers and its flusher."""

from tierfs.session.open import init, open_store
from tierfs.session.settings import TierOptions
from tierfs.session.url import Location, parse_url

__all__ = ["Location", "TierOptions", "init", "open_store", "parse_url"]
