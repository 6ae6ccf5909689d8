"""Which destinations share memory."""

import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from tierfs.dcp.load.items import Destinations


def test_names_that_share_memory_are_told_from_those_that_do_not():
    whole = torch.zeros(10, 10)
    found = Destinations()
    assert found.add("top", whole[:5])
    assert found.add("bottom", whole[5:])
    assert found.add("top", whole[2:4])
    assert found.add("third", torch.zeros(2, 2)[0])
    parts = torch.zeros(3, 3)
    assert all(found.add("parts", part) for part in (parts[1], parts[0], parts[2]))
    assert found.add("other", torch.zeros(1000))
    assert found.add("empty", whole[3:3])
    assert not found.add("row", whole[4])
    assert not found.add("all", whole)
    assert not found.add("column", whole[:, 3])
    assert not found.add("top", whole[4:6])
    assert found.add("top", whole[4])


@pytest.mark.parametrize("seed", range(20))
def test_as_a_look_at_each_pair_tells(seed):
    draw = random.Random(seed)
    memory = torch.zeros(300, dtype=torch.uint8)
    found, spans = Destinations(), {}
    for number in range(60):
        begin = draw.randrange(290)
        end = begin + draw.randint(1, 10)
        is_free = all(end <= other[0] or other[1] <= begin for other in spans.values())
        assert found.add(str(number), memory[begin:end]) == is_free
        if is_free:
            spans[str(number)] = begin, end
