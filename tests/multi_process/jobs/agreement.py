"""Ranks that agree, that differ, and that say nothing; every error is caught where it is raised."""

import time

import isoshard as iso
from isoshard.core.processes.agreement import assert_equal


def start():
    iso.distributed.init_distributed(timeout=60)


def _refused(subject, value, ranks=None, timeout=30.0):
    try:
        assert_equal(subject, value, ranks, timeout=timeout)
    except iso.errors.DistributedError as error:
        return str(error)
    raise AssertionError(f"{subject} was agreed upon")


def check_the_same_is_agreed(world):
    for step in range(3):
        assert_equal("the layout", ((8, 4), "float32", step))


def check_another_mesh_is_named_in_every_rank(world):
    mesh = (4, 1) if world.rank == 1 else (2, 2)
    told = _refused("the mesh", mesh)
    assert "rank 1: the mesh: (4, 1)" in told, told
    others = ", ".join(str(rank) for rank in range(world.size) if rank != 1)
    assert f"{others}: the mesh: (2, 2)" in told, told


def check_another_shape_is_named_and_the_next_round_works(world):
    told = _refused("the shape of w", (8, 4 + (world.rank == world.size - 1)))
    assert f"rank {world.size - 1}: the shape of w: (8, 5)" in told, told
    assert_equal("the shape of w", (8, 4))


def check_another_order_is_named(world):
    first = "a" if world.rank else "b"
    told = _refused(f"the shape of {first}", (2,))
    assert "rank 0: the shape of b: (2,)" in told and "the shape of a: (2,)" in told, told


def check_long_values_are_compared_whole(world):
    value = list(range(5000))
    assert_equal("indices", value)
    value[-1] += world.rank == 0
    assert "sha256" in _refused("indices", value)


def check_disjoint_ranks_need_no_common_order(world):
    half = world.size // 2
    mine = range(half) if world.rank < half else range(half, world.size)
    for number in range(2 + 3 * (world.rank < half)):
        assert_equal("a sub-mesh", (number, world.rank < half), [*mine])
    told = _refused("a sub-mesh", world.rank, [*mine]) if half > 1 else "differ"
    assert "rank" in told or half == 1
    assert_equal("all again", 1)


def check_overlapping_sets_of_ranks(world):
    if world.rank < world.size - 1:
        assert_equal("without the last", world.size, range(world.size - 1))
    if world.rank:
        assert_equal("without the first", world.size, range(1, world.size))
    assert_equal("with all", world.size)


def check_ranks_that_do_not_take_part(world):
    others = [rank for rank in range(world.size) if rank != world.rank]
    assert f"rank {world.rank} takes no part in an agreement" in _refused("x", 1, others)
    assert "needs ranks beyond" in _refused("x", 1, [world.rank, world.size])


def check_a_silent_rank_is_named(world):
    silent = world.size - 1
    refused = [world.scratch / f"refused-{rank}" for rank in range(silent)]
    if world.rank != silent:
        assert_equal("they ask together", 1, range(silent))
        start = time.monotonic()
        told = _refused("the layout of b", 1, timeout=2.0)
        assert f"rank {silent} sent nothing about the layout of b within 2 s" in told, told
        assert 1.9 < time.monotonic() - start < 30
        refused[world.rank].touch()
    else:
        while not all(path.exists() for path in refused):
            time.sleep(0.01)
        assert f"rank {silent} sent nothing" in _refused("the layout of b", 1)  # it is told, too
    assert_equal("the layout of b, again", 1)


def check_a_silent_first_rank_is_named(world):
    if world.rank:
        assert_equal("they ask together", 1, range(1, world.size))
        told = _refused("the layout of c", 1, timeout=2.0)
        assert "rank 0 sent nothing about the layout of c within 2 s" in told, told


def check_the_others_go_on(world):
    if world.rank == 0:
        return  # it did not come to the last round: no more agreements with it
    ranks = range(1, world.size)
    for number in range(20):
        assert_equal("the others", number, ranks)
