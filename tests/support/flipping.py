"""Damage a checkpoint of a store in a directory."""

from pathlib import Path

from tierfs.dcp.address import Address
from tierfs.dcp.checkpoint import open_checkpoint
from tierfs.format import keys
from tierfs.format.keys import inside
from tierfs.store import stat


def flip_shard(root, step):
    """Flip bytes of a chunk of a step's checkpoint. The chunk must be in the object tier only."""
    store, path = Address.of(f"{root}/step_{step}", {"ram": "0", "nvme": "0"}).open()
    checkpoint = open_checkpoint(store, path)
    file = max(checkpoint.files(), key=checkpoint.files().get)
    manifest = stat(store, inside(path, file)).manifest
    row = max(manifest.rows, key=lambda row: row.raw_length)
    chunk = Path(store.url.partition("://")[2], keys.chunk_key(row.name))
    data = bytearray(chunk.read_bytes())
    middle = len(data) * 2 // 3
    data[middle : middle + 8] = bytes(byte ^ 0xFF for byte in data[middle : middle + 8])
    chunk.write_bytes(data)
