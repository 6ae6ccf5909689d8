"""`TierSavePlanner` writes what torch's planner writes, and plans a state once while nothing but values changes."""

import copy
from collections import UserDict

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp
from support.plan_changes import FITTING, OTHERS, state_on
from support.saved_files import content_of

from tierfs.dcp import TierReader, TierSavePlanner, TierWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
OPTIONS = {"ram": "256MiB", "nvme": "0"}


class App(dcp.stateful.Stateful):
    """Gives a new dict and new tensor objects at each call, as modules do."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return {"inner": dict(self.state), "view": self.state["model"]["layer3.weight"].detach()}


class Numbers(UserDict):
    """A mapping that no plan describes: DCP flattens it."""


def swaps_data(state):
    one, other = state["model"]["layer1.weight"], torch.randn(41)
    one.data = other
    state["optimizer"]["state"]["layer1.weight"]["exp_avg"].untyped_storage().resize_(4096)


def holds_a_tensor(state):
    state["mapping"]["b"] = torch.ones(2)


def nests_otherwise(state):
    state["mapping"]["c"] = {"0": {"d": 1}}


CHANGES = {
    **FITTING,
    **OTHERS,
    "nothing": lambda state: None,
    "swapped data": swaps_data,
    "a key in a mapping": lambda state: state["mapping"].update(e=1),
    "an order in a mapping": lambda state: state["mapping"].update(a=state["mapping"].pop("a")),
    "a tensor in a mapping": holds_a_tensor,
    "another path of the same name": nests_otherwise,
    "an object with elements": lambda state: state.update(numbers=([1, torch.ones(3)], 3)),
}


@pytest.fixture
def writers(url):
    return {name: TierWriter(f"tierfs::{url}/{name}", **OPTIONS) for name in ("ours", "torch")}


def save(writer, state, directory, **options):
    url = f"{writer.checkpoint_id.partition('/save-')[0]}/save-{directory}"
    return url, dcp.async_save(state, storage_writer=writer, checkpoint_id=url, **options).result()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_save_is_the_one_of_torchs_planner(writers, change):
    state = state_on()
    state["mapping"] = Numbers(a=1, b="x", c=[{"d": 1}])
    for number in range(5):
        if number == 2:
            change(state)
        planned = {"app": App(state), "again": state["model"]["layer4.weight"]}
        ours, _ = save(writers["ours"], planned, number, planner=TierSavePlanner())
        theirs, _ = save(writers["torch"], planned, number)
        assert content_of(ours, **OPTIONS) == content_of(theirs, **OPTIONS)


def test_saves_of_one_structure_share_their_plan(writers):
    state = state_on()
    planned = [save(writers["ours"], state, number, planner=TierSavePlanner())[1] for number in range(3)]
    state["model"]["layer0.weight"] = torch.ones(3)
    planned += [save(writers["ours"], state, number, planner=TierSavePlanner())[1] for number in (3, 4)]
    tables = [metadata.state_dict_metadata for metadata in planned]
    assert [table["step"] is tables[0]["step"] for table in tables] == [True, True, True, False, False]
    assert tables[3]["step"] is tables[4]["step"]
    tables[4].clear()
    assert len({metadata.storage_meta.save_id for metadata in planned}) == 5
    url, again = save(writers["ours"], state, 5, planner=TierSavePlanner())
    assert again.state_dict_metadata["model.layer0.weight"].size == (3,)
    found = {"model": {"layer0.weight": torch.zeros(3)}}
    dcp.load(found, storage_reader=TierReader(url, **OPTIONS))
    assert torch.equal(found["model"]["layer0.weight"], torch.ones(3))


def test_other_planners_make_plans_of_their_own(writers):
    class Halves(TierSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            self.state_dict = {name: value.half() for name, value in self.state_dict.items()}

    state = {"w": torch.arange(5.0), "v": torch.ones(3)}
    kinds = [TierSavePlanner, Halves, TierSavePlanner, dcp.DefaultSavePlanner, TierSavePlanner]
    unlike = {"flatten_state_dict": False}
    for number, planner in enumerate([*(kind() for kind in kinds), TierSavePlanner(**unlike), TierSavePlanner()]):
        _, metadata = save(writers["ours"], copy.copy(state), number, planner=planner)
        dtype = torch.float16 if type(planner) is Halves else torch.float32
        assert {each.properties.dtype for each in metadata.state_dict_metadata.values()} == {dtype}
        assert (metadata.planner_data is None) == (not planner.flatten_state_dict)


def test_a_state_that_was_not_staged_is_planned_as_torch_plans_it(writers):
    for number in range(2):
        urls = [f"{writer.checkpoint_id.partition('/save-')[0]}/save-{number}" for writer in writers.values()]
        for url, writer, planner in zip(urls, writers.values(), (TierSavePlanner(), None), strict=True):
            dcp.save({"w": torch.ones(3 + number)}, storage_writer=writer, checkpoint_id=url, planner=planner)
        assert content_of(urls[0], **OPTIONS) == content_of(urls[1], **OPTIONS)
