"""A restore is called exact only if the state is the saved one, wherever the state has its modules and optimizers."""

import json

import pytest
import torch
from torch import nn

from tierfs.errors import InvalidInputError
from tierfs.session import open_store, parse_url
from tierfs.store import load, save
from tierfs.train import Manager, TrainState

OPTIONS = {"ram": "0", "nvme": "0", "save": ()}


class Made:
    """A model whose state has a second model beside it, and optimizers of both."""

    def __init__(self, kind):
        self.models = [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))]
        for each in self.models:
            each.register_buffer("scale", torch.zeros(2), persistent=False)
        self.optimizers = [torch.optim.Adam(each.parameters()) for each in self.models]
        (self.first, self.second), (one, other) = self.models, self.optimizers
        self.state = {"first": self.first, "second": self.second, "one": one, "other": other}
        if kind == "extra":
            extra = {"second": self.second, "other": other}
            self.state = TrainState(model=self.first, optimizer=one, scheduler=None, dataloader=None, extra=extra)
        elif kind == "object":
            self.state = {"first": Both(self.first, one), "second": Both(self.second, other)}

    def backward(self):
        self.second(torch.ones(1, 2)).sum().backward()


class Both:
    """A model and its optimizer with one state, as in torch's tutorial."""

    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])


KINDS = ("dict", "extra", "object")


def restored(root, saved, into):
    with Manager(root, **OPTIONS) as run:
        run.save(1, saved)
        run.wait()
        return run.restore(into)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_every_model_are_noted_and_dropped(root, kind):
    made = Made(kind)
    made.backward()
    found = restored(root, made.state, made.state)
    assert ["gradient accumulation" in note for note in found.notes] == [True]
    assert all(each.grad is None for each in made.second.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", [0, 1])
def test_buffers_of_every_model_are_compared(root, kind, which):
    made = Made(kind)
    made.models[which].scale.add_(1)
    (note,) = restored(root, made.state, Made(kind).state).notes
    assert "are in no checkpoint, and were others at the save" in note


@pytest.mark.parametrize("kind", KINDS)
def test_models_that_are_frozen_in_turn_are_compared(root, kind):
    made, other = Made(kind), Made(kind)
    made.first.requires_grad_(False)
    other.second.requires_grad_(False)
    assert not restored(root, made.state, other.state).is_exact


@pytest.mark.parametrize("kind", KINDS)
def test_equal_models_in_every_place_are_exact(root, kind):
    assert restored(root, Made(kind).state, Made(kind).state).notes == ()


def test_moments_of_an_optimizer_among_extra_values_come_back(root):
    made, other = Made("extra"), Made("extra")
    made.backward()
    made.optimizers[1].step()
    made.optimizers[1].zero_grad()
    assert restored(root, made.state, other.state).notes == ()
    moments = [each.optimizers[1].state[each.second[0].weight]["exp_avg"] for each in (made, other)]
    assert torch.equal(*moments)


def test_an_optimizer_with_parameters_in_another_order_is_noted(root):
    def made(order):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        parameters = list(model.parameters())
        return {"model": model, "optimizer": torch.optim.Adam([parameters[at] for at in order])}

    saved = made((0, 1, 2, 3))
    saved["model"](torch.ones(1, 2)).sum().backward()
    saved["optimizer"].step()
    saved["optimizer"].zero_grad()
    assert not restored(root, saved, made((2, 3, 0, 1))).is_exact


class Kept(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "slow": [1]}


def test_state_that_belongs_to_no_parameter_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidInputError, match="has state that belongs to no parameter: pass a dict"):
        TrainState(model=model, optimizer=Kept(model.parameters()), scheduler=None, dataloader=None).check()


def test_two_optimizers_of_one_parameter_are_refused():
    model = nn.Linear(2, 2)
    both = [torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())]
    with pytest.raises(InvalidInputError, match="another optimizer has parameters of the optimizer, a Adam, too"):
        TrainState(model=model, optimizer=both, scheduler=None, dataloader=None).check()


class Head(nn.Sequential):
    def state_dict(self, *args, **kwargs):
        return {name: each for name, each in super().state_dict(*args, **kwargs).items() if name[0] != "0"}

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return super().load_state_dict(state_dict, strict=False, assign=assign)


@pytest.mark.parametrize("kind", ["dict", "state"])
def test_parameters_that_no_state_dict_has_are_noted(root, kind):
    def made():
        model = Head(nn.Linear(2, 2), nn.Linear(2, 2))
        state = TrainState(model=model, optimizer=None, scheduler=None, dataloader=None)
        return state if kind == "state" else {"model": model}

    (note,) = restored(root, made(), made()).notes
    assert "2 values are in no checkpoint: the state_dict() of their module leaves them out" in note


class Casts:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = len(state["value"])


def test_a_value_that_was_saved_without_a_digest_is_noted(root):
    found = restored(root, {"part": Casts(bytearray(b"ab"))}, {"part": Casts(0)})
    assert "cannot be compared" in found.notes[0]


@pytest.mark.parametrize("value", [[1, [2, [3]]], [[1], (2,)], ((1,), [2]), {"a": [[{"b": 1}]]}])
def test_lists_within_lists_are_compared(root, value):
    changed = json.loads(json.dumps(value).replace("2", "5")) if isinstance(value, list) else value
    assert restored(root, {"value": value}, {"value": changed}).notes == ()


def test_a_frozenset_is_refused_when_it_is_saved(root):
    with Manager(root, **OPTIONS) as run, pytest.raises(InvalidInputError, match="which no restore would load"):
        run.save(1, {"value": [frozenset({1})]})


@pytest.mark.parametrize("unsaved", [None, [{}], 5])
def test_a_record_without_what_no_checkpoint_has_is_noted(root, unsaved):
    state = {"model": nn.Linear(2, 2)}
    with Manager(root, **OPTIONS) as run:
        run.save(1, state)
        run.wait()
        store, path = open_store(parse_url(root))
        record = json.loads(bytes(load(store, f"{path}/step_1/.record")))
        save(store, f"{path}/step_1/.record", json.dumps({**record, "unsaved": unsaved}).encode())
        assert not run.restore(state).is_exact


@pytest.mark.parametrize("history", [5, [["a", "b"]], [[[1, {"loss": "x"}]]], [[[1, 2]]]])
def test_a_history_of_rubbish_is_passed_over(root, history):
    state = {"model": nn.Linear(2, 2)}
    with Manager(root, **OPTIONS) as run:
        run.save(1, state)
        run.wait()
        store, path = open_store(parse_url(root))
        record = json.loads(bytes(load(store, f"{path}/step_1/.record")))
        save(store, f"{path}/step_1/.record", json.dumps({**record, "history": history}).encode())
        assert run.restore(state).is_exact
        assert not run.verify_resume(state).is_proven


def test_a_forced_save_keeps_another_epoch(root):
    state = TrainState(model=nn.Linear(2, 2), optimizer=None, scheduler=None, dataloader=None)
    with Manager(root, **OPTIONS) as run:
        run.save(1, state)
        state.epoch = 4
        run.save(1, state, force=True).wait()
        run.wait()
        state.epoch = 0
        assert run.restore(state).is_exact
    assert state.epoch == 4
