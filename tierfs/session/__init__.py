"""Open a store in a process: find it by its URL, open it once, and compose it with its local tiers and flusher."""

from tierfs.session.open import init, open_store
from tierfs.session.settings import TierOptions
from tierfs.session.url import Location, parse_url

__all__ = ["Location", "TierOptions", "init", "open_store", "parse_url"]
