"""A plan that was made for one save serves the next one, unless the state differs in anything but values."""

from collections import UserDict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.plan_changes import FITTING, OTHERS, check_each_save_is_of_its_own_state, state_on

from tierfs.dcp import TierWriter
from tierfs.dcp.save.state_plan import StatePlan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
OPTIONS = {"ram": "256MiB", "nvme": "0"}


@pytest.mark.parametrize("change", FITTING.values(), ids=FITTING)
def test_values_and_addresses_may_differ(change):
    state = state_on()
    plan, _ = StatePlan.of(state, {})
    change(state)
    assert plan.values_of(state, {}) is not None


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_a_state_that_differs_needs_another_plan(change):
    state = state_on()
    plan, _ = StatePlan.of(state, {})
    change(state)
    assert plan.values_of(state, {}) is None


@pytest.mark.parametrize("change", [*FITTING.values(), *OTHERS.values()], ids=[*FITTING, *OTHERS])
def test_each_save_is_of_its_own_state(url, change):
    check_each_save_is_of_its_own_state(change, url, TierWriter(url, **OPTIONS), **OPTIONS)


once = {"a": torch.ones(2)}
ODD = {
    "a tensor in a tuple": ({"a": (torch.ones(2), 1), "b": torch.ones(3)}, 2, False),
    "a dict that occurs twice": ({"a": once, "b": [once]}, 1, False),
    "a mapping of another class": ({"a": UserDict(once), "b": once["a"]}, 1, False),
    "a tensor without memory": ({"a": torch._efficientzerotensor((3,)), "b": torch.ones(3)}, 2, False),
    "a tensor that is not stored": ({"a": torch.eye(2).to_sparse(), "b": torch.ones(3)}, 1, True),
}


@pytest.mark.parametrize(("state", "staged", "lasts"), ODD.values(), ids=ODD)
def test_any_state_has_a_plan_that_stages_each_tensor_once(state, staged, lasts):
    plan, values = StatePlan.of(state, {})
    assert (len(values.parts), plan.is_lasting) == (staged, lasts)


def test_memory_that_was_freed_since_the_plan_is_refused(url):
    writer = TierWriter(url, **OPTIONS)
    state = {"a": torch.ones(100)[10:], "b": torch.ones(3)}
    dcp.save(writer.stage(state), storage_writer=writer)
    state["a"].untyped_storage().resize_(0)
    with pytest.raises(dcp.api.CheckpointException, match="memory was freed"):
        dcp.save(writer.stage(state), storage_writer=writer)
