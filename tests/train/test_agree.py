"""How often ranks agree depends on the cost of an agreement."""

import pytest

from tierfs.train.agree import APART_S_MAX, Agreed, Agreement, World


class Slow(World):
    """Two ranks that agree on this rank's values after `cost_s` seconds of the fake clock."""

    def __init__(self, cost_s, clock):
        self.rank, self.size, self.training, self.saving = 0, 2, None, None
        self.cost_s, self.clock = cost_s, clock

    def begin_greatest(self, values, group):
        def end():
            self.clock[0] += self.cost_s
            return list(values)

        return end


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tierfs.train.agree.time.perf_counter", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("cost_s", "step_s", "every"), [(1e-4, 0.2, 1), (1e-4, 0.01, 10), (1e-3, 0.1, 10), (1.0, 0.1, 20), (1e-4, 10, 1)]
)
def test_agreeing_takes_a_thousandth_of_the_steps(clock, cost_s, step_s, every):
    agreement = Agreement(Slow(cost_s, clock), 0)
    sent = []

    def tell():
        sent.append(step)
        return Agreed(signal=step)

    for step in range(1000):
        clock[0] += step_s
        received = agreement.receive().signal
        assert received == (sent[-1] if sent and sent[-1] == step - 1 else 0)
        agreement.send(step, tell, step_s)
    agreed = len(sent)
    assert agreement.every == pytest.approx(every, abs=1)
    assert agreed == pytest.approx(1000 / every, rel=0.2)
    assert agreement.every * step_s <= max(step_s, APART_S_MAX)


def test_one_slow_answer_is_somebody_who_was_late(clock):
    world = Slow(1e-4, clock)
    agreement = Agreement(world, 0)
    for step in range(6):
        world.cost_s = 3.0 if step == 3 else 1e-4
        agreement.receive()
        agreement.send(step, Agreed, 0.2)
    assert agreement.every == 1


def test_a_reason_that_all_ranks_have_is_enough(clock):
    agreement = Agreement(Slow(1.0, clock), 0)
    told = []
    for step in range(40):
        agreement.receive()
        agreement.send(step, lambda: told.append(1) or Agreed(), 0.1, now=step > 30)
    assert agreement.every == 20
    assert len(told) == 3 + 9


def test_one_rank_knows_its_own_values():
    world = World(1.0)
    assert world.begin_greatest((1, -2), None)() == [1, -2]
    assert world.gather("x", None) == ["x"]
    assert world.from_first("x", None) == "x"
