"""An optimizer goes on from a checkpoint as it would have gone on without one."""

import pytest
import torch

from tierfs.train import Manager, TrainState

OPTIONS = {"ram": "0", "nvme": "0", "save": ()}


class Heads(torch.nn.Module):
    """Two heads, of which training uses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.used, self.other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


def complete(model, optimizer):
    return TrainState(model=model, optimizer=optimizer, scheduler=None, dataloader=None)


def as_dict(model, optimizer):
    return {"model": model, "optimizer": optimizer}


def train(model, optimizer, steps=3, x=None):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3) if x is None else x).square().sum().backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("only", [(), ("model.*", "optimizer.*")], ids=["whole", "by patterns"])
@pytest.mark.parametrize("wrap", [complete, as_dict])
def test_moments_come_back_where_gradients_are_left(root, wrap, only):
    model = Heads()
    optimizer = adam(model)
    train(model, optimizer)
    with Manager(root, **OPTIONS) as run:
        run.save(1, wrap(model, optimizer))
    expected = train(model, optimizer)
    other = Heads()
    resumed = adam(other)
    other(torch.ones(3)).sum().backward()
    left = other.used.weight.grad.clone()
    with Manager(root, **OPTIONS) as run:
        run.restore(wrap(other, resumed), only=only)
    if only:
        assert torch.equal(other.used.weight.grad, left)
    else:  # a save has none
        assert other.used.weight.grad is None
    assert same(train(other, resumed), expected)


def test_a_complete_state_is_loaded_into_its_own_memory(root):
    model = Heads().used
    optimizer = adam(model)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    with Manager(root, **OPTIONS) as run:
        run.save(1, as_dict(model, optimizer)).wait()
        places = [each["exp_avg"].data_ptr() for each in optimizer.state.values()]
        run.restore(as_dict(model, optimizer))
    assert [each["exp_avg"].data_ptr() for each in optimizer.state.values()] == places


class Counting(torch.optim.SGD):
    """Counts its steps beside the states of its parameters."""

    def step(self, closure=None):
        self.state["steps"] = self.state.get("steps", 0) + 1
        return super().step(closure)


def test_state_of_the_optimizer_itself_comes_back(root):
    model = Heads()
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    other = Heads()
    resumed = Counting(other.parameters(), lr=0.1, momentum=0.9)
    with Manager(root, **OPTIONS) as run:
        run.save(1, as_dict(model, optimizer))
        assert run.restore(as_dict(other, resumed)).is_exact
    assert resumed.state["steps"] == 3


def test_moments_come_back_that_the_optimizer_lacks_now(root):
    model = Heads()
    optimizer = adam(model)
    for head in (model.used, model.other):
        head(torch.ones(3)).sum().backward()
    optimizer.step()
    with Manager(root, **OPTIONS) as run:
        run.save(1, complete(model, optimizer))
    other = Heads()
    resumed = adam(other)
    train(other, resumed)
    with Manager(root, **OPTIONS) as run:
        run.restore(complete(other, resumed))
    assert resumed.state_dict()["state"].keys() == {0, 1, 2, 3}


def test_a_save_before_the_first_step_changes_nothing(root):
    model = Heads()
    expected = train(model, adam(model))
    model = Heads()
    optimizer = adam(model)
    with Manager(root, **OPTIONS) as run:
        run.save(0, complete(model, optimizer))
        assert same(train(model, optimizer), expected)
        other = Heads()
        resumed = adam(other)
        run.restore(complete(other, resumed))
    assert same(train(other, resumed), expected)


def test_loading_weights_alone_leaves_a_new_optimizer_new(root):
    model = Heads()
    optimizer = adam(model)
    train(model, optimizer)
    with Manager(root, **OPTIONS) as run:
        run.save(1, complete(model, optimizer))
        other = Heads()
        resumed = adam(other)
        run.restore(complete(other, resumed), only=["model.*"])
    assert resumed.state_dict()["state"] == {}
    assert same(other.state_dict(), model.state_dict())


def test_optimizers_with_and_without_state_come_back(root):
    def made():
        model = Heads()
        return model, [torch.optim.SGD(model.other.parameters(), lr=0.1), adam(model.used)]

    model, optimizers = made()
    train(model, optimizers[1])
    optimizers[0].param_groups[0]["lr"] = 0.5
    with Manager(root, **OPTIONS) as run:
        run.save(1, complete(model, optimizers))
    expected = train(model, optimizers[1])
    other, resumed = made()
    with Manager(root, **OPTIONS) as run:
        run.restore(complete(other, resumed))
    assert resumed[0].param_groups[0]["lr"] == 0.5
    assert same(train(other, resumed[1]), expected)


def test_saved_values_without_a_place_are_named(root):
    with Manager(root, **OPTIONS) as run:
        run.save(1, {"model": torch.ones(3), "average": torch.ones(3), "note": "seen"})
        restored = run.restore({"model": torch.zeros(3)})
    assert not restored.is_exact
    assert "2 saved values have no place in the state" in restored.notes[0]
    assert "'average', 'note'" in restored.notes[0]
    assert restored.not_loaded == ("average", "note")


def test_patterns_name_only_matching_values(root):
    with Manager(root, **OPTIONS) as run:
        run.save(1, {"model": torch.ones(3), "average": torch.ones(3), "note": "seen"})
        restored = run.restore({"model": torch.zeros(3)}, only=["model", "n*"])
    assert [note.rpartition(": ")[2] for note in restored.notes] == [
        "['average', 'rank_0.tierfs.rng']",
        "['note']",
    ]
    assert restored.not_loaded == ("average", "rank_0.tierfs.rng", "note")


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.5)


def test_a_save_that_fails_leaves_an_optimizer_as_it_is(root):
    model = Heads()
    optimizer = lbfgs(model)
    with Manager(root, **OPTIONS) as run:
        handle = run.save(0, complete(model, optimizer))
        handle.settle(30)
    assert isinstance(handle.error, TypeError)  # torch steps it without a closure
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state
    assert model.used.weight.grad is None


def test_an_optimizer_that_cannot_be_prepared_is_named(root, caplog):
    model = Heads()
    optimizer = lbfgs(model)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(3)) - 1).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    other = Heads()
    with Manager(root, **OPTIONS) as run:
        run.save(1, as_dict(model, optimizer))
        restored = run.restore(as_dict(other, lbfgs(other)))
    assert "a LBFGS can load only the state that it has already" in caplog.text
    assert "optimizer.state.0" in restored.notes[0]
    assert same(other.state_dict(), model.state_dict())


class Filled(torch.optim.Adam):
    """An optimizer that gives loaded state a value that an earlier version did not save."""

    def __setstate__(self, state):
        super().__setstate__(state)
        for each in self.state.values():
            each.setdefault("seen", 0)


@pytest.mark.parametrize("wrap", [complete, as_dict])
def test_a_value_that_only_the_load_makes_is_kept(root, wrap):
    model, other = Heads(), Heads()
    optimizer, resumed = (Filled(each.parameters(), lr=0.1) for each in (model, other))
    train(model, optimizer)
    with Manager(root, **OPTIONS) as run:
        run.save(1, wrap(model, optimizer))
        assert run.restore(wrap(other, resumed)).step == 1
    assert {each["seen"] for each in resumed.state.values()} == {0}
    assert same(train(other, resumed), train(model, optimizer))
