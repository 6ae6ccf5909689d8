"""Stores: one verb per file, over an object tier."""

from tierfs.repeats import drop_repeats
from tierfs.store.copy import copy, rename, transfer
from tierfs.store.delete import delete
from tierfs.store.directory import make_directory, remove_directory
from tierfs.store.kind import is_directory_nearby, kind_of
from tierfs.store.listing import Entry, find, is_directory, list_directory, stat, stat_to_read
from tierfs.store.load import Reader, load, open_entry
from tierfs.store.open import init, open_store
from tierfs.store.prefetch import evict, prefetch
from tierfs.store.save import WriteMode, Writer, save
from tierfs.store.settings import TierOptions
from tierfs.store.status import status
from tierfs.store.store import Store
from tierfs.store.url import Location, parse_url
from tierfs.store.usage import Usage, usage, usages
from tierfs.store.verify import Damage, VerifyReport, verify
from tierfs.store.waiting import discard_conflict, level_of, open_conflict, wait

__all__ = [
    "Damage",
    "Entry",
    "Location",
    "Reader",
    "Store",
    "TierOptions",
    "Usage",
    "VerifyReport",
    "WriteMode",
    "Writer",
    "copy",
    "delete",
    "discard_conflict",
    "evict",
    "find",
    "init",
    "is_directory",
    "is_directory_nearby",
    "kind_of",
    "level_of",
    "list_directory",
    "load",
    "make_directory",
    "open_conflict",
    "open_entry",
    "open_store",
    "parse_url",
    "prefetch",
    "remove_directory",
    "rename",
    "save",
    "stat",
    "stat_to_read",
    "status",
    "transfer",
    "usage",
    "usages",
    "verify",
    "wait",
]

drop_repeats()
