"""A checkpoint's ``.metadata``: torch's `Metadata` and tierfs's own note as one JSON document, never a pickle.

Each value is checked before it is used: an untrusted document raises an error and does nothing else.

Format: docs/reference/checkpoint-format.md, "The metadata document".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tierfs import digest
from tierfs.checked_json import parse_value
from tierfs.dcp.columns import BytesPlace, PlaceColumns, read_tensors
from tierfs.dcp.document import (
    DIMENSIONS_MAX,
    FORMAT,
    INTEGER_MAX,
    VERSION,
    Checked,
    CheckpointNote,
    canonical,
    parse,
    read_boxes,
    read_note,
    read_place,
    refuse_names,
)
from tierfs.dcp.tensorbytes import DTYPES, LAYOUTS, MEMORY_FORMATS, name_of
from tierfs.errors import CorruptionError, FormatError, InvalidInputError
from tierfs.gc_pause import Uncollected

PATH_PARTS_MAX = 256
_WHERE = "the checkpoint's metadata"
# The beginning and end of a document, and the text that precedes its tensors: see `encode`.
_BEGIN, _TENSORS, _END = b'{"checksum":"', b',"tensors":{', b'},"version":%d}' % VERSION
# A member called "tensors" may occur this often before the document's own; then the general JSON reader takes over.
SPLITS_MAX = 8


def encode(metadata: Any, extra: CheckpointNote) -> bytes:
    """Return the document of a checkpoint.

    Args:
        metadata: torch's `Metadata`, with a `BytesPlace` in ``storage_data`` for each chunk of a tensor and each
            object.
        extra: tierfs's own note. It has to name every file that a `BytesPlace` names.

    Raises:
        InvalidInputError: A value cannot be written so that reading returns the same value. The message names the FQN.
    """
    places: Mapping[Any, BytesPlace] = metadata.storage_data or {}
    tensors: dict[str, Any] = {}
    objects: dict[str, dict[str, object]] = {}
    for fqn, item in metadata.state_dict_metadata.items():
        if isinstance(item, TensorStorageMetadata):
            tensors[fqn] = item
        else:
            objects[fqn] = _place_of(places, MetadataIndex(fqn), fqn)._asdict()
    meta = metadata.storage_meta
    document: dict[str, object] = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": extra.save_id,
        "sequence": extra.sequence,
        "created_ns": extra.created_ns,
        "step": extra.step,
        "tensors": {},
        "objects": objects,
        "paths": _encode_paths(metadata.planner_data),
        "files": {name: {"length": length} for name, length in extra.files.items()},
        **{name: value for name, value in (("kind", extra.kind), ("run", extra.run)) if value is not None},
        "storage_meta": {
            "checkpoint_id": None if meta is None or meta.checkpoint_id is None else str(meta.checkpoint_id),
            "save_id": None if meta is None else meta.save_id,
            "modules": [] if meta is None else list(meta.modules),
            "dcp_version": getattr(metadata, "version", None),
        },
    }
    try:
        refuse_names([*tensors, *objects])
        # A document that no reader accepts is not written: the error must come while the state is still in memory.
        interpret(document, _WHERE)
        # One tensor at a time, as text: as many objects they would make Python collect garbage at each save.
        texts = list(_tensor_texts(tensors, places, extra.files))
        before = canonical({name: value for name, value in document.items() if name < "tensors"})
        after = canonical({name: value for name, value in document.items() if name > "tensors"})
        content = before[:-1] + b',"tensors":{' + b",".join(texts) + b"}," + after[1:]
    except InvalidInputError:
        raise
    except (CorruptionError, FormatError) as error:
        raise InvalidInputError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"the checkpoint's metadata cannot be written as JSON: {error}") from error
    # "checksum" sorts before all other members.
    return f'{{"checksum":"{digest.checksum(content).hex()}",'.encode() + content[1:]


def decode(data: bytes, where: str) -> tuple[Any, CheckpointNote]:
    """Read a document.

    Returns:
        torch's `Metadata`, with a `BytesPlace` for each chunk and object in ``storage_data``, and tierfs's note.

    Raises:
        CorruptionError: The document is damaged, or contradicts itself.
        FormatError: The document is of another version, or holds a dtype that this torch does not have.
    """
    with Uncollected():
        return _read_columns(data, where) or interpret(parse(data, where), where)


def _read_columns(data: bytes, where: str) -> tuple[Any, CheckpointNote] | None:
    """Read a document that is written exactly as `encode` writes it; return ``None`` for any other or damaged one."""
    stated, _, rest = data.partition(b'",')
    if not data.endswith(_END) or stated != _BEGIN + digest.checksum(b"{", rest).hex().encode():
        return None
    at = -1
    # Closed with a brace, only the text before the document's own tensors is a document: text before a nested "tensors"
    # is not.
    for _ in range(SPLITS_MAX):
        at = rest.find(_TENSORS, at + 1)
        if at < 0:
            return None
        before = b"{%b}" % rest[:at]
        try:
            document = parse_value(before, where, numbers="integers", unique=True)
            is_usual = document.get("format") == FORMAT and canonical(document) == before
        except ValueError:
            continue
        if not is_usual:
            return None
        try:
            root = Checked(document, where)
            note = read_note(root)
            found = read_tensors(rest[at + len(_TENSORS) : -len(_END)], note.files)
            if found is None:
                return None
            items, columns = found
            objects: dict[Any, BytesPlace] = {}
            return _complete(root, note, items, objects, PlaceColumns(columns, objects)), note
        except (CorruptionError, FormatError):
            return None  # the general reader names the problem
    return None


def interpret(document: Mapping[str, Any], where: str) -> tuple[Any, CheckpointNote]:
    root = Checked(document, where)
    note = read_note(root)
    items: dict[str, Any] = {}
    places: dict[Any, BytesPlace] = {}
    for fqn, tensor in root.members("tensors"):
        items[fqn] = _decode_tensor(fqn, tensor, note.files, places)
    return _complete(root, note, items, places, places), note


def _complete(
    root: Checked,
    note: CheckpointNote,
    items: dict[str, Any],
    objects: dict[Any, BytesPlace],
    places: Mapping[Any, BytesPlace],
) -> Any:
    """Return torch's `Metadata`.

    Args:
        root: The document.
        note: The document's note.
        items: The tensors, by FQN. The objects are added.
        objects: Filled with the places of the objects.
        places: The places of all tensors and objects, once ``objects`` is filled.
    """
    for fqn, item in root.members("objects"):
        if fqn in items:
            raise item.wrong("it is both a tensor and an object")
        items[fqn] = BytesStorageMetadata()
        objects[MetadataIndex(fqn)] = BytesPlace(*read_place(item, note.files))
    meta = root.inner("storage_meta")
    modules = meta.items("modules")
    if not all(isinstance(name, str) for name in modules):
        raise meta.wrong(f"modules is {modules!r}")
    metadata = Metadata(
        state_dict_metadata=items,
        planner_data=_decode_paths(root),
        storage_data=places,
        storage_meta=StorageMeta(meta.optional_text("checkpoint_id"), meta.optional_text("save_id"), None, modules),
    )
    metadata.version = meta.optional_text("dcp_version")
    return metadata


def _tensor_texts(
    tensors: Mapping[str, Any], places: Mapping[Any, BytesPlace], files: Mapping[str, int]
) -> Iterator[bytes]:
    """Yield the tensors' members of the document.

    Tensors of one shape are cut alike, and differ in names and places. So the first of them is read once as a check,
    and the others share its text: training waits for the interpreter's lock meanwhile.
    """
    cuts: dict[Any, tuple[list[bytes], bytes]] = {}
    names = {file: canonical(file) for file in files}
    for fqn, item in sorted(tensors.items()):
        has, at = item.properties, [_place_of(places, MetadataIndex(fqn, one.offsets), fqn) for one in item.chunks]
        boxes = [(one.offsets, one.sizes, place.length) for one, place in zip(item.chunks, at, strict=True)]
        key = (has.dtype, has.layout, has.requires_grad, has.memory_format, has.pin_memory, tuple(item.size), *boxes)
        if key not in cuts or any(not 0 <= place.at <= files.get(place.file, -1) - place.length for place in at):
            encoded = _encode_tensor(fqn, item, at)
            _decode_tensor(fqn, Checked(encoded, f"{_WHERE}: tensors: {fqn!r}"), files, {})
            chunks = [
                canonical({name: chunk[name] for name in ("length", "offsets", "shape")})[1:]
                for chunk in encoded.pop("chunks")
            ]
            cuts[key] = chunks, canonical(encoded)[1:]
        chunks, rest = cuts[key]
        texts = [
            b'{"at":%d,"file":%b,%b' % (one.at, names[one.file], text) for one, text in zip(at, chunks, strict=True)
        ]
        yield b'%b:{"chunks":[%b],%b' % (canonical(fqn), b",".join(texts), rest)


def _encode_tensor(fqn: str, item: Any, places: Sequence[BytesPlace]) -> dict[str, Any]:
    if len(item.size) > DIMENSIONS_MAX:
        raise InvalidInputError(
            f"{fqn!r} has {len(item.size)} dimensions, but a checkpoint allows at most {DIMENSIONS_MAX}: reshape it"
        )
    properties = item.properties
    return {
        "dtype": name_of(DTYPES, properties.dtype, fqn),
        "shape": list(item.size),
        "layout": name_of(LAYOUTS, properties.layout, fqn),
        "requires_grad": bool(properties.requires_grad),
        "memory_format": name_of(MEMORY_FORMATS, properties.memory_format, fqn),
        "pin_memory": bool(properties.pin_memory),
        "chunks": [
            {"offsets": list(one.offsets), "shape": list(one.sizes), **place._asdict()}
            for one, place in zip(item.chunks, places, strict=True)
        ],
    }


def _place_of(places: Mapping[Any, Any], index: Any, fqn: str) -> BytesPlace:
    place = places.get(index)
    if not isinstance(place, BytesPlace):
        at = "" if index.offset is None else f" at {list(index.offset)}"
        raise InvalidInputError(f"{fqn}{at}: the metadata does not say where it is stored, but has {place!r}")
    return place


def _decode_tensor(fqn: str, tensor: Checked, files: Mapping[str, int], places: dict[Any, BytesPlace]) -> Any:
    dtype = tensor.known("dtype", DTYPES)
    shape = tensor.integers("shape", DIMENSIONS_MAX)
    chunks = []
    for number, (chunk, offsets, sizes, at) in enumerate(read_boxes(tensor, shape, files)):
        place = BytesPlace(*at)
        if place.length != math.prod(sizes) * dtype.itemsize:
            raise chunk.wrong(f"{place.length} bytes do not hold {list(sizes)} elements of {dtype}")
        index = MetadataIndex(fqn, offsets, number)
        places[index] = place
        chunks.append(ChunkStorageMetadata(index.offset, type(index.offset)(sizes)))
    properties = TensorProperties(
        dtype=dtype,
        layout=tensor.known("layout", LAYOUTS),
        requires_grad=tensor.flag("requires_grad"),
        memory_format=tensor.known("memory_format", MEMORY_FORMATS),
        pin_memory=tensor.flag("pin_memory"),
    )
    return TensorStorageMetadata(properties, MetadataIndex(fqn, shape).offset, chunks)


def _encode_paths(planner_data: Any) -> dict[str, list[object]] | None:
    if planner_data is None:
        return None
    if not isinstance(planner_data, Mapping):
        raise InvalidInputError(f"the planner's data, {type(planner_data).__name__}, cannot be stored: only paths can")
    paths = {}
    for fqn, path in planner_data.items():
        if not isinstance(path, (tuple, list)) or not path or not all(type(part) in (str, int) for part in path):
            raise InvalidInputError(
                f"{fqn}: its path in the state is {path!r}: only strings and integers can be stored as keys"
            )
        if len(path) > PATH_PARTS_MAX:
            raise InvalidInputError(
                f"{fqn}: it is nested {len(path)} levels deep in the state, but a checkpoint allows at most "
                f"{PATH_PARTS_MAX}: nest the state less deeply"
            )
        paths[fqn] = list(path)
    refuse_names(paths)
    return paths


def _decode_paths(root: Checked) -> dict[str, tuple[object, ...]] | None:
    if root.document.get("paths") is None:
        return None
    paths = {}
    for fqn, path in root.inner("paths").document.items():
        if (
            not isinstance(path, list)
            or not 0 < len(path) <= PATH_PARTS_MAX
            or not all(type(part) is str or (type(part) is int and abs(part) <= INTEGER_MAX) for part in path)
        ):
            raise root.wrong(f"the path of {fqn!r} is {path!r}")
        paths[fqn] = tuple(path)
    return paths
