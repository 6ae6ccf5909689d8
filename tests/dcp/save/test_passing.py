"""One process stages a state, another one saves it, and every slot is released."""

import copy
import gc
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.opened import descriptors

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from support import passing_child
from support.torch_ranks import zygote
from test_writer import noise, same

import tierfs
from tierfs.dcp import TierReader, TierWriter
from tierfs.dcp.save.gpu_staging import GpuStaging
from tierfs.dcp.save.shard_file import ShardFile
from tierfs.dcp.stager import stage
from tierfs.errors import NotFoundError
from tierfs.host.slab.table.table import SlotKind, SlotState

OPTIONS = {"ram": "256MiB", "nvme": "0"}
DEADLINE_S = 20
MIB = 1 << 20

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


class Child:
    def __init__(self):
        self.conn, theirs = mp.Pipe()
        self.process = zygote.start(passing_child.serve, theirs, daemon=True)
        theirs.close()

    def ask(self, *request):
        self.conn.send(request)
        return self.answer()

    def answer(self):
        assert self.conn.poll(60)
        return self.conn.recv()

    def kill(self):
        self.process.kill()
        self.process.join()


@pytest.fixture(scope="module")
def shared_child():
    child = Child()
    yield child
    child.kill()


@pytest.fixture
def child(shared_child):
    yield shared_child
    shared_child.ask("drop")


@pytest.fixture
def mortal():
    child = Child()
    yield child
    child.kill()


@pytest.fixture
def url(tmp_path):
    tierfs.init(f"file://{tmp_path}/store")
    return f"tierfs::file://{tmp_path}/store/ck"


class Refusing(TierWriter):
    def write_data(self, plan, planner):
        raise tierfs.errors.AlreadyExistsError("not this one")


def state(tensors=5, seed=0):
    return {f"layer{number}.weight": noise(100 + number, 40, seed=seed + number) for number in range(tensors)} | {
        "large": noise(5 * MIB, dtype=torch.uint8, seed=seed),
        "whole": noise(17 * MIB, dtype=torch.uint8, seed=seed + 1),
        "none": torch.empty(0, 3),
        "step": seed,
    }


def tiers_of(url):
    return TierWriter(url, **OPTIONS)._address.open()[0].tiers


def chunks(url, *states):
    wanted = states or tuple(set(SlotState) - {SlotState.FREE})
    segments = tiers_of(url).ram.segments()
    return [slot for segment in segments for slot in segment.slots(kind=SlotKind.CHUNK, states=wanted)]


def until_nothing_is_there(url):
    """Wait until no chunk slot is in use. A thread releases the slots that nothing refers to."""
    ends = time.monotonic() + DEADLINE_S
    while chunks(url):
        assert time.monotonic() < ends, chunks(url)
        time.sleep(0.01)


def settled(url):
    """Wait until the ram tier holds nothing but clean copies."""
    ends = time.monotonic() + DEADLINE_S
    while True:
        left = [slot for slot in chunks(url) if slot.state is not SlotState.CLEAN]
        if not left:
            return
        assert time.monotonic() < ends, left
        time.sleep(0.02)


def check(url, expected):
    found = {key: torch.zeros_like(value) if torch.is_tensor(value) else -1 for key, value in expected.items()}
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS), no_dist=True)
    assert same(found, expected)


def test_another_process_saves_what_was_staged(url, child):
    writer, live = TierWriter(url, **OPTIONS), state()
    expected = copy.deepcopy(live)
    staged = writer.stage(live)
    child.ask("have", staged)
    for value in live.values():
        if torch.is_tensor(value):
            value.zero_()
    assert isinstance(child.ask("save", writer, url, None), int)
    check(url, expected)
    del staged
    gc.collect()
    settled(url)
    check(url, expected)


def test_it_is_handed_over_once_and_its_room_given_back(url, child):
    writer = TierWriter(url, **OPTIONS)
    staged = writer.stage(state())
    child.ask("have", staged)
    until_nothing_is_there(url)
    with pytest.raises(tierfs.errors.StoreError, match="stage it again"):
        child.ask("have", staged)
    with pytest.raises(BaseException, match="stage it again"):
        dcp.save(staged, storage_writer=writer, checkpoint_id=url, no_dist=True)


def test_tensors_have_their_values_over_there(url, child):
    child.ask("have", TierWriter(url, **OPTIONS).stage(state(seed=3)))
    assert same(child.ask("values"), state(seed=3))


def test_descriptors_and_mappings_do_not_grow_with_the_number_of_tensors(url, child):
    writer = TierWriter(url, **OPTIONS)
    child.ask("have", writer.stage({"first": noise(8)}))  # from now on there is a connection to the flusher
    before = child.ask("drop")
    for many in (10, 1000):
        staged = writer.stage({str(number): noise(8, seed=number) for number in range(many)})
        ours = descriptors()
        theirs = child.ask("have", staged)
        ends = time.monotonic() + DEADLINE_S
        while (descriptors() - ours).total() > 1:  # a flusher connection; a thread closes the others
            assert time.monotonic() < ends, descriptors() - ours
            time.sleep(0.01)
        assert len(theirs[0] - before[0]) <= 2
        assert (theirs[1] - before[1]).total() <= 1
        after = child.ask("drop")
        assert after[0] <= before[0]
        assert after[1] <= before[1]


def test_two_saves_overlap(url, child):
    writer = TierWriter(url, **OPTIONS)
    first, second = writer.stage(state(seed=1)), writer.stage(state(seed=2))
    for seed, staged in ((1, first), (2, second)):
        child.ask("have", staged)
        assert isinstance(child.ask("save", writer, f"{url}/{seed}", None), int)
    del first, second, staged
    for seed in (1, 2):
        check(f"{url}/{seed}", state(seed=seed))
    settled(url)


def test_two_saves_in_another_process_report_apart(url, child):
    # As in DCP's process mode: a thread for each save hands it over, and may get the answer of the other save.
    writer = TierWriter(url, **OPTIONS)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for seed, thread in ((1, first), (2, second)):
            staged = writer.stage(state(seed=seed))
            thread.submit(child.conn.send, ("have", staged)).result()
            thread.submit(child.conn.send, ("metadata", writer, f"{url}/{seed}")).result()
            del staged
        for ask in (writer.wait, writer.ack):
            with pytest.raises(NotFoundError, match="has not finished in this process"):
                ask()
        for thread in (second, first):
            thread.submit(child.answer).result()
            thread.submit(child.answer).result()
    assert writer.checkpoint_id == f"{url}/2"
    writer.wait("object", timeout=DEADLINE_S)
    assert writer.ack() == "object"
    assert writer.save_id == TierReader(f"{url}/2", **OPTIONS).read_metadata().storage_meta.save_id


def test_a_planner_over_there_may_save_other_values(url, child):
    writer = TierWriter(url, **OPTIONS)
    plain = {"a": noise(1000, seed=1).nan_to_num(), "b": noise(3 * MIB // 4, seed=2).nan_to_num()}
    child.ask("have", writer.stage(plain))
    assert child.ask("save", writer, url, passing_child.Halving()) == sum(value.nbytes for value in plain.values())
    check(url, {name: value / 2 for name, value in plain.items()})
    child.ask("drop")
    gc.collect()
    settled(url)


def test_a_save_that_fails_over_there_keeps_nothing(url, child):
    staged = TierWriter(url, **OPTIONS).stage(state())
    child.ask("have", staged)
    assert "AlreadyExists" in child.ask("save", Refusing(url, **OPTIONS), url, None)
    child.ask("drop")
    assert staged.keys() == state().keys()
    del staged
    gc.collect()
    until_nothing_is_there(url)


def test_a_state_passed_to_another_process_may_be_dropped(url, child):
    writer = TierWriter(url, **OPTIONS)
    child.ask("have", writer.stage(state(seed=4)))
    gc.collect()
    until_nothing_is_there(url)
    child.ask("save", writer, url, None)
    check(url, state(seed=4))
    settled(url)


def test_copies_and_plain_pickles_are_by_value(url):
    live = state()
    staged = TierWriter(url, **OPTIONS).stage(live)
    others = copy.deepcopy(staged), pickle.loads(pickle.dumps(staged))
    for value in staged.values():
        if torch.is_tensor(value):
            value.zero_()
    for other in others:
        assert same(other, live)


def test_other_tensors_go_as_ever(url, child):
    staged = TierWriter(url, **OPTIONS).stage(state())
    live = {"mine": noise(1000), "view": noise(10, 10)[2:5], "none": torch.empty(0)}
    child.ask("have", live)
    assert same(child.ask("values"), live)
    assert same(staged, state())


def test_private_staging_is_copied(url, child):
    store = TierWriter(url, **OPTIONS)._address.open(write=True)[0]
    child.ask("have", stage(state(), ShardFile(store, GpuStaging("ram", None), private=True)))
    assert child.ask("save", TierWriter(url, **OPTIONS), url, None) > 22 * MIB
    check(url, state())


def test_a_store_without_tiers_is_saved_to_as_ever(url, child):
    writer = TierWriter(url, ram="0", nvme="0")
    child.ask("have", writer.stage(state()))
    child.ask("save", writer, url, None)
    check(url, state())


def test_another_state_directory_over_there_gets_a_copy(url, child, tmp_path):
    staged = TierWriter(url, **OPTIONS).stage(state())
    child.ask("have", staged)
    elsewhere = TierWriter(url, **OPTIONS, state_dir=str(tmp_path / "other"))
    assert child.ask("save", elsewhere, url, None) > 22 * MIB
    elsewhere.wait("object", timeout=DEADLINE_S)
    check(url, state())
