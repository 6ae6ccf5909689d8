"""Stores: one verb per file, over an object tier."""

from tierfs.store.copy import copy, rename, transfer
from tierfs.store.delete import delete
from tierfs.store.directory import make_directory, remove_directory
from tierfs.store.listing import Entry, find, list_directory, stat
from tierfs.store.load import Reader, load, open_entry
from tierfs.store.open import init, open_store
from tierfs.store.save import WriteMode, Writer, save
from tierfs.store.store import Store
from tierfs.store.url import Location, parse_url
from tierfs.store.usage import Usage, usage
from tierfs.store.verify import Damage, VerifyReport, verify

__all__ = [
    "Damage",
    "Entry",
    "Location",
    "Reader",
    "Store",
    "Usage",
    "VerifyReport",
    "WriteMode",
    "Writer",
    "copy",
    "delete",
    "find",
    "init",
    "list_directory",
    "load",
    "make_directory",
    "open_entry",
    "open_store",
    "parse_url",
    "remove_directory",
    "rename",
    "save",
    "stat",
    "transfer",
    "usage",
    "verify",
]
