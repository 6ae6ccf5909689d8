"""One process stages a state, another one saves it, and every slot is released."""

import copy
import pickle

import pytest
from support.waiting import HANG_S, until

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from support import passing_child
from support.torch_ranks import zygote
from test_writer import noise, same

import tierfs
from tierfs.dcp import TierReader, TierWriter
from tierfs.dcp.address import Address
from tierfs.errors import NotFoundError, StoreError
from tierfs.host.slab.table import SlotKind, SlotState

OPTIONS = {"ram": "256MiB", "nvme": "0"}
MIB = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture
def child():
    conn, theirs = mp.Pipe()
    process = zygote.start(passing_child.serve, theirs, daemon=True)
    theirs.close()
    yield conn
    process.kill()
    process.join()


@pytest.fixture
def url(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store/ck"


def state(tensors=5, seed=0):
    return {f"layer{number}.weight": noise(100 + number, 40, seed=seed + number) for number in range(tensors)} | {
        "large": noise(5 * MIB, dtype=torch.uint8, seed=seed),
        "whole": noise(17 * MIB, dtype=torch.uint8, seed=seed + 1),
        "none": torch.empty(0, 3),
        "step": seed,
    }


def until_no_slot_is_taken(url):
    """Wait until no chunk slot is in use. A thread releases the slots that nothing refers to."""
    segments = Address.of(url, OPTIONS).open()[0].tiers.ram.segments
    taken = set(SlotState) - {SlotState.FREE}
    until(lambda: not any(slot for segment in segments() for slot in segment.slots(kind=SlotKind.CHUNK, states=taken)))


def check(url, expected):
    found = {key: torch.zeros_like(value) if torch.is_tensor(value) else -1 for key, value in expected.items()}
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS), no_dist=True)
    assert same(found, expected)


def test_another_process_saves_what_was_staged(url, child, caplog):
    writer = TierWriter(url, **OPTIONS)
    for seed in range(2):
        live = state(seed=seed)
        staged = writer.stage(live)
        for value in live.values():
            if torch.is_tensor(value):
                value.zero_()
        child.send((staged, writer, f"{url}/{seed}"))
        if not seed:
            until_no_slot_is_taken(url)
        assert same(dict(staged), state(seed=seed))
        assert child.poll(HANG_S)
        assert child.recv() == f"{url}/{seed}"
        check(f"{url}/{seed}", state(seed=seed))
    assert caplog.text.count("another process saves the checkpoint") == 1
    # The writer here does not learn of these saves.
    for ask in (writer.wait, writer.ack):
        with pytest.raises(NotFoundError, match="ask a new TierWriter of the checkpoint's URL"):
            ask()
    other = TierWriter(f"{url}/1", **OPTIONS)
    other.wait("object")
    assert other.ack() == "object"


def test_a_state_that_was_saved_is_not_handed_over(url, child):
    writer = TierWriter(url, **OPTIONS)
    staged = writer.stage(state())
    dcp.save(staged, storage_writer=writer)
    with pytest.raises(StoreError, match="stage it again"):
        child.send(staged)


def test_copies_and_plain_pickles_are_by_value(url):
    live = state()
    staged = TierWriter(url, **OPTIONS).stage(live)
    others = copy.deepcopy(staged), pickle.loads(pickle.dumps(staged))
    for value in staged.values():
        if torch.is_tensor(value):
            value.zero_()
    for other in others:
        assert same(other, live)
