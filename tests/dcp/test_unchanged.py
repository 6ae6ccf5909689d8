"""A tensor that is unchanged since the last checkpoint, or the same on several ranks, is stored once."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp

import tierfs
from tierfs.codec import Codec
from tierfs.dcp import TierReader, TierWriter
from tierfs.format import keys
from tierfs.objects import LocalObjects
from tierfs.store import find, stat, usages
from tierfs.store.read.lookup import read_envelope

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")

FROZEN, TRAINED = 3 << 20, 1 << 18  # elements of 4 bytes
TIERS = {"direct": {"ram": "0", "nvme": "0"}, "staged": {"ram": "256MiB", "nvme": "0"}}


@pytest.fixture
def url(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store"


@pytest.fixture
def puts(monkeypatch):
    """Key and size of every chunk that this process puts."""
    put, made = LocalObjects.put, []

    def noted(self, key, data, **how):
        if key.startswith(keys.CHUNKS):
            made.append((key, sum(memoryview(piece).nbytes for piece in data)))
        return put(self, key, data, **how)

    monkeypatch.setattr(LocalObjects, "put", noted)
    return made


def state(step):
    frozen = torch.randn(FROZEN, generator=torch.Generator().manual_seed(0))
    trained = torch.randn(TRAINED, generator=torch.Generator().manual_seed(step))
    return {"frozen": frozen, "trained": trained, "step": step}


def save(url, value, tiers):
    with_writer = TierWriter(url, ack="object", **TIERS[tiers])
    dcp.save(value, storage_writer=with_writer, no_dist=True)


def shard_rows(store, directory):
    (path,) = [entry.path for entry in find(store, directory) if entry.path.endswith(".safetensors")]
    return stat(store, path).manifest.rows


def chunk_bytes(store):
    return {info.key: info.size for info in store.objects.list(keys.CHUNKS)}


def test_a_frozen_tensor_costs_one_row_and_no_chunk(url, store, puts):
    save(f"{url}/run/step_1", state(1), "direct")
    assert sum(size for _, size in puts) > 4 * FROZEN * 0.5
    puts.clear()
    save(f"{url}/run/step_2", state(2), "direct")
    assert 0 < sum(size for _, size in puts) < 4 * TRAINED * 1.01
    first, second = shard_rows(store, "run/step_1"), shard_rows(store, "run/step_2")
    (frozen,) = [row for row in second if row.raw_length == 4 * FROZEN]
    assert frozen in first
    assert keys.chunk_key(frozen.name) not in [key for key, _ in puts]


@pytest.mark.parametrize("tiers", TIERS)
def test_another_step_and_another_run_store_only_what_changed(url, store, tiers):
    save(f"{url}/run/step_1", state(1), tiers)
    before = chunk_bytes(store)
    save(f"{url}/run/step_2", state(2), tiers)
    after = chunk_bytes(store)
    assert 0 < sum(after[key] for key in after.keys() - before.keys()) < 4 * TRAINED * 1.01
    save(f"{url}/other/step_2", state(2), tiers)
    # Only the metadata is new: it names another file and another save.
    assert sum(size for key, size in chunk_bytes(store).items() if key not in after) < 10_000
    steps = usages(store, ["run/step_1", "run/step_2", "other/step_2"])
    assert steps["run/step_1"].freed_bytes < 4 * TRAINED * 1.02
    assert steps["run/step_2"].freed_bytes < 20_000
    found = {"frozen": torch.zeros(FROZEN), "trained": torch.zeros(TRAINED)}
    dcp.load(found, storage_reader=TierReader(f"{url}/other/step_2"), no_dist=True)
    assert all(torch.equal(found[name], state(2)[name]) for name in found)


def test_the_same_tensor_under_two_names_is_stored_once(url, store):
    tensor = torch.randn(FROZEN)
    save(f"{url}/run/step_1", {"embedding": tensor, "head": tensor.clone()}, "direct")
    assert sum(chunk_bytes(store).values()) < 4 * FROZEN * 1.01


@pytest.mark.parametrize(("codecs", "expected"), [("all", {Codec.PLANE, Codec.CONST, Codec.ZSTD}), ("off", set())])
def test_without_local_tiers_tensors_are_encoded_as_what_they_are(url, store, codecs, expected):
    saved = {
        "a": torch.randn(FROZEN),
        "b": torch.randn(FROZEN).bfloat16(),
        "c": torch.zeros(TRAINED),
        "d": torch.randn(9),
    }
    writer = TierWriter(f"{url}/run", ack="object", codecs=codecs, **TIERS["direct"])
    dcp.save(saved, storage_writer=writer, no_dist=True)
    rows = shard_rows(store, "run")
    used = {Codec(block.codec) for row in rows for block in read_envelope(store, row, "run").blocks}
    assert used - {Codec.STORE} == expected
    if codecs == "all":
        assert sum(chunk_bytes(store).values()) < 0.81 * 6 * FROZEN
    found = {name: torch.empty_like(tensor) for name, tensor in saved.items()}
    dcp.load(found, storage_reader=TierReader(f"{url}/run"), no_dist=True)
    assert all(torch.equal(found[name], saved[name]) for name in saved)
