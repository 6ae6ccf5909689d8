"""The operations on a store over an object tier, one module each."""

from tierfs.repeated_warnings import drop_repeats
from tierfs.store.local_changes import discard_conflict, level_of, open_conflict, wait
from tierfs.store.maintenance.examine import Damage
from tierfs.store.offline import check_reachable, while_reachable
from tierfs.store.read.prefetch import evict, prefetch
from tierfs.store.read.reader import Reader, load, open_entry
from tierfs.store.read.verify import VerifyReport, verify
from tierfs.store.status import status
from tierfs.store.store import Store
from tierfs.store.tree.copy import annotate, copy, rename, transfer
from tierfs.store.tree.directory import annotate_directory, make_directory, remove_directory
from tierfs.store.tree.kind import is_directory_nearby, kind_of, last_known, look
from tierfs.store.tree.listing import (
    Entry,
    directories_in,
    find,
    is_directory,
    list_directory,
    list_pending,
    stat,
    stat_to_read,
)
from tierfs.store.tree.usage import Usage, usage, usages
from tierfs.store.write.staging import delete
from tierfs.store.write.writer import WriteMode, Writer, save

__all__ = [
    "Damage",
    "Entry",
    "Reader",
    "Store",
    "Usage",
    "VerifyReport",
    "WriteMode",
    "Writer",
    "annotate",
    "annotate_directory",
    "check_reachable",
    "copy",
    "delete",
    "directories_in",
    "discard_conflict",
    "evict",
    "find",
    "is_directory",
    "is_directory_nearby",
    "kind_of",
    "last_known",
    "level_of",
    "list_directory",
    "list_pending",
    "load",
    "look",
    "make_directory",
    "open_conflict",
    "open_entry",
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
    "while_reachable",
]

drop_repeats()
