"""The grids say what the layout says: a box for each rank in its node, tinted and lettered by its group."""

from itertools import pairwise

import pytest

from course.pictures.layout import axes_in_use, describe_groups, draw_layout, draw_orders
from course.pictures.scene import MARGIN, NARROWEST, WIDTH, is_inside, text_width
from course.pictures.style import AXIS_COLOR, TINTS, group_letter, tint
from course.sizing import Traffic
from labkit.layout import ParallelLayout
from tests.support.pictures import marks, texts

TWO_NODES = ParallelLayout(16, tp_size=2, pp_size=4, order="tp-dp-pp")


def gpus(scene, layout, axis, prefix=""):
    """The box of each rank in the grid of an axis."""
    return [scene.by_key[f"{prefix}{axis}.gpu{rank}"] for rank in range(layout.world_size)]


@pytest.mark.parametrize("axis", ["tp", "dp", "pp"])
def test_each_box_has_the_tint_the_letter_and_the_number_of_its_rank(axis):
    boxes = gpus(draw_layout(TWO_NODES), TWO_NODES, axis)
    for index, group in enumerate(TWO_NODES.groups(axis)):
        for rank in group:
            assert boxes[rank].text == f"{group_letter(index)}\n{rank}"
            assert boxes[rank].fill == tint(AXIS_COLOR[axis], TINTS[index % len(TINTS)])


def test_boxes_stand_in_their_node():
    scene = draw_layout(TWO_NODES)
    for axis in axes_in_use(TWO_NODES):
        for rank, mark in enumerate(gpus(scene, TWO_NODES, axis)):
            frame = scene.by_key[f"{axis}.node{rank // 8}"]
            assert frame.x < mark.x and mark.x + mark.width < frame.x + frame.width
            assert frame.y < mark.y and mark.y + mark.height < frame.y + frame.height


def test_pointing_at_a_gpu_lights_its_peers_on_every_axis_and_says_its_groups():
    scene = draw_layout(TWO_NODES)
    for axis in axes_in_use(TWO_NODES):
        boxes = gpus(scene, TWO_NODES, axis)
        lit = [rank for rank, mark in enumerate(boxes) if set(mark.tags) & set(gpus(scene, TWO_NODES, "tp")[6].lights)]
        assert lit == TWO_NODES.group_of(6, axis)
    facts = [mark.fact for mark in scene.marks if mark.same == "gpu6"]
    assert facts == ["GPU 6: tensor group D [6, 7]", "data group C [4, 6]", "pipeline group C [2, 6, 10, 14]"]


def test_ways_are_as_wide_as_the_bytes_and_dashed_where_they_leave_a_node():
    traffic = {"tp": Traffic(4e12, 0), "dp": Traffic(1e12, 0), "pp": Traffic(2e12, 1e12)}
    layout = ParallelLayout(16, tp_size=2, pp_size=4, order="pp-tp-dp")  # no two peers beside each other
    scene = draw_layout(layout, traffic=traffic, traffic_of="a model", gpus_per_node=4)
    tensor, data = (scene.by_key[f"{axis}.ring0"] for axis in ("tp", "dp"))
    assert tensor.edge_width > data.edge_width
    assert (tensor.dashed, data.dashed) == (True, True)
    assert data.fact == "data group A: leaves its node, 1 TB a step in all data groups"
    box = gpus(scene, layout, "tp")[0]
    assert (tensor.x, tensor.y) == (box.x + box.width / 2, box.y + box.height / 2)


def test_peers_side_by_side_have_an_outline_around_them_and_nobody_else():
    scene = draw_layout(TWO_NODES)
    for axis in ("tp", "dp"):
        boxes = gpus(scene, TWO_NODES, axis)
        for index, group in enumerate(TWO_NODES.groups(axis)):
            outline = scene.by_key[f"{axis}.outline{index}.0"]
            inside = [
                rank for rank, mark in enumerate(boxes)
                if outline.x < mark.x and mark.right < outline.right
                and outline.y < mark.y and mark.bottom < outline.bottom
            ]  # fmt: skip
            assert inside == group and scene.marks.index(outline) < scene.marks.index(boxes[group[0]])
            assert set(outline.lights) <= set(boxes[group[0]].tags)
    assert not marks(scene, "pp.outline")


def test_a_group_that_leaves_its_node_has_an_outline_in_each_and_a_way_between():
    layout = ParallelLayout(16, tp_size=8, order="dp-tp-pp")
    scene = draw_layout(layout)
    assert [mark.key for mark in marks(scene, "tp.outline0")] == ["tp.outline0.0", "tp.outline0.1"]
    way, boxes = scene.by_key["tp.ring0"], gpus(scene, layout, "tp")
    ends = [(way.x + x, way.y + y) for x, y in (way.points[0], way.points[-1])]
    assert ends == [(boxes[rank].x + boxes[rank].width / 2, boxes[rank].y + boxes[rank].height / 2) for rank in (0, 8)]


def test_of_ways_only_that_of_the_first_group_is_seen_until_one_points_at_a_gpu():
    ways = marks(draw_layout(TWO_NODES), "pp.ring")
    assert [mark.shy for mark in ways] == [False, True, True, True] and all(mark.dashed for mark in ways)


@pytest.mark.parametrize("world_size", [16, 32, 48, 64])
def test_up_to_64_gpus_carry_their_letter_and_their_number(world_size):
    layout = ParallelLayout(world_size, 4, 2)
    texts = [mark.text.split("\n") for mark in gpus(draw_layout(layout), layout, "pp")]
    assert [number for _, number in texts] == [str(rank) for rank in range(world_size)]


def test_what_a_box_is_stands_above_the_picture():
    assert draw_layout(TWO_NODES).journeys[""].startswith("Outlined: peers in one node.")
    assert draw_layout(ParallelLayout(128, 8, 4)).journeys[""].startswith("A box is a node of 8 GPUs.")


@pytest.mark.parametrize("other", [ParallelLayout(16, 2, 4, order="tp-pp-dp"), ParallelLayout(16, 8, 1)])
def test_a_gpu_stays_where_it_is_whatever_its_groups(other):
    drawn = [draw_layout(layout) for layout in (TWO_NODES, other)]
    one, two = ({mark.key: (mark.x, mark.y, mark.same) for mark in scene.marks if mark.same} for scene in drawn)
    assert one == two
    assert [scene.by_key["dp.gpu6"].text for scene in drawn] == ["C\n6", "G\n6"]


@pytest.mark.parametrize("world_size", [16, 64, 128, 256, 1024])
def test_letters_can_be_read_however_many_gpus(world_size):
    layout = ParallelLayout(world_size, 4, 4)
    boxes = [mark for mark in draw_layout(layout).marks if mark.same]
    assert all(mark.text and mark.size >= 11 for mark in boxes)
    assert len(boxes) == 3 * (world_size if world_size <= 64 else world_size // 8)


def test_many_gpus_are_nodes_with_as_many_tints_as_there_are_kinds_of_groups():
    layout = ParallelLayout(1024, 8, 8)
    blocks = marks(draw_layout(layout), "dp.block")
    kinds = {mark.tags for mark in blocks}
    assert len({mark.fill for mark in blocks}) == len(kinds) == 8
    assert (blocks[0].fact, blocks[0].text) == ("data groups A to H", "0")
    assert (first := next(mark for mark in draw_layout(layout).marks if mark.same == "node1")).key == "tp.block1"
    assert [mark.text for mark in blocks] == [str(number) for number in range(128)]
    assert first.fact == "A box is a node. Click node 1 to see its GPUs 8 to 15: tensor group B"


def test_links_go_around_boxes():
    layout = ParallelLayout(16, 2, 4)
    scene = draw_layout(layout)
    for axis in axes_in_use(layout):
        boxes = gpus(scene, layout, axis)
        for index, group in enumerate(layout.groups(axis)):
            ring, others = scene.by_key.get(f"{axis}.ring{index}"), {*range(16)} - {*group}
            if axis != "pp":
                assert ring is None  # an outline says it
                continue
            points = [(ring.x + x, ring.y + y) for x, y in ring.points]
            for (x, y), (to_x, to_y) in pairwise(points):
                for step in range(21):
                    px, py = x + (to_x - x) * step / 20, y + (to_y - y) * step / 20
                    hit = [
                        r
                        for r in others
                        if 0 < px - boxes[r].x < boxes[r].width and 0 < py - boxes[r].y < boxes[r].height
                    ]
                    assert not hit, (axis, group, hit)


def test_a_node_can_be_seen_alone():
    layout = ParallelLayout(1024, 8, 8)
    scene = draw_layout(layout, node=5)
    ranks = [mark.text.split("\n")[1] for mark in marks(scene, "tp.") if mark.same]
    assert ranks == [str(rank) for rank in range(40, 48)] and "all nodes" in scene.by_key


@pytest.mark.parametrize(
    ("layout", "axis", "expected"),
    [
        (TWO_NODES, "tp", "8 groups of 2, each inside a node"),
        (TWO_NODES, "pp", "4 groups of 4, all cross nodes"),
        (ParallelLayout(16, pp_size=16), "dp", "16 groups of 1: nobody to talk to"),
        (ParallelLayout(16, tp_size=16), "tp", "1 group of 16, crosses nodes"),
        (ParallelLayout(24, tp_size=6), "tp", "4 groups of 6, 2 cross nodes"),
        (ParallelLayout(8, tp_size=8), "tp", "1 group of 8, inside a node"),
    ],
)
def test_headings(layout, axis, expected):
    assert describe_groups(layout, axis, 8) == expected


def test_both_orders_side_by_side_differ_in_data_and_pipeline_only():
    other = ParallelLayout(16, 2, 4, order="tp-pp-dp")
    scene = draw_orders([TWO_NODES, other])
    same = []
    for axis in axes_in_use(TWO_NODES):
        one, two = (
            [mark.text for mark in gpus(scene, *each)] for each in ((TWO_NODES, axis, "0."), (other, axis, "1."))
        )
        same.append(one == two)
    assert same == [True, False, False]


def test_a_row_says_how_many_groups_there_are_and_whose():
    table = draw_layout(TWO_NODES).table
    assert table.heads == ["axis", "groups", "cross nodes", "ranks"]
    tensor, _, pipeline = table.rows
    assert tensor[:3] == ["tensor (tp 2)", "8 of 2", "none"]
    assert pipeline == [
        "pipeline (pp 4)", "4 of 4", "4",
        "A [0, 4, 8, 12] B [1, 5, 9, 13] C [2, 6, 10, 14] D [3, 7, 11, 15]",
    ]  # fmt: skip
    assert [row[0] for row in draw_layout(ParallelLayout(16, 2, 2, 2)).table.rows][1] == "context (cp 2)"


def test_bytes_are_those_of_the_traffic_and_long_lists_are_counted():
    traffic = dict.fromkeys(("tp", "dp", "pp"), Traffic(4e12, 0))
    table = draw_layout(ParallelLayout(1024, 8, 8), traffic=traffic, traffic_of="a model").table
    assert table.rows[0][3:5] == ["4 TB", "none"]
    assert table.rows[0][-1].endswith("P [120, 121, 122, 123, 124, 125, 126, 127] and 112 more")
    assert table.caption == "Bytes of a model."


SIXTEEN = ParallelLayout(16, tp_size=2, pp_size=2, cp_size=2, ep_size=4, expert_tp_size=1)


def test_two_grids_stand_side_by_side_with_the_pipeline_once():
    scene = draw_layout(SIXTEEN)
    assert axes_in_use(SIXTEEN) == ["tp", "cp", "dp", "pp", "expert_tp", "ep", "expert_dp"]
    columns = [mark.x for axis in axes_in_use(SIXTEEN) for mark in [scene.by_key[f"{axis}.title"]]]
    assert columns == [0, 0, 0, 0, 470, 470, 470] and texts(scene, "grid") == ["Dense layers", "Experts"]
    assert [mark.text for mark in scene.marks if mark.text.startswith("pipeline")] == ["pipeline groups"]
    assert scene.by_key["pp.says"].text == "in both grids: 8 groups of 2, all cross nodes"
    rows = {row[0]: row[-1] for row in scene.table.rows}
    assert rows["expert (ep 4)"] == "A [0, 1, 2, 3] B [4, 5, 6, 7] C [8, 9, 10, 11] D [12, 13, 14, 15]"
    assert rows["expert data (expert_dp 2)"].startswith("A [0, 4] B [1, 5] C [2, 6]")
    assert rows["context (cp 2)"].startswith("A [0, 2] B [1, 3] C [4, 6]")
    assert rows["data (dp 2)"].startswith("A [0, 4] B [1, 5] C [2, 6] D [3, 7] E [8, 12]")


def test_a_gpu_lights_its_peers_in_both_grids_and_says_which_experts_it_has():
    scene = draw_layout(SIXTEEN, num_experts=16)
    lights = gpus(scene, SIXTEEN, "ep")[6].lights
    for axis in axes_in_use(SIXTEEN):
        assert set(gpus(scene, SIXTEEN, axis)[6].lights) == set(lights)
        boxes = gpus(scene, SIXTEEN, axis)
        assert [rank for rank, box in enumerate(boxes) if set(box.tags) & set(lights)] == SIXTEEN.group_of(6, axis)
    assert [mark.fact for mark in scene.marks if mark.same == "gpu6"][-3:] == [
        "expert tensor group G [6]", "expert group B [4, 5, 6, 7]: experts 8 to 11", "expert data group C [2, 6]",
    ]  # fmt: skip
    assert "in this order, experts 0 to 3; experts 4 to 7; experts 8 to 11; experts 12 to 15." in scene.table.caption
    assert gpus(draw_layout(SIXTEEN, num_experts=4), SIXTEEN, "ep")[6].fact.endswith(": expert 2")


@pytest.mark.parametrize(
    ("world_size", "node"), [(8, None), (16, None), (64, None), (128, None), (1024, None), (1024, 5)]
)
def test_two_grids_can_be_read_and_stay_in_their_columns(world_size, node):
    layout = ParallelLayout(world_size, 2, 2, ep_size=4, expert_tp_size=1)
    scene = draw_layout(layout, node=node)
    boxes = [mark for mark in scene.marks if mark.same]
    assert all(mark.text and mark.size >= 11 for mark in boxes)
    inside = [sum(is_inside(mark.x, mark.y, panel) for panel in scene.panels) for mark in scene.marks]
    assert set(inside) == {1} and max(mark.right for mark in scene.marks) < WIDTH
    assert all(
        left + width >= mark.right for left, _, width, _ in scene.panels[:1] for mark in boxes if mark.x < left + width
    )


@pytest.mark.parametrize(
    ("sizes", "node"), [((16, 2, 4), None), ((64, 4, 2, 2), None), ((64, 4, 2, 2), 3), ((1024, 8, 16), 5)]
)
def test_each_dense_grid_is_a_panel_that_fits_a_phone(sizes, node):
    layout = ParallelLayout(*sizes)
    scene = draw_layout(layout, node=node)
    assert len(scene.panels) == len(axes_in_use(layout)) + (node is not None)
    assert max((width + 2 * MARGIN) * NARROWEST for _, _, width, _ in scene.panels) <= 349  # of 390 pixels
    for mark in scene.marks:
        [(left, top, width, height)] = [panel for panel in scene.panels if is_inside(mark.x, mark.y, panel)]
        assert left <= mark.x and mark.right <= left + width and top <= mark.y and mark.bottom <= top + height
        assert mark.shape != "label" or mark.x + text_width(mark.text, mark.size, mark.bold) <= left + width


def test_experts_cross_nodes_by_their_own_grid():
    layout = ParallelLayout(16, tp_size=2, ep_size=8, expert_tp_size=2)
    assert describe_groups(layout, "ep", 8) == "2 groups of 8, all cross nodes"
    assert describe_groups(SIXTEEN, "ep", 8) == "4 groups of 4, each inside a node"


def test_expert_tensor_parallelism_of_another_size_makes_a_second_grid_too():
    layout = ParallelLayout(8, tp_size=4, expert_tp_size=2)
    assert [row[0] for row in draw_layout(layout).table.rows][-3:] == [
        "expert tensor (expert_tp 2)", "expert (ep 1)", "expert data (expert_dp 4)",
    ]  # fmt: skip
    assert len(draw_layout(ParallelLayout(8, tp_size=4, expert_tp_size=4)).panels) == 3
