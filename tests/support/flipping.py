"""Damage a checkpoint in the object tier."""

from tierfs.dcp.address import Address
from tierfs.dcp.checkpoint import open_checkpoint
from tierfs.format.keys import chunk_key, inside
from tierfs.store import stat


def flip_shard(url, **options):
    """Flip bytes of the longest chunk of a checkpoint's longest file, in the object tier only."""
    store, path = Address.of(url, {"ram": "0", "nvme": "0", **options}).open()
    files = open_checkpoint(store, path).files()
    manifest = stat(store, inside(path, max(files, key=files.get))).manifest
    key = chunk_key(max(manifest.rows, key=lambda row: row.raw_length).name)
    data = bytearray(store.objects.read(key, 1 << 30)[0])
    middle = len(data) * 2 // 3
    data[middle : middle + 8] = bytes(byte ^ 0xFF for byte in data[middle : middle + 8])
    store.objects.put(key, [data])
