"""A plan that was made for one save serves the next one, unless the state differs in anything but values."""

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
    plan = StatePlan.of(state, {})
    change(state)
    assert plan.values_of(state, {}) is not None


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_a_state_that_differs_needs_another_plan(change):
    state = state_on()
    plan = StatePlan.of(state, {})
    change(state)
    assert plan.values_of(state, {}) is None


@pytest.mark.parametrize("change", [*FITTING.values(), *OTHERS.values()], ids=[*FITTING, *OTHERS])
def test_each_save_is_of_its_own_state(url, change):
    check_each_save_is_of_its_own_state(change, url, TierWriter(url, **OPTIONS), **OPTIONS)


def test_memory_that_was_freed_since_the_plan_is_refused(url):
    writer = TierWriter(url, **OPTIONS)
    state = {"a": torch.ones(100)[10:], "b": torch.ones(3)}
    dcp.save(writer.stage(state), storage_writer=writer)
    state["a"].untyped_storage().resize_(0)
    with pytest.raises(dcp.api.CheckpointException, match="memory was freed"):
        dcp.save(writer.stage(state), storage_writer=writer)
