"""How often ranks agree follows from what it costs."""

import pytest

from tierfs.train.agree import APART_S_MAX, Agreed, Agreement, World


class Slow(World):
    """Two ranks that say the same, after a while."""

    def __init__(self, cost_s, clock):
        self.rank, self.size, self.training, self.saving = 0, 2, None, None
        self.cost_s, self.clock = cost_s, clock

    def greatest(self, values, group):
        self.clock[0] += self.cost_s
        return list(values)


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
    agreed = 0
    for step in range(1000):
        clock[0] += step_s
        if agreement.is_due:
            agreement.agree(step, Agreed(), step_s)
            agreed += 1
        else:
            agreement.skip()
    assert agreement.every == pytest.approx(every, abs=1)
    assert agreed == pytest.approx(1000 / every, rel=0.2)
    assert agreement.every * step_s <= max(step_s, APART_S_MAX)


def test_one_slow_answer_is_somebody_who_was_late(clock):
    world = Slow(1e-4, clock)
    agreement = Agreement(world, 0)
    for step in range(5):
        world.cost_s = 3.0 if step == 3 else 1e-4
        agreement.agree(step, Agreed(), 0.2)
    assert agreement.every == 1


def test_one_rank_agrees_with_itself_at_once():
    world = World(1.0)
    agreement = Agreement(world, 0)
    mine = Agreed(wish=2, stop=True)
    assert (agreement.is_due, agreement.agree(1, mine, 1.0)) == (True, mine)
