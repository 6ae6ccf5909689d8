"""Files for `codec.py`: pairs of files as hubs keep them, stored by tierfs, Xet, zstd and zipnn.

A small GPT is trained on bytes of Python's library for a minute. Of each pair, the second file follows the first one: the
same state some steps later, or the same file with something inserted. Every file is read back and compared.
"""

from __future__ import annotations

import io
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import safetensors.torch
import torch
import zstandard
from harness import SEED, end_flusher, private_slabs
from snapshot_models import CONTEXT, Decoder, adapt
from torch.nn import functional

import tierfs

WIDTH, LAYERS, HEADS, BATCH = 256, 8, 4, 1
WARM_STEPS = 20
LATER = (1, 10, 100)
ZSTD_LEVEL = 3
GGUF_ALIGNMENT = 32
GGUF_F16 = 1
Pair = tuple[bytes, bytes]
State = dict[str, torch.Tensor]


# -- files -------------------------------------------------------------------------------------------------------------


def pairs() -> Iterator[tuple[str, Pair]]:
    """Yield the name of each pair and the two files."""
    torch.manual_seed(SEED)
    model = Decoder(256, WIDTH, LAYERS, HEADS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    text = _text()
    _train(model, optimizer, text, WARM_STEPS)
    first, weights = _adamw(model, optimizer), _bfloat16(model)
    yield "torch.save, 1 line of metadata more", (_pickled(first, 1), _pickled(first, 2))
    yield "safetensors, longer header", _longer_header(first)
    yield "GGUF, a block inserted", (_gguf(weights), _gguf(_with_a_block_more(weights)))
    done, before = 0, safetensors.torch.save(first)
    for later in LATER:
        _train(model, optimizer, text, later - done)
        done = later
        yield f"AdamW fp32, {later} steps", (before, safetensors.torch.save(_adamw(model, optimizer)))
        yield (
            f"bf16 weights, {later} steps",
            (safetensors.torch.save(weights), safetensors.torch.save(_bfloat16(model))),
        )
    adapt(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=3e-4)
    states = []
    for _ in range(2):
        _train(model, optimizer, text, 10)
        states.append(safetensors.torch.save(_bfloat16(model) | _adamw(model, optimizer, moments_only=True)))
    yield "LoRA, frozen base, 10 steps", (states[0], states[1])


def _text() -> torch.Tensor:
    read = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:100])
    return torch.frombuffer(bytearray(read), dtype=torch.uint8).long()


def _train(model: Decoder, optimizer: torch.optim.Optimizer, text: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        begins = torch.randint(len(text) - CONTEXT - 1, (BATCH,))
        tokens = torch.stack([text[at : at + CONTEXT + 1] for at in begins])
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _adamw(model: Decoder, optimizer: torch.optim.Optimizer, *, moments_only: bool = False) -> State:
    names = {id(each): name for name, each in model.named_parameters()}
    found = {} if moments_only else {f"master.{name}": each.detach().clone() for name, each in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{moment}.{names[id(parameter)]}"] = state[moment].clone()
    return found


def _bfloat16(model: Decoder) -> State:
    return {f"model.{name}": each.detach().to(torch.bfloat16) for name, each in model.named_parameters()}


def _pickled(state: State, lines: int) -> bytes:
    file = io.BytesIO()
    torch.save({"state": state, "lines": ["a line of metadata"] * lines}, file)
    return file.getvalue()


def _longer_header(state: State) -> Pair:
    first, second = ({str(number): "step" for number in range(count)} for count in (1, 500))
    return safetensors.torch.save(state, metadata=first), safetensors.torch.save(state, metadata=second)


def _with_a_block_more(weights: State) -> State:
    """Return the weights with one more block in the middle, as in a model that was made deeper."""
    inserted = {name.replace("blocks.3", "blocks.3b"): -each for name, each in weights.items() if "blocks.3" in name}
    found: State = {}
    for name, each in weights.items():
        if "blocks.4" in name and inserted:
            found |= inserted
            inserted = {}
        found[name] = each
    return found


def _gguf(weights: State) -> bytes:
    """Return these weights as a GGUF file of version 3 with 16-bit tensors."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(weights), 1)
    head += _gguf_text("general.alignment") + struct.pack("<II", 4, GGUF_ALIGNMENT)
    data = bytearray()
    for name, each in weights.items():
        shape = tuple(reversed(each.shape))
        head += _gguf_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, GGUF_F16, len(data))
        data += each.to(torch.float16).numpy().tobytes()
        data += bytes(-len(data) % GGUF_ALIGNMENT)
    return head + bytes(-len(head) % GGUF_ALIGNMENT) + bytes(data)


def _gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


# -- peers -------------------------------------------------------------------------------------------------------------


def _grown(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def by_tierfs(pair: Pair, root: Path) -> list[dict[str, float]]:
    """Store both files as consecutive saves."""
    url, store = f"tierfs::file://{root}/store", root / "store"
    tierfs.init(f"file://{store}")
    fs, path = fsspec.url_to_fs(url, ack="staged", ram="1GiB", nvme=0)
    plain, _ = fsspec.url_to_fs(url, ram=0, nvme=0)
    fs.pipe_file(f"{path}/begin", b"starts the flusher")
    fs.wait(path, "object")
    rows = []
    try:
        for step, data in enumerate(pair):
            before, begin = _grown(store), time.perf_counter()
            fs.pipe_file(f"{path}/run/step_{step}/file", data)
            fs.wait(path, "object")
            seconds, begin = time.perf_counter() - begin, time.perf_counter()
            same = plain.cat_file(f"{path}/run/step_{step}/file") == data
            rows.append(_row(data, _grown(store) - before, seconds, time.perf_counter() - begin, same=same))
    finally:
        end_flusher(fs.status(path))
    return rows


def by_xet(pair: Pair, root: Path) -> list[dict[str, float]]:
    """Store both files in one Xet store in a directory. Counts its blocks and its indexes of them."""
    try:
        import hf_xet
    except ImportError:
        raise ModuleNotFoundError("codec.py compares with Xet: pip install hf_xet") from None
    store, out = root / "xet", root / "out"
    store.mkdir()
    session, rows = hf_xet.XetSession(), []
    for data in pair:
        before, begin = _xet_bytes(store), time.perf_counter()
        with session.new_upload_commit(endpoint=f"local://{store}") as commit:
            upload = commit.start_upload_bytes(data, sha256=hf_xet.SKIP_SHA256)
        seconds, begin = time.perf_counter() - begin, time.perf_counter()
        with session.new_file_download_group(endpoint=f"local://{store}") as group:
            group.start_download_file(upload.result().xet_info, str(out))
        read = time.perf_counter() - begin
        rows.append(_row(data, _xet_bytes(store) - before, seconds, read, same=out.read_bytes() == data))
    return rows


def _xet_bytes(store: Path) -> int:
    return sum(_grown(store / "xet" / "xorbs" / part) for part in ("xorbs", "shards"))


def by_zstd(pair: Pair, _: Path) -> list[dict[str, float]]:
    coder, decoder = zstandard.ZstdCompressor(level=ZSTD_LEVEL), zstandard.ZstdDecompressor()
    return [_coded(data, coder.compress, decoder.decompress) for data in pair]


def by_zipnn(pair: Pair, _: Path) -> list[dict[str, float]]:
    """Code whole files, as zipnn's command does, as the type that the codec expects most of them to be."""
    try:
        from zipnn import ZipNN
    except ImportError:
        raise ModuleNotFoundError("codec.py compares with zipnn: pip install zipnn") from None
    found = []
    for data in pair:
        kind = "float32" if b'"F32"' in data[:4096] or data[:2] == b"PK" else "bfloat16"
        coder = ZipNN(bytearray_dtype=kind, input_format="byte", threads=1)
        found.append(_coded(data, lambda each, coder=coder: coder.compress(bytearray(each)), coder.decompress))
    return found


def _coded(data: bytes, encode: Callable[[bytes], Any], decode: Callable[[Any], Any]) -> dict[str, float]:
    begin = time.perf_counter()
    encoded = encode(data)
    seconds, begin = time.perf_counter() - begin, time.perf_counter()
    decoded = decode(encoded)
    return _row(data, len(encoded), seconds, time.perf_counter() - begin, same=bytes(decoded) == data)


def _row(data: bytes, stored: int, seconds: float, read: float, *, same: bool) -> dict[str, float]:
    if not same:
        raise RuntimeError("the bytes that were read back are not those that were stored")
    raw = len(data)
    return {"stored": stored / raw, "GB/s": raw / seconds / 1e9, "read GB/s": raw / read / 1e9, "raw": raw}


PEERS = {"tierfs": by_tierfs, "xet": by_xet, "zstd-3": by_zstd, "zipnn": by_zipnn}


def report(root: Path) -> dict[str, Any]:
    """Return, by pair, peer and file, the stored share and the speeds to the store and back."""
    found: dict[str, Any] = {}
    os.environ.setdefault("HF_XET_CACHE", str(root / "cache"))
    os.environ["TIERFS_STATE_DIR"] = str(root / "host")
    with private_slabs():
        for number, (name, pair) in enumerate(pairs()):
            found[name] = {}
            for peer, store in PEERS.items():
                place = root / f"{number}-{peer}"
                place.mkdir()
                first, second = store(pair, place)
                found[name][peer] = {"first": first, "second": second}
    return found
