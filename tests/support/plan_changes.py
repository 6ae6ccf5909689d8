"""A training state, and changes of it: those that a plan of its save survives, and those that need another plan."""

import copy
from collections import OrderedDict

import torch
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_leaves

from tierfs.dcp import TierLoadPlanner, TierReader


def state_on(own=lambda tensor: tensor):
    """Return a state, of tensors that ``own`` puts on a device, and others."""
    model = OrderedDict((f"layer{at}.weight", own(torch.randn(40 + at))) for at in range(5))
    model._metadata = {"layer": {"version": 1}}
    return {
        "model": model,
        "optimizer": {
            "state": {name: {"step": torch.tensor(1.0), "exp_avg": own(torch.randn(7, 9))} for name in model},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "extra": []}],
        },
        "matrix": own(torch.randn(6, 8)).t(),
        "complex": torch.randn(9, dtype=torch.complex64),
        "empty": torch.empty(0, 3),
        "numbers": ([1, 2], 3),
        "step": 3,
        "none": None,
    }


def weight(state, of=None):
    if of is not None:
        state["model"]["layer0.weight"] = of
    return state["model"]["layer0.weight"]


def of_another_key(state):
    state["model"]["another"] = state["model"].pop("layer2.weight")


def with_other_lists(state):
    state["optimizer"]["param_groups"][0]["extra"].append(torch.ones(3))


def steps_on(state):
    """Change values alone."""
    state["step"] += 1
    state["numbers"][0].append(4)
    state["optimizer"]["param_groups"][0]["lr"] = 0.2
    state["optimizer"]["state"]["layer1.weight"]["step"] += 1


def moves(state):
    """Give a tensor other memory, as `load_state_dict` with ``assign=True`` does."""
    state["matrix"] = torch.randn(6, 8).t()
    state["complex"].data = torch.randn(9, dtype=torch.complex64)


FITTING = {"values": steps_on, "host memory": moves, "new objects": lambda state: state.update(copy.copy(state))}
OTHERS = {
    "resized": lambda state: weight(state).resize_(80),
    "other shape": lambda state: weight(state, weight(state).view(4, 10)),
    "other dtype": lambda state: setattr(weight(state), "data", weight(state).double()),
    "transposed": lambda state: state["optimizer"]["state"]["layer0.weight"]["exp_avg"].t_(),
    "contiguous": lambda state: state.update(matrix=state["matrix"].contiguous()),
    "negated": lambda state: weight(state, torch._neg_view(weight(state))),
    "a subclass": lambda state: weight(state, torch.nn.Parameter(weight(state))),
    "a number": lambda state: weight(state, 7),
    "an object is a tensor": lambda state: state.update(none=torch.ones(3)),
    "a tensor twice": lambda state: state.update(again=weight(state)),
    "one tensor instead of two": lambda state: state["optimizer"]["state"].update(
        {"layer0.weight": state["optimizer"]["state"]["layer1.weight"]}
    ),
    "renamed": of_another_key,
    "another order": lambda state: state["model"].move_to_end("layer0.weight"),
    "one key less": lambda state: state.pop("empty"),
    "a list that was empty": with_other_lists,
    "metadata of a module": lambda state: state["model"]._metadata["layer"].update(version=2),
}


def check_each_save_is_of_its_own_state(
    change, url, writer, own=lambda tensor: tensor, launch=lambda task: task(), **options
):
    """Save a state four times, changed before the third time, and load each.

    Args:
        change: Changes the state.
        url: Where to save.
        writer: A `TierWriter`.
        own: See `state_on`.
        launch: Runs a task of training behind the work that was queued on the device before.
        options: Of the writer, for the reader.
    """
    state = state_on(own)
    for number in range(4):
        if number == 2:
            change(state)
        expected = copy.deepcopy(state)
        staged = writer.stage(state)
        state["numbers"][0].append(5)
        for tensor in [*state["model"].values(), state["optimizer"]["state"]["layer3.weight"]["exp_avg"]]:
            if isinstance(tensor, torch.Tensor):
                launch(lambda tensor=tensor: tensor.detach().add_(1))
        dcp.save(staged, checkpoint_id=f"{url}/{number}", storage_writer=writer)
        found = copy.deepcopy(expected)
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                tensor.detach().zero_()
        dcp.load(found, storage_reader=TierReader(f"{url}/{number}", **options), planner=TierLoadPlanner())
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)  # `resize_` sets no value
