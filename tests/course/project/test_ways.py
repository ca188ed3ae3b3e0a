"""The four ways on: each test passes for a file that has taken the way, and says what is missing in others."""

import pytest

from course.project.watch import Facts
from course.project.ways import WAYS, experts_fault, makespan
from tests.course.project.ways_taken import TAKEN, changed, taken

WRONG = {
    "no tokens are cut": (
        "sequence_parallel",
        [("    if not args.sequence_parallel:\n        return x.view_as(x)", "    return x.view_as(x)"),
         ("    if not args.sequence_parallel:\n        return all_reduce_tp(x)", "    return all_reduce_tp(x)"),
         ("chunk(tp)[tp_rank] if args.sequence_parallel else self.positions", "view_as(self.positions)"),
         ("args.seq // (tp if args.sequence_parallel else 1)", "args.seq"),
         ("if args.sequence_parallel and not", "if False and not")],
        "a norm on rank 0 gets [2, 8, 16]: it should be [2, 2, 16]",
    ),
    "gradients of norms are not added up": (
        "sequence_parallel",
        [("            dist.all_reduce(param.grad, group=tp_group)\n", "            pass\n")],
        "the norm of step 0 is",
    ),
    "each replica keeps all": (
        "zero_1",
        [("if not args.zero or owners[param] == dp_rank", "if True")],
        "the optimizers of rank 0 keep 34,752 numbers: a share would be 8,688",
    ),
    "what was updated is not sent": (
        "zero_1",
        [("        dist.broadcast(param.data, group_src=owners[param], group=dp_group)\n", "        pass\n")],
        "the loss of step 1 is",
    ),
    "neighbouring blocks": (
        "interleaving",
        [("args.layers * number // (pp * args.chunks)", "args.layers * (pp_rank * args.chunks + number // pp) // 8"),
         ("args.layers * (number + 1) // (pp * args.chunks)",
          "args.layers * (pp_rank * args.chunks + number // pp + 1) // 8")],
        "",
    ),
    "one micro-batch at a time": (
        "interleaving",
        [("    return actions\n", "    return sorted(actions, key=in_turn)\n"),
         ("def place(index", "def in_turn(action):\n    kind, chunk, index = action\n"
          '    return index, kind == "B", -chunk if kind == "B" else chunk\n\n\ndef place(index')],
        "a step takes 128 units, one for a block each way: 1F1B with one stage on each rank takes 44",
    ),
    "an expert gets nothing": ("experts", [("expert(arrived[own])", "arrived[own] * number")], ""),
    "experts as one MLP": ("experts", [("Experts(name) if args.experts else MLP", "MLP")], "one rank has"),
}  # fmt: skip


@pytest.fixture
def verdict(tmp_path):
    def of(way, source):
        path = tmp_path / "my_megatron.py"
        path.write_text(source)
        return WAYS[way].verdict(path)

    return of


@pytest.mark.parametrize("way", TAKEN)
def test_a_file_that_has_taken_a_way_passes(way, verdict):
    found = verdict(way, taken(way))
    assert found.status == "passed", found.text


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_missing_is_said(fault, verdict):
    way, lines, said = WRONG[fault]
    found = verdict(way, changed(taken(way), lines))
    assert found.status == "wrong" and said in " ".join(found.text.split()), found.text


@pytest.mark.parametrize("way", WAYS)
def test_a_file_without_the_option_has_not_tried(way, verdict):
    other = next(name for name in TAKEN if name != way)
    found = verdict(way, taken(other))
    assert found.status == "not attempted" and f"--{WAYS[way].option} " in found.text


@pytest.mark.parametrize(
    ("num_parameters", "messages", "said"),
    [(20_000, [], "no all-to-all"), (60_000, [("all_to_all", 4, 100)], "rank 0 has 60,000 parameters")],
)
def test_experts_must_be_shared_out(num_parameters, messages, said):
    one = Facts([], 60_000, 0, [], [(1, 8, 16)], [], [])
    rank = Facts([], num_parameters, 0, messages, [(1, 8, 16)], [], [])
    assert said in experts_fault([rank] * 4, one, {})


def test_a_pipeline_takes_as_long_as_its_order_allows():
    stages = [[("F", 0)] * 2 + [("B", 0)] * 2, [("F", 1), ("B", 1)] * 2]
    assert makespan(stages, 2) == 6  # two micro-batches on two stages: (2 + 1) * 2
    assert makespan([[("F", 0), ("B", 0)] * 2, [("F", 1), ("B", 1)] * 2], 2) == 8  # one after the other
