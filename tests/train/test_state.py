"""A run that is restored from its complete state continues as if it had never stopped."""

import random
import re
from collections import Counter, deque
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.small_training import Training

from tierfs.errors import FormatError, InvalidInputError
from tierfs.train import Manager, TrainState
from tierfs.train.state import DictState
from tierfs.train.values import pack, unpack

OPTIONS = {"ram": "0", "nvme": "0", "save": ()}
MODEL = torch.nn.Linear(1, 1)
NOTHING = {"optimizer": None, "scheduler": None, "dataloader": None}


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(root):
    straight = Training(1)
    expected = [straight.step() for _ in range(12)]
    first = Training(1)
    with Manager(root, **OPTIONS) as run:
        losses = [first.step() for _ in range(7)]
        first.state.epoch = 3
        run.save(6, first.state)
        first.step()
    second = Training(2)
    with Manager(root, **OPTIONS) as run:
        restored = run.restore(second.state)
        assert (restored.step, restored.notes, restored.is_exact) == (6, (), True)
    assert (second.state.step, second.state.epoch) == (6, 3)
    assert losses + [second.step() for _ in range(5)] == expected
    assert second.state.extra["note"] == {"seen": 12}
    assert torch.equal(second.average.weight, straight.average.weight)
    assert second.state.learning_rates == straight.state.learning_rates


def test_a_light_checkpoint_has_weights_schedule_and_randomness(root):
    first = Training(1)
    with Manager(root, **OPTIONS) as run:
        for _ in range(7):
            first.step()
        run.save(6, first.state, kind="light")
        drawn = torch.get_rng_state()
    second = Training(2)
    with Manager(root, **OPTIONS) as run:
        restored = run.restore(second.state)
    assert (restored.kind, restored.is_exact) == ("light", False)
    assert torch.equal(second.model[0].weight, first.model[0].weight)
    assert second.scheduler.last_epoch == first.scheduler.last_epoch
    assert torch.equal(torch.get_rng_state(), drawn)
    assert second.optimizer.state_dict()["state"] == {}
    assert second.loader.at == 0


def test_weights_alone_can_be_restored(root):
    first, second = Training(1), Training(2)
    with Manager(root, **OPTIONS) as run:
        first.step()
        run.save(0, first.state)
        before = [torch.get_rng_state(), second.loader.state_dict()]
        second.state.step, second.state.epoch, first.state.epoch = 40, 4, 1
        restored = run.restore(second.state, only=["model.*"])
    assert torch.equal(second.model[0].weight, first.model[0].weight)
    assert (restored.is_exact, second.state.step, second.state.epoch) == (False, 40, 4)
    assert restored.notes[0].startswith(f"{len(restored.not_loaded)} saved values do not match only=['model.*']")
    assert {name.partition(".")[0] for name in restored.not_loaded} == {
        "optimizer", "scheduler", "scaler", "extra", "rank_0"
    }  # fmt: skip
    assert torch.equal(torch.get_rng_state(), before[0])
    assert second.loader.state_dict() == before[1]


class Watched:
    """A value that counts how often it is loaded."""

    loads = 0

    def state_dict(self):
        return {"x": torch.ones(2)}

    def load_state_dict(self, state):
        self.loads += 1


@pytest.mark.parametrize("make", [
    lambda watched: {"model": torch.ones(3), "watched": watched},
    lambda watched: TrainState(model=torch.nn.Linear(1, 1), extra={"watched": watched}, **NOTHING),
])  # fmt: skip
def test_the_rest_of_the_state_is_not_loaded(root, make):
    watched = Watched()
    state = make(watched)
    with Manager(root, **OPTIONS) as run:
        run.save(1, state).wait()
        run.restore(state, only="model*")
        assert watched.loads == 0
        assert run.restore(state).is_exact
        assert watched.loads == 1


def test_a_restore_into_another_dtype_is_not_exact(root):
    with Manager(root, **OPTIONS) as run:
        run.save(1, {"model": {"w": torch.ones(3), "b": torch.ones(2)}}).wait()
        live = {"model": {"w": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(2)}}
        restored = run.restore(live)
    assert live["model"]["w"].tolist() == [1.0] * 3
    assert restored.notes == ("1 saved values have another dtype than in the state, and are converted: ['model.w']",)
    assert not restored.is_exact


def test_a_parameter_outside_the_model_is_named(root):
    model = torch.nn.Linear(4, 8)
    optimizer = torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.zeros(5, 3))])
    state = TrainState(**{**NOTHING, "model": model, "optimizer": optimizer})
    with Manager(root, **OPTIONS) as run, pytest.raises(InvalidInputError, match=r"AdamW, has 1 .* shape \[5, 3\]"):
        run.save(1, state)


@pytest.mark.parametrize("missing", ["optimizer", "scheduler", "dataloader"])
def test_a_part_that_was_forgotten_is_an_error_when_it_is_saved(root, missing):
    given = Training(1).state
    parts = {name: getattr(given, name) for name in ("optimizer", "scheduler", "dataloader") if name != missing}
    with Manager(root, **OPTIONS) as run, pytest.raises(InvalidInputError, match=f"{missing}=None"):
        run.save(1, TrainState(model=given.model, **parts))


def test_a_loader_without_a_position_is_an_error(root):
    given = Training(1).state
    given.dataloader = torch.utils.data.DataLoader([1, 2])
    with Manager(root, **OPTIONS) as run, pytest.raises(InvalidInputError, match="StatefulDataLoader"):
        run.save(1, given)


def test_a_scheduler_that_the_optimizer_knows_of_is_missed(root):
    given = Training(1).state
    given.scheduler = None
    with Manager(root, **OPTIONS) as run, pytest.raises(InvalidInputError, match="the optimizer has a scheduler"):
        run.save(1, given)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner)
        | st.sets(st.integers())
    ),
    max_leaves=8,
)


@given(plain)
def test_plain_values_come_back(value):
    found = unpack(pack(value), "it")
    assert found == value
    assert type(found) is type(value)
    assert pack(found) == pack(value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 5)])
def test_tensors_come_back(dtype, shape):
    value = torch.randint(0, 2, shape).to(dtype)
    found = unpack(pack([value.t() if len(shape) == 2 else value]), "it")[0]
    assert found.dtype == dtype
    assert torch.equal(found, value.t() if len(shape) == 2 else value)


@pytest.mark.parametrize("view", [torch.conj, lambda value: value.conj().imag])
def test_a_tensor_that_is_a_lazy_view_comes_back(view):
    value = view(torch.tensor([1 + 2j, 3 - 4j]))
    assert value.is_conj() or value.is_neg()
    assert torch.equal(unpack(pack(value), "it"), value.resolve_conj().resolve_neg())


def test_arrays_numbers_and_generators_come_back():
    value = {
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "number": np.float32(0.1),
        "state": random.getstate(),
    }
    found = unpack(pack(value), "it")
    assert np.array_equal(found["array"], value["array"])
    assert found["array"].dtype == np.uint32
    assert (found["number"], type(found["number"])) == (np.float32(0.1), np.float32)
    assert found["state"] == random.getstate()


FIELDS = np.dtype([("a", "<i4"), (("long name", "b"), ">f8", (2,)), ("c", [("x", "i1"), ("y", "<M8[s]")])])


@pytest.mark.parametrize("dtype", [FIELDS, np.dtype([("a", "i1"), ("b", "i8")], align=True), np.dtype("V5")])
def test_structured_arrays_come_back(dtype):
    value = np.frombuffer(bytes(range(dtype.itemsize * 2)), dtype)
    found = unpack(pack({"array": value, "number": value[1]}), "it")
    assert found["array"].dtype == found["number"].dtype == dtype
    assert np.array_equal(found["array"], value)
    assert np.array_equal(found["number"], value[1])


def test_an_array_whose_fields_overlap_is_refused():
    dtype = np.dtype({"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 2]})
    with pytest.raises(InvalidInputError, match="cannot be saved exactly"):
        pack(np.zeros(2, dtype))


def test_values_that_were_packed_before_come_back():
    found = unpack('{"dict":[["a",{"array":["<f4",[2],"AACAPwAAAEA="]}],["b",{"array":["|V2",[1],"AQI="]}]]}', "it")
    assert found["a"].tolist() == [1.0, 2.0]
    assert found["b"].tobytes() == b"\1\2"
    assert pack(np.array([1, 2], "<f4")) == '{"array":["<f4",[2],"AACAPwAAAEA="]}'


class Bad:
    def __reduce__(self):
        return eval, ("1 + 1",)


def test_a_restore_runs_no_code_of_a_checkpoint():
    with pytest.raises(InvalidInputError, match="eval"):
        unpack(pack({"x": Bad()}), "it")


@pytest.mark.parametrize("text", ["{", '{"no such": 1}', '{"tensor": ["float33", [1], ""]}', '{"a": 1, "b": 2}'])
def test_a_malformed_packed_value_is_refused(text):
    with pytest.raises(FormatError):
        unpack(text, "it")


def test_the_milestones_of_a_scheduler_stay_a_counter():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])
    found = unpack(pack(scheduler.state_dict()), "it")["milestones"]
    assert (type(found), found) == (Counter, Counter([2, 4, 4]))


@pytest.mark.parametrize(
    "given",
    [
        lambda value: pack({"at": value}),
        lambda value: TrainState(model=MODEL, **NOTHING, extra={"x": value}).to_save(0, "full"),
        lambda value: TrainState(model=MODEL, **NOTHING, extra={"x": {"y": [value]}}).to_save(0, "full"),
        lambda value: DictState({"x": value}).to_save(0, "full"),
    ],
)
@pytest.mark.parametrize("value", [deque([1, 2], maxlen=3), np.arange(3).astype("M8[s]").astype(object), Path("a")])
def test_a_value_that_no_restore_would_load_is_refused(given, value):
    with pytest.raises(InvalidInputError, match=re.escape("torch.serialization.add_safe_globals([...])")):
        given(value)


def test_a_value_that_the_program_allows_comes_back():
    value = {"at": deque([1, 2], maxlen=3)}
    with torch.serialization.safe_globals([deque]):
        assert unpack(pack(value), "it") == value


class Lazy:
    """A data loader that makes its iterator when it is first needed, as torchdata's, and draws a number for it."""

    def __init__(self):
        self.iterator, self.at = None, 0

    def __iter__(self):
        if self.iterator is None:
            torch.rand(1)
            self.iterator = iter(range(self.at, 100))
        return self

    def __next__(self):
        self.at = next(self.iterator) + 1
        return self.at

    def state_dict(self):
        iter(self)
        return {"at": self.at}

    def load_state_dict(self, state):
        self.iterator, self.at = None, state["at"]


@pytest.mark.parametrize("batches", [0, 1])
def test_a_loader_that_draws_for_its_iterator_goes_on_exactly(root, batches):
    model = torch.nn.Linear(1, 1)
    loader = Lazy()
    for _ in range(batches):
        next(iter(loader))
    with Manager(root, **OPTIONS) as run:
        run.save(0, TrainState(model=model, optimizer=None, scheduler=None, dataloader=loader))
    expected = next(iter(loader)), torch.rand(1)
    other = Lazy()
    with Manager(root, **OPTIONS) as run:
        assert run.restore(TrainState(model=model, optimizer=None, scheduler=None, dataloader=other)).is_exact
    assert (next(iter(other)), torch.rand(1)) == expected


@pytest.mark.parametrize("is_dict", [False, True])
@pytest.mark.parametrize(
    ("of", "clears_first", "is_exact"), [(1, True, True), (4, True, True), (3, True, False), (3, False, False)]
)
def test_an_unfinished_accumulation_is_not_exact(root, is_dict, of, clears_first, is_exact):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in range(8):
        if clears_first and batch % of == 0:
            optimizer.zero_grad(set_to_none=False)
        model(torch.ones(2, 3)).sum().backward()
        if batch % of == of - 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if not clears_first:
                optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer}
    state = state if is_dict else TrainState(**{**NOTHING, **state})
    with Manager(root, **OPTIONS) as run:
        run.save(7, state)
        assert run.restore(state).is_exact is is_exact
