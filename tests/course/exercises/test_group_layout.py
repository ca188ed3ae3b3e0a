"""The exercises of notebook 01: solutions agree with the layout itself."""

from course.exercises.group_layout import group_lists, layout_for_cluster, rank_to_coordinates
from labkit.layout import ParallelLayout


def test_coordinates_are_those_of_the_layout():
    for rank, tp_size, dp_size in rank_to_coordinates.cases:
        pp_size = rank // (tp_size * dp_size) + 1
        coords = ParallelLayout(tp_size * dp_size * pp_size, tp_size, pp_size).coords(rank)
        got = rank_to_coordinates.solution_function(rank, tp_size, dp_size)
        assert got == (coords.tp, coords.dp, coords.pp)


def test_group_lists_are_those_of_the_layout():
    for world_size, tp_size, pp_size in group_lists.cases:
        layout = ParallelLayout(world_size, tp_size, pp_size, order="tp-dp-pp")
        got = group_lists.solution_function(world_size, tp_size, pp_size)
        assert list(got) == [layout.groups(axis) for axis in ("tp", "dp", "pp")]


def test_layout_for_cluster_is_the_largest_tensor_size_that_stays_inside():
    for world_size, gpus_per_node, replica in layout_for_cluster.cases:
        layouts = [ParallelLayout(world_size, t, replica // t) for t in range(1, replica + 1) if replica % t == 0]
        inside = [layout for layout in layouts if not layout.crossings("tp", gpus_per_node)]
        best = max(inside, key=lambda layout: layout.tp_size)
        got = layout_for_cluster.solution_function(world_size, gpus_per_node, replica)
        assert got == (best.tp_size, best.pp_size, best.dp_size)


def test_a_learners_own_wording_of_a_mistake_is_recognised():
    def my_coordinates(rank, tp_size, dp_size):
        data_ranks_before, tp_rank = divmod(rank, tp_size)
        return tp_rank, data_ranks_before, rank // (tp_size * dp_size)

    assert "never turns back to 0" in rank_to_coordinates.verdict(my_coordinates).text
