"""Checkpoints that TierWriter saves are what was to be saved, whatever happens right after, and whole or not there."""

import copy
import gc
import io
import pickle
import re

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load as load_safetensors
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import tierfs
from tierfs.dcp import TierReader, TierWriter
from tierfs.errors import InvalidInputError
from tierfs.local.slab import SlotState

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

OPTIONS = {"ram": "256MiB", "nvme": "0"}
# All that are one or more bytes wide and have nothing to them but their elements.
_ODD = re.compile(r"bits|quint|qint|u?int[1-7]$|fn_x2")
DTYPES = sorted(
    {
        kind
        for name in dir(torch)
        if isinstance(kind := getattr(torch, name), torch.dtype) and not _ODD.search(str(kind))
    },
    key=str,
)


def noise(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def same(first, second):
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.shape == second.shape and bits(first) == bits(second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


def state(seed=0):
    return {
        "model": {
            "embedding": noise(3000, 500, seed=seed),
            "layers": [
                {"weight": noise(40, 30, dtype=torch.bfloat16, seed=seed + n), "bias": noise(40, seed=n)}
                for n in range(3)
            ],
            "transposed": noise(300, 20, seed=seed).t(),
            "view": noise(100, 100, seed=seed)[10:20, ::3],
            "conjugate": noise(9, dtype=torch.complex64, seed=seed).conj(),
            "negative": noise(7, dtype=torch.complex64, seed=seed).conj().imag,
            "nothing": torch.empty(0, 4),
            "scalar": torch.tensor(float(seed)),
            "parameter": torch.nn.Parameter(noise(10, seed=seed)),
        },
        "step": seed,
        "notes": ["a", {"b": seed}],
    }


def empty_like(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: empty_like(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return list(map(empty_like, value))
    return None


@pytest.fixture
def url(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    yield f"tierfs::file://{tmp_path}/store/run"
    # What is pending keeps its room.
    TierWriter(f"tierfs::file://{tmp_path}/store", **OPTIONS).wait("object", timeout=30)


def loaded(url, like):
    found = empty_like(like)
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS))
    return found


def slot_states(url):
    writer = TierWriter(url, **OPTIONS)
    store, _ = writer._address.open()
    return {slot.state for segment in store.tiers.ram.segments() for slot in segment.slots()}


def test_what_is_saved_is_what_is_loaded(url):
    dcp.save(state(1), storage_writer=TierWriter(f"{url}/1", **OPTIONS))
    assert same(loaded(f"{url}/1", state(1)), state(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(url, dtype):
    saved = {"plain": noise(33, dtype=dtype), "scalar": noise(dtype=dtype), "none": noise(0, 2, dtype=dtype)}
    if dtype.itemsize > 1 or dtype in {torch.uint8, torch.int8, torch.bool}:
        saved["strided"] = noise(12, 8, dtype=dtype)[::2, 1:5]
    writer = TierWriter(url, **OPTIONS)
    dcp.async_save(saved, storage_writer=writer).result()
    assert same(loaded(url, saved), saved)


def test_nothing_that_happens_after_staging_reaches_the_checkpoint(url):
    writer = TierWriter(url, **OPTIONS)
    live = state(1)
    live["array"] = torch.arange(6).numpy()
    expected = copy.deepcopy(live)
    staged = writer.stage(live)
    for tensor in [live["model"]["embedding"], live["model"]["parameter"].data, live["model"]["layers"][0]["bias"]]:
        tensor.zero_()
    live["notes"].append("too late")
    live["array"][:] = 0
    dcp.save(staged, storage_writer=writer)
    found = loaded(url, expected)
    found["array"], expected["array"] = found["array"].tolist(), expected["array"].tolist()
    assert same(found, expected)


def test_staged_tensors_are_saved_without_a_copy(url, monkeypatch):
    writer = TierWriter(url, **OPTIONS)
    staged = writer.stage({"a": noise(1000, 1000), "b": noise(10)})
    copied = []
    foreach = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *lists: copied.append(lists) or foreach(*lists))
    dcp.save(staged, storage_writer=writer)
    assert copied == []
    assert same(loaded(url, staged), {"a": noise(1000, 1000), "b": noise(10)})


def test_saves_may_overlap(url):
    writer = TierWriter(url, **OPTIONS)
    futures = [
        dcp.async_save(state(number), storage_writer=writer, checkpoint_id=f"{url}/{number}") for number in range(3)
    ]
    for number, future in enumerate(futures):
        future.result()
        assert same(loaded(f"{url}/{number}", state(number)), state(number))


def test_a_cached_plan_saves_new_content_each_time(url):
    writer, planner = TierWriter(url, **OPTIONS), DefaultSavePlanner(enable_plan_caching=True)
    for number in range(3):
        dcp.save(state(number), storage_writer=writer, checkpoint_id=f"{url}/{number}", planner=planner)
    for number in range(3):
        assert same(loaded(f"{url}/{number}", state(number)), state(number))


def test_a_tensor_that_is_there_twice_is_staged_once(url):
    writer = TierWriter(url, **OPTIONS)
    weight = noise(1000, 1000)
    staged = writer.stage({"a": weight, "b": {"tied": weight}})
    assert staged["a"] is staged["b"]["tied"]
    dcp.save(staged, storage_writer=writer)
    assert same(loaded(url, {"a": weight, "b": {"tied": weight}}), {"a": weight, "b": {"tied": weight}})


def test_a_shard_file_is_a_safetensors_file(url, tmp_path):
    saved = state(1)["model"]
    dcp.save(saved, storage_writer=TierWriter(url, **OPTIONS))
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    (name,) = [name for name in fs.ls(path, detail=False) if name.endswith(".safetensors")]
    fs.get(name, str(tmp_path / "copy.safetensors"))
    tensors = load_safetensors((tmp_path / "copy.safetensors").read_bytes())
    assert bits(tensors["embedding"]) == bits(saved["embedding"])
    assert bits(tensors["layers.1.weight"]) == bits(saved["layers"][1]["weight"])
    with safe_open(tmp_path / "copy.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors) >= {"transposed", "view", "conjugate", "nothing", "scalar"}
        assert file.get_slice("embedding")[5:6].shape == (1, 500)


def test_the_old_checkpoint_is_there_until_the_new_one_is_whole(url, monkeypatch):
    writer = TierWriter(url, **OPTIONS)
    dcp.save(state(1), storage_writer=writer)

    def fail(*_, **__):
        raise RuntimeError("the coordinator died")

    with monkeypatch.context() as dying:
        dying.setattr(TierWriter, "finish", fail)
        with pytest.raises(dcp.api.CheckpointException, match="the coordinator died"):
            dcp.save(state(2), storage_writer=writer)
    assert same(loaded(url, state(1)), state(1))
    dcp.save(state(3), storage_writer=writer)
    assert same(loaded(url, state(3)), state(3))


def test_a_checkpoint_is_not_replaced_against_the_users_will(url):
    dcp.save(state(1), storage_writer=TierWriter(url, overwrite=False, **OPTIONS))
    with pytest.raises(dcp.api.CheckpointException, match="holds a checkpoint"):
        dcp.save(state(2), storage_writer=TierWriter(url, overwrite=False, **OPTIONS))
    assert same(loaded(url, state(1)), state(1))


def test_a_save_that_fails_leaves_nothing_in_memory(url):
    class Unpicklable:
        def __reduce__(self):
            raise RuntimeError("not this one")

        def __deepcopy__(self, memo):
            return self

    writer = TierWriter(url, **OPTIONS)
    with pytest.raises(dcp.api.CheckpointException, match="not this one"):
        dcp.async_save({"a": noise(2000, 1000), "b": Unpicklable()}, storage_writer=writer).result()
    gc.collect()
    assert slot_states(url) <= {SlotState.CLEAN}
    dcp.save({"a": noise(10)}, storage_writer=writer)


def test_levels_are_reached_and_reported(url, tmp_path):
    options = {"ram": "128MiB", "nvme": "64MiB", "state_dir": str(tmp_path / "state")}
    writer = TierWriter(url, ack="local", **options)
    dcp.save(state(1), storage_writer=writer)
    assert writer.ack() in {"local", "object"}
    writer.wait("object", timeout=30)
    assert writer.ack() == "object"
    assert writer.status()["queue_files"] == 0


def test_what_stock_writers_take_is_taken(url):
    writer = TierWriter(
        path=url,
        single_file_per_rank=True,
        sync_files=False,
        thread_count=4,
        per_thread_copy_ahead=1,
        cache_staged_state_dict=True,
        overwrite=True,
        **OPTIONS,
    )
    dcp.save(state(1), storage_writer=writer)
    assert same(loaded(url, state(1)), state(1))
    with pytest.raises(InvalidInputError, match="_extensions"):
        TierWriter(url, _extensions=[object()])
    with pytest.raises(InvalidInputError, match="unknown option 'colour'"):
        TierWriter(url, colour="red")
    with pytest.raises(InvalidInputError, match="names no filesystem"):
        TierWriter("tierfs::/absolute/path")


def test_a_writer_is_pickled_by_its_configuration(url):
    writer = TierWriter(url, ack="object", **OPTIONS)
    writer.stage(state(1))
    data = pickle.dumps(writer)
    assert len(data) < 2000
    dcp.save(state(1), storage_writer=pickle.loads(data))
    assert same(loaded(url, state(1)), state(1))


def test_without_collectives_each_rank_has_metadata_of_its_own(url):
    dcp.save(state(1), storage_writer=TierWriter(url, **OPTIONS), use_collectives=False)
    fs, path = fsspec.url_to_fs(url, **OPTIONS)
    assert fs.exists(f"{path}/__0.metadata")
    assert not fs.exists(f"{path}/.metadata")


def test_objects_of_any_kind_come_back(url):
    saved = {"text": "x" * 100_000, "bytes": io.BytesIO(b"123"), "set": {1, 2}, "none": None}
    dcp.save(saved, storage_writer=TierWriter(url, **OPTIONS))
    found = dict.fromkeys(saved)
    found["bytes"] = io.BytesIO()
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS))
    assert found["text"] == saved["text"]
    assert found["set"] == {1, 2}


@pytest.mark.parametrize("how", ["save", "async_save"])
def test_a_state_larger_than_the_ram_tier_goes_through_it_in_waves(url, tmp_path, how, caplog):
    options = {"ram": "64MiB", "nvme": "256MiB", "state_dir": str(tmp_path / "small")}
    writer = TierWriter(url, ack="local", **options)
    saved = {f"layer{number}": noise(5 << 20, seed=number) for number in range(5)} | {"step": 7, "t": noise(30, 20).t()}
    live = copy.deepcopy(saved)
    if how == "save":
        dcp.save(live, storage_writer=writer)
    else:
        future = dcp.async_save(live, storage_writer=writer)
        live["layer3"].zero_()
        future.result()
    assert "goes through it in waves" in caplog.text
    found = empty_like(saved)
    dcp.load(found, storage_reader=TierReader(url, **options))
    assert same(found, saved)
    writer.wait("object", timeout=60)


def test_a_job_that_spans_hosts_saves_to_the_object_tier_at_once(url, monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    writer = TierWriter(url, ack="staged", **OPTIONS)
    for number in range(2):
        dcp.save(state(number), storage_writer=writer)
        assert writer.ack() == "object"
    assert caplog.text.count("the job spans hosts") == 1
