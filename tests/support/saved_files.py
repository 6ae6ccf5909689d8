"""The files of a checkpoint, for comparing two saves of one state."""

import json
import re

import fsspec


def content_of(url, **options):
    """Return the metadata and the bytes of the files of a checkpoint, without what differs from save to save."""
    fs, path = fsspec.url_to_fs(url, **options)
    text = fs.cat_file(f"{path}/.metadata").decode()
    names = {name: re.sub(r"-[0-9a-f]{8}\.", "-.", name) for name in json.loads(text)["files"]}
    for name, common in names.items():
        text = text.replace(name, common)
    document = json.loads(text)
    for name in ("checksum", "created_ns", "save_id", "sequence"):
        del document[name]
    del document["storage_meta"]["save_id"], document["storage_meta"]["checkpoint_id"]
    return document, {common: fs.cat_file(f"{path}/{name}") for name, common in names.items()}
