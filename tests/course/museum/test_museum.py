"""The bug museum: each fault shows in a way of its own, a healthy run shows none, and nothing of a fault stays."""

import json
import re
import sys
from collections import Counter
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from string import ascii_uppercase

import pytest
import torch.nn.functional as F

from course import progress
from course.museum import Museum, cases, context_museum, experts_museum, gpu_museum, museum, sharding_museum
from course.museum.cases import ALL_FAULTS, CONTEXT, EXPERTS, GPUS, MAIN, SHARDING, nothing
from course.museum.expert_run import CLIP_NORM as EXPERTS_CLIP_NORM
from course.museum.expert_run import LAYOUTS, NUM_CHOICES, TOP_K
from course.museum.faults import FAULTS
from course.museum.harness import on_rank, one_process
from course.museum.symptoms import EQUAL, Sections, went_elsewhere
from course.museum.tiny_run import CLIP_NORM, LAYOUT, NUM_MICRO_BATCHES, TinyTrainer
from course.table import TINT
from labkit import gradients, pipeline
from labkit.launch import launch
from labkit.pipeline.worker import Stage
from labkit.tensor_parallel import RowParallelLinear, blocks, linear, vocabulary
from labtrain import Trainer, trainer

PACKAGES = ("labkit", "labtrain")  # that faults change
CASES, NAMES = museum.cases, sorted(fault.name for fault in FAULTS)
WINGS = {wing.name: wing for wing in (MAIN, CONTEXT, SHARDING, EXPERTS)}
CLIPPED_AT = {"museum": CLIP_NORM, "experts_museum": EXPERTS_CLIP_NORM}
HEALTHY = {
    "museum": [{"copies": "AAAABBBB", "hidden": "AABBCCDD", "heads": "ABCDEFGH"}],
    "context_museum": [{"copies": "AAAA"}],
    "sharding_museum": [{"copies": "AAAA"}],
    "experts_museum": [{"experts": "ABAB"}, {"experts": "AAAA"}],
}
"""Fingerprints by rank, in each layout. In the museum, tensor ranks are 0 1, 2 3, ...; ranks 0 and 2 are replicas; and
ranks 4 to 7 are the second stage."""

LATER = {"norms", "later steps"}
ALL = {"gradients: all", *LATER}
COUNTED = {"norms", "gradients: all", "auxiliary loss 1 times"}
SYMPTOMS = {  # what differs from one process, in each layout
    "museum": {
        "row bias added t times": [{"later steps"}],
        "missing backward all-reduce": [{*ALL, "copies ABABCDCD"}],
        "shards with one seed": [{*ALL, "weights", "losses"}],
        "label smoothing over the local shard": [{*ALL, "losses", "losses ABABABAB"}],
        "micro-batch losses not averaged": [{"gradients: 3 times", "norms"}],
        "only the last micro-batch counts": [ALL],
        "tied embedding not reduced": [{"gradients: embedding.weight", *LATER}],
        "batch split along the wrong axis": [{*ALL, "losses"}],
        "gradient norm counted per stage": [{*LATER, "norms AAAABBBB"}],
        "replicated parameters counted twice": [LATER],
        "same dropout mask on every shard": [{"heads AABBCCDD"}],
        "same dropout mask on every replica": [{"hidden AAAABBBB", "heads ABABCDCD"}],
    },
    "context_museum": {
        "labels shifted after the cut": [{*ALL, "losses"}],
        "positions of consecutive tokens": [{*ALL, "losses"}],  # worst of all: their own
        "loss divided by c twice": [{"gradients: 0.5 times", "norms"}],
    },
    "sharding_museum": {
        "replicas counted in the gradient norm": [LATER],
        "sends on every micro-batch": [{"sent 3 times"}],
        "optimizer made before sharding": [{*LATER, "optimizer 2 times"}],
    },
    "experts_museum": {
        "expert gradients averaged over expert_dp": [
            {*LATER, "gradients of experts: 2 times"}, {*LATER, "gradients of experts: 0.5 times"},
        ],
        "gradient norm without the experts": [LATER, LATER],
        "gradient norm of a rank's own experts": [{*LATER, "norms ABAB"}, set()],
        "experts tagged as dense where ep is 1": [
            set(), {*LATER, "gradients of experts: by no factor", "experts ABAB"},
        ],
        "auxiliary loss divided by t": [set(), {*ALL, "auxiliary loss 0.5 times"}],
        "auxiliary loss never attached": [ALL, ALL],
        "auxiliary loss with k forgotten": [{*ALL, "auxiliary loss 3 times"}] * 2,
        "counts in bfloat16": [
            {*ALL, *COUNTED, "choices 1 times"}, {*ALL, *COUNTED, "choices 1 times", "biases"},
        ],
        "recomputation counts too": [{*COUNTED, "choices 2 times"}] * 2,
        "every rank loads the first experts": [
            {*ALL, "weights", "losses", "auxiliary loss 0.99 times", "biases"}, set(),
        ],
    },
}  # fmt: skip
EACH_FAULT = pytest.mark.parametrize(("wing", "name"), [(wing, name) for wing in SYMPTOMS for name in SYMPTOMS[wing]])


@cache
def shown_in(wing):
    """What each fault of a wing shows, and a healthy run."""
    return symptoms_of_all(WINGS[wing])


def in_layouts(shown):
    return [*shown.shown.values()] if isinstance(shown, Sections) else [shown]


@pytest.fixture(scope="module")
def shown():
    return shown_in("museum")


def symptoms_of_all(wing):
    """The run of each fault, and a healthy run after them, on the same ranks: new ones take longer than their run.

    The notebooks show runs on ranks of their own, and their tables are compared.
    """
    applies = {fault.name: fault.apply for fault in wing.faults} | {"healthy": nothing}
    expected, place = one_process(wing.alone), dict(world_size=wing.jobs[0].layout.world_size, backend="gloo")
    of_ranks = zip(*launch(one_by_one, [*applies.values()], expected, wing.jobs, **place))
    return {name: wing.shown(expected, seen) for name, seen in zip(applies, of_ranks, strict=True)}


def one_by_one(applies, expected, jobs):
    """Run with each fault on this rank, and take it out of the packages again. What is left shows in the next run."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in PACKAGES]
    known = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    classes = [cls for cls in known if cls.__module__.partition(".")[0] in PACKAGES]
    before = [(owner, dict(vars(owner))) for owner in (F, *modules, *classes)]
    found = []
    for apply in applies:
        found.append(on_rank(apply, expected, jobs))
        for owner, values in before:
            for name in [name for name, value in values.items() if vars(owner)[name] is not value]:
                setattr(owner, name, values[name])
    return found


def differs(one, other):
    """Whether a reader of the table sees a difference: it shows five decimals."""
    assert not 5e-6 < abs(one - other) < 1.5e-5, "too close to call"
    return abs(one - other) > 1e-5


def letters_of(values):
    """A letter for each rank, the same for values that a reader cannot tell apart."""
    firsts = []
    for value in values:
        if all(differs(value, first) for first in firsts):
            firsts.append(value)
    return "".join(ascii_uppercase[[differs(value, first) for first in firsts].index(False)] for value in values)


def found_in(shown, healthy_letters):
    """The symptoms as a set of words; each can be read in the printed text."""
    one, ranks, found = shown.expected, shown.ranks, set()
    if any(each.error >= EQUAL for seen in ranks for each in seen.weights):
        found.add("weights")
    for name in ("losses", "norms"):
        right, here = getattr(one, name)[0], [getattr(seen, name)[0] for seen in ranks]
        if any(differs(value, right) for value in here):
            found.add(name)
        if {*letters_of(here)} != {"A"}:
            found.add(f"{name} {letters_of(here)}")
    if any(differs(*pair) for pair in zip(ranks[0].losses[1:], one.losses[1:], strict=True)):
        found.add("later steps")
    letters = {name: "".join(shown.letters(name)) for name in ranks[0].fingerprints}
    assert letters.keys() == healthy_letters.keys()
    found |= {f"{name} {each}" for name, each in letters.items() if each != healthy_letters[name]}
    return found | gradients_in(shown) | routing_in(shown) | sharding_in(shown)


def gradients_in(shown):
    every = [each for seen in shown.ranks for each in seen.gradients]
    wrong = [each for each in every if each.error >= EQUAL]
    names, ratio = {each.name for each in wrong}, shown.parity.common_ratio
    if not wrong:
        return set()
    if ratio is not None:
        return {f"gradients: {ratio:.2g} times"}
    if all(".experts." in name for name in names):
        ratios = {f"{each.ratio:.2g} times" for each in wrong}
        is_factor = len(ratios) == 1 and all(each.rest < EQUAL for each in wrong)
        return {f"gradients of experts: {ratios.pop() if is_factor else 'by no factor'}"}
    are_most = len(names) > len({each.name for each in every}) / 2
    return {f"gradients: {'all' if are_most else ', '.join(sorted(names))}"}


def routing_in(shown):
    right, here, found = shown.expected.routing, shown.ranks[0].routing, set()
    if right is None:
        return found
    if any(differs(seen.routing.auxiliary[0], right.auxiliary[0]) for seen in shown.ranks):
        found.add(f"auxiliary loss {here.auxiliary[0] / right.auxiliary[0]:.2g} times")
    if here.counted[0] != [NUM_CHOICES] * 2:
        found.add(f"choices {here.counted[0][1] / NUM_CHOICES:.2g} times")
    if any(map(went_elsewhere, chain(*here.biases[0]), chain(*right.biases[0]))):
        found.add("biases")
    return found


def sharding_in(shown):
    costs = [seen.sharding for seen in shown.ranks if seen.sharding]
    sent = {f"sent {cost.reduce_scatters / cost.enough:.2g} times" for cost in costs}
    held = {f"optimizer {cost.in_optimizer / cost.in_shards:.2g} times" for cost in costs}
    return (sent | held) - {"sent 1 times", "optimizer 1 times"}


def test_there_are_at_least_ten_faults_and_each_says_who_met_it():
    assert len(FAULTS) >= 10
    assert {name: {fault.name for fault in wing.faults} for name, wing in WINGS.items()} == {
        wing: {*symptoms} for wing, symptoms in SYMPTOMS.items()
    }
    for fault in ALL_FAULTS:
        assert re.search(r"[\w.-]+/[\w.-]+ (issue|pull request) #\d+", fault.seen_at), fault.name
    assert f"m = {NUM_MICRO_BATCHES} times" in next(f.shows for f in FAULTS if f.name.startswith("micro-batch"))


@pytest.mark.parametrize("wing", WINGS)
def test_the_healthy_run_shows_nothing(wing):
    healthy = shown_in(wing)["healthy"]
    for one, letters in zip(in_layouts(healthy), HEALTHY[wing], strict=True):
        assert found_in(one, letters) == set() and [table.num_wrong for table in one.tables()] == [0] * len(
            one.tables()
        )
        assert "✓ Nothing is wrong here." in one._repr_html_() and TINT not in one._repr_html_()


@EACH_FAULT
def test_each_fault_shows(wing, name):
    shown = shown_in(wing)[name]
    for one, letters, words in zip(in_layouts(shown), HEALTHY[wing], SYMPTOMS[wing][name], strict=True):
        assert found_in(one, letters) == words
        assert bool(words) == any(table.num_wrong for table in one.tables())
        seems_to_learn = one.ranks[0].losses == sorted(one.ranks[0].losses, reverse=True)
        assert seems_to_learn == (name != "optimizer made before sharding")
        assert all(norm > CLIPPED_AT.get(wing, -1) for seen in one.ranks for norm in seen.norms)
        for row in one.tables()[0].rows:  # what a reader sees to differ is marked
            pairs = list(zip(row[1::2], row[2::2]))
            assert [here.is_wrong for _, here in pairs] == [str(right) != str(here) for right, here in pairs]
    assert max(map(len, repr(shown).splitlines())) <= 72


@pytest.mark.parametrize("wing", WINGS)
def test_no_two_faults_look_alike(wing):
    shown = shown_in(wing)
    looks = {name: (SYMPTOMS[wing][name], in_layouts(shown[name])[0].parity.worst(0).name) for name in SYMPTOMS[wing]}
    assert [pair for pair in combinations(looks, 2) if looks[pair[0]] == looks[pair[1]]] == []


@EACH_FAULT
def test_a_tint_never_stands_without_its_sign_and_its_word(wing, name):
    for one in in_layouts(shown_in(wing)[name]):
        html, wrong = one._repr_html_(), sum(table.num_wrong for table in one.tables())
        tinted = [cell for cell in re.findall("<td .*?</td>", html) if TINT in cell]
        assert len(tinted) == wrong and all("✗" in cell and "<b>wrong</b>" in cell for cell in tinted)
        assert (f"✗ {wrong} cells wrong" in html) == (wrong > 1)
        assert len(re.findall("<table>", html)) == len(one.tables()) and "before it" in html


def test_a_fault_is_put_in_on_ranks_only(shown):
    for fault in FAULTS:
        assert fault.apply.__module__ == "course.museum.faults"
    here = [pipeline.run, Stage.backward, RowParallelLinear.forward, blocks.local_random_stream,
            linear.ParallelLinear.reset_parameters, linear.column_linear, vocabulary.vocab_parallel_cross_entropy,
            gradients.copy_groups_of, trainer.loss_and_grad_norm, trainer.seed_replicas, Trainer.rows]  # fmt: skip
    assert {function.__module__.partition(".")[0] for function in here} == {*PACKAGES}


def test_the_run_is_the_trainers():
    """Only the loss, the optimizer and a look at the gradients are the museum's own."""
    own = {name for name, value in vars(TinyTrainer).items() if callable(value)}
    assert own == {"__init__", "loss", "compute_gradients"}


def test_the_text_shows_what_there_is_to_see(shown):
    healthy, scaled = repr(shown["healthy"]), repr(shown["micro-batch losses not averaged"])
    assert healthy.count("equal") == 2 * LAYOUT.world_size
    assert "everything is 3 times what one process has" in scaled
    assert "3.0000   " in scaled and "equal" in scaled  # the weights were
    assert "embedding.weight" in repr(shown["tied embedding not reduced"])


def wrong_cells(symptoms):
    """The number of wrong cells under each head that has one, by table."""
    found = []
    for table in symptoms.tables():
        found.append(Counter(head for row in table.rows for head, cell in zip(table.heads, row) if cell.is_wrong))
    return found


def test_wrong_cells_are_those_that_differ(shown):
    assert wrong_cells(shown["row bias added t times"]) == [{"rank 0": 4}, {}, {}]  # steps 2 and 3
    assert wrong_cells(shown["micro-batch losses not averaged"]) == [
        {"rank 0": 3}, {"norm": 8}, {"wrong": 8, "error": 8},
    ]  # fmt: skip
    assert wrong_cells(shown["tied embedding not reduced"])[2] == {"wrong": 8, "error": 8}
    assert wrong_cells(shown["gradient norm counted per stage"])[1:] == [{"norm": 8}, {}]
    assert wrong_cells(shown["shards with one seed"])[1]["before it"] == 4  # tensor rank 0 has its own
    assert wrong_cells(shown["same dropout mask on every shard"]) == [{}, {"heads": 8}, {}]
    assert wrong_cells(shown["same dropout mask on every replica"]) == [{}, {"hidden": 8, "heads": 8}, {}]
    assert wrong_cells(shown["missing backward all-reduce"])[1]["copies"] == 8
    of_shards = shown_in("sharding_museum")
    assert wrong_cells(of_shards["replicas counted in the gradient norm"]) == [{"rank 0": 5}, {"norm": 4}, {}, {}]
    assert wrong_cells(of_shards["sends on every micro-batch"]) == [{}, {}, {}, {"sent": 4, "KB": 4}]
    assert wrong_cells(of_shards["optimizer made before sharding"]) == [
        {"rank 0": 5},
        {"norm": 4},
        {},
        {"optimizer": 4},
    ]


def test_the_text_tells_one_wrong_gradient_from_all(shown):
    """On ranks of the first stage, then of the last."""
    for name, wrong in {
        "gradient norm counted per stage": (0, 0),
        "tied embedding not reduced": (1, 1),
        "only the last micro-batch counts": (14, 15),
        "missing backward all-reduce": (14, 15),
    }.items():
        rows = repr(shown[name]).splitlines()[-LAYOUT.world_size :]
        counts = [f"{wrong[0]} of 14", f"{wrong[1]} of 15"]
        assert [" ".join(row.split()[1:4]) for row in rows] == [counts[0]] * 4 + [counts[1]] * 4, name


def test_notebook_08_tells_the_limit_of_clipping():
    notebook = json.loads((Path(__file__).parents[3] / "notebooks/08_3d_parallel.ipynb").read_text())
    cells = {cell["id"]: " ".join("".join(cell["source"]).split()) for cell in notebook["cells"]}
    assert f"clipping at {CLIP_NORM}," in cells["museum"] and f"above {CLIP_NORM} " in cells["museum-answers"]


@pytest.fixture(autouse=True)
def own_progress(tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path / "progress.json"))


@pytest.fixture
def all_have_run(monkeypatch):
    for case in CASES:
        monkeypatch.setattr(case, "_has_run", True)


def test_a_case_is_named_after_a_run_only(monkeypatch):
    case = CASES[0]
    monkeypatch.setattr(case, "_has_run", False)
    monkeypatch.setattr(cases.Wing, "symptoms", lambda wing, apply: "a table")
    assert "museum.case(1).run()" in case.verdict(case._fault.name).text and "case 1" not in progress.solved()
    assert case.run() == "a table" and case.verdict(case._fault.name).status == "passed"


def test_the_check_confirms_the_name_and_says_where_it_was_seen(capsys, all_have_run):
    for case in CASES:
        case.check(case._fault.name)
        text = " ".join(capsys.readouterr().out.split())
        assert text.startswith(f"case {case.number}: yes, '{case._fault.name}'") and case._fault.seen_at in text
    assert museum.verdict().status == "passed"
    assert progress.solved().keys() >= {"case 1", "case 12"}


@pytest.mark.parametrize("guessed", FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_name_says_what_it_would_have_shown(guessed, all_have_run):
    for case in CASES:
        if case._fault is not guessed:
            verdict = case.verdict(guessed.name)
            assert verdict.status == "wrong"
            assert guessed.shows in " ".join(verdict.text.split())
            assert case._fault.what not in " ".join(verdict.text.split())


def test_names_that_are_none(all_have_run):
    case = museum.case(1)
    assert case.verdict().status == case.verdict(...).status == "not attempted"
    assert case.verdict("row bias").text.endswith(
        "no fault is called 'row bias'.\n  Did you mean 'row bias added t times'?"
    )
    assert "`names()`" in case.verdict("zzzz").text
    assert museum.verdict().status == "not attempted"
    with pytest.raises(ValueError, match="there is no case 13: use 1 to 12"):
        museum.case(13)


def test_a_case_does_not_say_what_it_is():
    for case in CASES:
        assert case._fault.name not in repr(case)
    assert [case._fault for case in CASES] != FAULTS
    assert sorted(case._fault.name for case in CASES) == NAMES


def test_the_solution_shows_the_lines(capsys):
    for case in CASES:
        text = repr(case.solution())
        assert f"def {case._fault.apply.__name__}()" in text and case._fault.name in text
    assert "Go down this list" in repr(museum.case(1).hint())
    museum.names()
    assert capsys.readouterr().out.split("\n")[:-1] == NAMES


# -- what only one wing shows ------------------------------------------------------------------------------------------


def test_a_run_with_its_sequences_cut():
    shown = shown_in("context_museum")
    assert "1  c1 d0" in repr(shown["healthy"]) and "heads" not in repr(shown["healthy"])  # no dropout to show
    worst = {name: shown[name].parity.worst(0).name.partition(".")[0] for name in SYMPTOMS["context_museum"]}
    assert worst["labels shifted after the cut"] == "layers"
    assert worst["positions of consecutive tokens"] == "positions"
    for name in SYMPTOMS["context_museum"]:
        assert all(each.error >= EQUAL for seen in shown[name].ranks for each in seen.gradients)


def test_a_run_with_shards():
    shown = shown_in("sharding_museum")
    healthy = shown["healthy"]
    assert "3  d3" in repr(healthy) and "reduce-scatters" in repr(healthy) and "heads" not in repr(healthy)
    names = "replicas counted in the gradient norm", "sends on every micro-batch", "optimizer made before sharding"
    for name, norm, sent in zip(names, (2**0.5, 1, 0), (1, 3, 1), strict=True):
        for seen, right in zip(shown[name].ranks, healthy.ranks):
            assert seen.norms[0] == pytest.approx(norm * healthy.expected.norms[0])
            assert seen.sharding.reduce_scatters == sent * right.sharding.reduce_scatters
            assert seen.sharding.kilobytes == pytest.approx(sent * right.sharding.kilobytes, abs=2)
            assert seen.sharding.in_optimizer == pytest.approx((1 if norm else 2) * seen.sharding.in_shards, rel=0.02)


def test_runs_of_experts_in_both_layouts():
    healthy = shown_in("experts_museum")["healthy"]
    assert "dp 2; experts: expert_tp 1, ep 2, expert_dp 2" in repr(healthy) and "1  c1 d0 e1" in repr(healthy)
    assert "dp 2; experts: expert_tp 1, ep 1, expert_dp 4" in healthy._repr_html_()
    sizes = [(each.dp_size * each.cp_size, each.expert_dp_size, each.tp_size, TOP_K) for each in LAYOUTS]
    assert sizes == [(4, 2, 1, 3), (2, 4, 2, 3)]  # an expert has fewer copies than there are losses, then more


def test_the_fault_of_gpus_shows_by_nccls_rules_only():
    healthy, shown = gpu_museum.healthy(), gpu_museum.case(1).run()
    assert [table.num_wrong for table in healthy.tables()] == [0] * 6  # by both rules
    assert [table.num_wrong for table in shown.tables()] == [0] * 3
    of_healthy, [on_gloo, stands_still] = map(repr, healthy.shown.values()), shown.shown.values()
    assert {*of_healthy} == {repr(on_gloo)}
    report = repr(stands_still)
    assert repr(shown).endswith(f"By NCCL's rules:\n\n{report}")
    assert "no rank can go on." in report
    assert "rank 0: waits in recv from rank 1" in report and "rank 1: waits in recv from rank 0" in report
    assert report.count(" for B1") == report.count(" for F2") == 1 and "labkit/" not in report
    assert "✗ It stands still." in shown._repr_html_() and "waits in recv" in shown._repr_html_()


@pytest.mark.parametrize(
    "wing", [context_museum, sharding_museum, experts_museum, gpu_museum], ids=lambda wing: wing.name
)
def test_the_cases_of_other_notebooks_are_named_apart(wing, capsys, monkeypatch):
    for case in wing.cases:
        monkeypatch.setattr(case, "_has_run", True)
        case.check(case._fault.name)
    assert f"{wing.name} case 1: yes" in capsys.readouterr().out
    assert wing.verdict().status == "passed" and museum.verdict().status == "not attempted"
    assert wing.case(1).verdict(FAULTS[0].name).status == "wrong"
    wing.names()
    known = {experts_museum: EXPERTS.faults, gpu_museum: [*MAIN.faults, *GPUS.faults]}.get(
        wing, [*MAIN.faults, *CONTEXT.faults, *SHARDING.faults]
    )
    assert capsys.readouterr().out.split("\n")[:-1] == sorted(fault.name for fault in known)


def test_the_museum_counts_as_an_exercise_of_its_notebook():
    wings = {
        "08": ["bug_museum", "gpu_museum"],
        "13": ["context_museum"],
        "14": ["sharding_museum"],
        "15": ["experts_museum"],
    }
    for number, names in wings.items():
        assert set(names) <= set(progress.exercises()[number])
    assert isinstance(museum, Museum) and one_process.cache_info().currsize <= 2


def test_the_instructor_has_the_key():
    text = " ".join((Path(__file__).parents[3] / "INSTRUCTOR.md").read_text().split())
    assert f"**Its key:** {', '.join(f'{case.number} {case._fault.name}' for case in CASES)}." in text
