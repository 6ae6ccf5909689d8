"""How tensors are packed into chunks."""

import pytest

from tierfs.dcp.save.plan import plan_runs

KIB, MIB = 1 << 10, 1 << 20


def packs(*pieces):
    """Return the names of the tensors in each run, with the lengths of its chunks."""
    return [([pieces[number][0] for number in numbers], lengths) for numbers, lengths in plan_runs(pieces)]


def f32(name, length):
    return name, "float32", length


def test_small_tensors_of_a_dtype_are_packed_those_of_a_role_side_by_side():
    found = packs(f32("1.weight", 8), f32("0.weight", 4), ("0.mask", "bool", 1), f32("0.bias", 4))
    assert found == [(["0.mask"], (1,)), (["0.bias", "0.weight", "1.weight"], (16,))]


@pytest.mark.parametrize("length", [MIB - 1, MIB])
def test_a_role_behind_a_mebibyte_of_others_begins_a_chunk(length):
    # So adapters that are trained share no chunk with matrices that are not.
    lora = [f32("0.A", length // 2), f32("1.A", length - length // 2)]
    frozen = [f32(f"{number}.weight", 512 * KIB) for number in range(8)]
    runs = [len(run) for run, _ in packs(*lora, *frozen)]
    assert runs == ([10] if length < MIB else [2, 8])


def test_roles_that_take_little_together_are_one_request():
    # Examples are moments beside step counters, and the optimizer state of norms and biases.
    moments = [f32(f"{number}.exp_avg", MIB - 4) for number in range(3)]
    steps = [f32(f"{number}.step", 4) for number in range(3)]
    weights = [f32(f"{number}.weight", 256 * KIB) for number in range(4)]
    assert [len(run) for run, _ in packs(*moments, *steps, *weights)] == [10]
    assert [len(run) for run, _ in packs(*moments, *steps, *weights, f32("4.weight", 4))] == [6, 5]


@pytest.mark.parametrize("length", [MIB, 8 * MIB - 1, 8 * MIB])
def test_parts_of_a_matrix_on_many_ranks_are_packed(length):
    # A chunk is a request: without packing, 64 ranks would make one request for each MiB.
    lengths = [length for _, (length,) in packs(*[f32(f"{number:02}.weight", length) for number in range(32)])]
    assert sum(lengths) == 32 * length
    assert min(lengths) > 8 * MIB


def test_a_number_is_no_role_and_belongs_to_one_that_it_is_the_end_of():
    pieces = [f32(f"{number}.w{which}", MIB) for number in range(2) for which in (1, 2)]
    assert [run for run, _ in packs(*pieces)] == [["0.w1", "1.w1"], ["0.w2", "1.w2"]]
    names = [f"experts.{number}" for number in range(8)]
    assert packs(*[f32(name, 2 * MIB) for name in names]) == [(names, (16 * MIB,))]


def test_tensors_below_a_mebibyte_have_their_own_packs():
    # So norms that are trained share no chunk with matrices that are not.
    pieces = [
        f32(f"{number}.{name}.weight", length) for number in range(2) for name, length in (("a", MIB), ("n", KIB))
    ]
    assert [run for run, _ in packs(*pieces)] == [["0.n.weight", "1.n.weight"], ["0.a.weight", "1.a.weight"]]


def test_a_pack_ends_where_a_chunk_does():
    pieces = [f32(f"{number:02}.weight", MIB - 1) for number in range(20)]
    assert [lengths for _, lengths in packs(*pieces)] == [(16 * (MIB - 1),), (4 * (MIB - 1),)]


def test_a_large_tensor_begins_a_chunk_and_its_end_is_shared():
    found = packs(f32("c.weight", 33 * MIB), f32("d.weight", 15 * MIB), f32("e.weight", MIB), f32("a", 4))
    assert found == [
        (["a"], (4,)),
        (["c.weight", "d.weight"], (16 * MIB, 16 * MIB, 16 * MIB)),
        (["e.weight"], (MIB,)),
    ]


def test_runs_are_longer_where_that_makes_fewer_chunks_of_many():
    # Otherwise each tensor of 9 MiB would be a chunk.
    pieces = [f32(f"{number:03}.weight", 9 * MIB) for number in range(512)]
    found = packs(*pieces)
    assert [name for names, _ in found for name in names] == [piece[0] for piece in pieces]
    chunks = [length for _, lengths in found for length in lengths]
    assert sum(chunks) == 512 * 9 * MIB
    assert len(chunks) <= 1.03 * 512 * 9 / 16
    assert max(len(lengths) for _, lengths in found) <= 8


def test_a_run_of_several_tensors_is_a_small_part_of_all():
    # Each run needs contiguous memory.
    pieces = [f32(f"{number:03}.weight", 9 * MIB) for number in range(56)]
    assert packs(*pieces) == [([piece[0]], (9 * MIB,)) for piece in pieces]


def test_small_roles_join_a_chunk_that_has_room():
    lengths = {"0": 12, "1": 12, "2": 12, "3": 12, "4": 4, "5": 12, "6": 12, "7": 4, "8": 4}
    found = packs(*[f32(f"{name}.weight", length * MIB) for name, length in lengths.items()])
    together = [[name[0] for name in names] for names, _ in found]
    assert together == [["0", "4"], ["1"], ["2", "7"], ["3", "8"], ["5"], ["6"]]
