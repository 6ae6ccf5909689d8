"""A resumed run reads the samples of the uninterrupted run, or says why it does not."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

from torch.utils.data import BatchSampler, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tierfs.errors import InvalidInputError
from tierfs.train import Manager, TrainState

pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")  # torchdata calls it
OPTIONS = {"ram": "0", "nvme": "0", "save": ()}
EPOCHS = 2


class Items(Dataset):
    def __init__(self, length=48):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Wrapped:
    """A user's own loader around one of torchdata."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)

    def state_dict(self):
        return self.loader.state_dict()

    def load_state_dict(self, state):
        self.loader.load_state_dict(state)


class Run:
    def __init__(self, seed, sampler=DistributedSampler, workers=0, place="sampler", length=48, batch=3, wraps=False):
        torch.manual_seed(seed)
        items = Items(length)
        self.sampler = sampler(items, num_replicas=2, rank=0)
        if place == "sampler":
            given = {"sampler": self.sampler, "batch_size": batch}
        else:
            given = {"batch_sampler": BatchSampler(self.sampler, batch, drop_last=False)}
        loader = StatefulDataLoader(items, num_workers=workers, **given)
        self.loader = Wrapped(loader) if wraps else loader
        self.state = TrainState(model=torch.nn.Linear(1, 1), optimizer=None, scheduler=None, dataloader=self.loader)

    def batches(self, until=None):
        """Train to a step, or to the end. Return what each step draws."""
        found, step = [], self.state.step + 1
        for epoch in range(self.state.epoch, EPOCHS):
            self.state.epoch = epoch
            self.sampler.set_epoch(epoch)
            for batch in self.loader:
                found.append((batch.tolist(), torch.rand(1).item()))
                if step == until:
                    return found
                step += 1
        return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"workers": 2},
        {"sampler": StatefulDistributedSampler, "workers": 2},
        {"place": "batch_sampler"},
        {"wraps": True},
    ],
)
@pytest.mark.parametrize("stop", [7, 10])  # at the end of the first epoch, and in the second one
def test_a_distributed_sampler_goes_on_with_its_data(root, options, stop):
    expected = Run(1, **options).batches()
    first = Run(1, **options)
    with Manager(root, **OPTIONS) as run:
        found = first.batches(stop)
        run.save(stop, first.state)
    second = Run(2, **options)
    with Manager(root, **OPTIONS) as run:
        assert run.restore(second.state).is_exact
    assert found + second.batches() == expected


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"length": 64}, "length of the data set is 64, not 48"),
        ({"length": 40}, "length of the data set is 40, not 48"),
        ({"batch": 2}, "batch_size is 2, not 3"),
    ],
)
def test_other_data_is_not_exact(root, changed, text):
    first, second = Run(1), Run(2, **changed)
    with Manager(root, **OPTIONS) as run:
        first.batches(4)
        run.save(4, first.state)
        restored = run.restore(second.state)
    assert not restored.is_exact
    assert text in restored.notes[0]


@pytest.mark.parametrize("changed", [{"length": 20}, {"workers": 2}])
def test_data_without_the_saved_position_is_an_error(root, changed):
    first, second = Run(1), Run(2, **changed)
    with Manager(root, **OPTIONS) as run:
        first.batches(4)
        run.save(4, first.state)
        with pytest.raises(InvalidInputError, match=r"does not take its saved position: .* is \d+, not"):
            run.restore(second.state)
        second.state.dataloader = None
        restored = run.restore(second.state)
    assert "1 data loaders were saved, but the state has 0" in restored.notes[0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [2, 11, 16])
def test_a_shuffling_loader_with_a_generator_goes_on_with_its_data(root, workers, stop):
    def new(seed):
        generator = torch.Generator().manual_seed(seed)
        loader = StatefulDataLoader(Items(), batch_size=4, shuffle=True, generator=generator, num_workers=workers)
        return TrainState(model=torch.nn.Linear(1, 1), optimizer=None, scheduler=None, dataloader=loader)

    def batches(state, until=None):
        found, step = [], state.step + 1
        for epoch in range(state.epoch, EPOCHS):
            state.epoch = epoch
            for batch in state.dataloader:
                found.append(batch.tolist())
                if step == until:
                    return found
                step += 1
        return found

    expected, first, second = batches(new(1)), new(1), new(2)
    with Manager(root, **OPTIONS) as run:
        found = batches(first, stop)
        run.save(stop, first)
        assert run.restore(second).is_exact
    assert found + batches(second) == expected


def test_a_loader_in_a_dict_does_not_move_the_generators(root):
    def made():
        return {"loader": StatefulDataLoader(Items(20), batch_size=2, shuffle=True)}

    first, second = made(), made()
    batches = iter(first["loader"])
    next(batches)
    with Manager(root, **OPTIONS) as run:
        run.save(1, first).wait()
        expected = [next(batches).tolist(), torch.rand(1)]
        torch.manual_seed(5)
        assert run.restore(second).is_exact
    assert [next(iter(second["loader"])).tolist(), torch.rand(1)] == expected
