"""The bug museum: each fault shows in a way of its own, a healthy run shows none, and nothing of a fault stays."""

import json
import re
import sys
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import torch.nn.functional as F

from course import progress
from course.museum import Museum, cases, context_museum, experts_museum, gpu_museum, museum, sharding_museum
from course.museum.cases import ALL_FAULTS, CONTEXT, EXPERTS, GPUS, MAIN, SHARDING, nothing
from course.museum.expert_run import CLIP_NORM as EXPERTS_CLIP_NORM
from course.museum.expert_run import LAYOUTS, NUM_CHOICES, TOP_K
from course.museum.faults import FAULTS
from course.museum.harness import on_rank, one_process
from course.museum.symptoms import EQUAL, went_elsewhere
from course.museum.tiny_run import CLIP_NORM, LAYOUT, NUM_MICRO_BATCHES, TinyTrainer
from course.table import TINT
from labkit import gradients, pipeline
from labkit.launch import launch
from labkit.pipeline.worker import Stage
from labkit.tensor_parallel import RowParallelLinear, blocks, linear, vocabulary
from labtrain import Trainer, trainer

PACKAGES = ("labkit", "labtrain")  # that faults change
CASES, NAMES = museum.cases, sorted(fault.name for fault in FAULTS)
HEALTHY_LETTERS = {"copies": "AAAABBBB", "hidden": "AABBCCDD", "heads": "ABCDEFGH"}
"""For ranks 0 to 7: tensor ranks are 0 1, 2 3, ...; ranks 0 and 2 are replicas; ranks 4 to 7 are the second stage."""

SYMPTOMS = {  # what differs from one process, in the order in which the hint asks
    "row bias added t times": {"later steps"},
    "missing backward all-reduce": {"gradients: all", "norm", "copies ABABCDCD", "later steps"},
    "shards with one seed": {"weights", "loss", "gradients: all", "norm", "later steps"},
    "label smoothing over the local shard": {
        "loss", "losses of tensor ranks", "gradients: all", "norm", "later steps",
    },
    "micro-batch losses not averaged": {"gradients: 3 times", "norm"},
    "only the last micro-batch counts": {"gradients: all", "norm", "later steps"},
    "tied embedding not reduced": {"gradients: embedding.weight", "norm", "later steps"},
    "batch split along the wrong axis": {"loss", "gradients: all", "norm", "later steps"},
    "gradient norm counted per stage": {"norm", "norms of stages", "later steps"},
    "replicated parameters counted twice": {"norm", "later steps"},
    "same dropout mask on every shard": {"heads AABBCCDD"},
    "same dropout mask on every replica": {"hidden AAAABBBB", "heads ABABCDCD"},
}  # fmt: skip


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


@pytest.fixture(scope="module")
def shown():
    return symptoms_of_all(MAIN)


def differs(one, other):
    """Whether a reader of the table sees a difference: it shows five decimals."""
    assert not 5e-6 < abs(one - other) < 1.5e-5, "too close to call"
    return abs(one - other) > 1e-5


def found_in(shown):
    """The symptoms as a set of words; each can be read in the printed text."""
    expected, ranks, found = shown.expected, shown.ranks, set()
    first = ranks[0]
    if any(each.error >= EQUAL for seen in ranks for each in seen.weights):
        found.add("weights")
    if any(differs(seen.losses[0], expected.losses[0]) for seen in ranks):
        found.add("loss")
    if any(differs(seen.losses[0], first.losses[0]) for seen in ranks):
        assert [seen.losses[0] for seen in ranks[::2]] == [first.losses[0]] * 4  # by tensor rank
        found.add("losses of tensor ranks")
    if any(differs(seen.norms[0], expected.norms[0]) for seen in ranks):
        found.add("norm")
    if any(differs(seen.norms[0], first.norms[0]) for seen in ranks):
        assert [seen.norms[0] for seen in ranks] == [first.norms[0]] * 4 + [ranks[4].norms[0]] * 4  # by stage
        found.add("norms of stages")
    if gradients := gradients_text(shown):
        found.add(f"gradients: {gradients}")
    for name, healthy in HEALTHY_LETTERS.items():
        if (letters := "".join(shown.letters(name))) != healthy:
            found.add(f"{name} {letters}")
    later = zip(first.losses[1:], expected.losses[1:], strict=True)
    if any(differs(loss, right) for loss, right in later):
        found.add("later steps")
    return found


def gradients_text(shown):
    everything = {each.name for seen in shown.ranks for each in seen.gradients}
    wrong = {each.name for seen in shown.ranks for each in seen.gradients if each.error >= EQUAL}
    ratio = shown.parity.common_ratio
    if wrong and ratio is not None:
        return f"{ratio:.0f} times"
    return "all" if len(wrong) > len(everything) / 2 else ", ".join(sorted(wrong))


def test_there_are_at_least_ten_faults_and_each_says_who_met_it():
    assert len(FAULTS) >= 10 and {fault.name for fault in FAULTS} == set(SYMPTOMS) == set(NAMES)
    for fault in ALL_FAULTS:
        assert re.search(r"[\w.-]+/[\w.-]+ (issue|pull request) #\d+", fault.seen_at), fault.name
    assert f"m = {NUM_MICRO_BATCHES} times" in next(f.shows for f in FAULTS if f.name.startswith("micro-batch"))


def test_the_healthy_run_shows_nothing(shown):
    assert found_in(shown["healthy"]) == set()


@pytest.mark.parametrize("name", SYMPTOMS)
def test_each_fault_shows(shown, name):
    assert found_in(shown[name]) == SYMPTOMS[name]
    assert shown[name].ranks[0].losses == sorted(shown[name].ranks[0].losses, reverse=True)  # and yet it seems to learn


def test_no_two_faults_look_alike(shown):
    for one in SYMPTOMS:
        assert [other for other in SYMPTOMS if found_in(shown[other]) == found_in(shown[one])] == [one]


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
    assert max(len(line) for symptoms in shown.values() for line in repr(symptoms).splitlines()) <= 72
    assert "embedding.weight" in repr(shown["tied embedding not reduced"])


def wrong_cells(symptoms):
    """The number of wrong cells under each head that has one, by table."""
    found = []
    for table in symptoms.tables():
        found.append(Counter(head for row in table.rows for head, cell in zip(table.heads, row) if cell.is_wrong))
    return found


def test_wrong_cells_are_those_that_differ(shown):
    assert wrong_cells(shown["healthy"]) == [{}, {}, {}]
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


@pytest.mark.parametrize("name", SYMPTOMS)
def test_a_tint_never_stands_without_its_sign_and_its_word(shown, name):
    html, wrong = shown[name]._repr_html_(), sum(table.num_wrong for table in shown[name].tables())
    cells = re.findall("<td .*?</td>", html)
    tinted = [cell for cell in cells if TINT in cell]
    assert len(tinted) == wrong > 0
    assert all("✗" in cell and "<b>wrong</b>" in cell for cell in tinted)
    assert f"✗ {wrong} cells wrong" in html
    assert len(re.findall("<table>", html)) == 3 and "before it" in html


def test_a_healthy_run_has_no_tint(shown):
    html = shown["healthy"]._repr_html_()
    assert "✓ Nothing is wrong here." in html and TINT not in html


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


def test_notebook_08_tells_the_limit_of_clipping_and_every_step_is_above_it(shown):
    notebook = json.loads((Path(__file__).parents[3] / "notebooks/08_3d_parallel.ipynb").read_text())
    cells = {cell["id"]: " ".join("".join(cell["source"]).split()) for cell in notebook["cells"]}
    assert f"clipping at {CLIP_NORM}," in cells["museum"] and f"above {CLIP_NORM} " in cells["museum-answers"]
    assert all(norm > CLIP_NORM for symptoms in shown.values() for seen in symptoms.ranks for norm in seen.norms)


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


# -- the three faults of a sequence that is cut ------------------------------------------------------------------------

CONTEXT_SYMPTOMS = {  # the loss of step 1, how the gradients differ, and at which the most
    "labels shifted after the cut": (True, None, "layers"),
    "positions of consecutive tokens": (True, None, "positions"),
    "loss divided by c twice": (False, 0.5, ""),
}


@pytest.fixture(scope="module")
def shown_of_context():
    return symptoms_of_all(CONTEXT)


def test_a_run_with_its_sequences_cut_is_healthy(shown_of_context):
    healthy = shown_of_context["healthy"]
    assert wrong_cells(healthy) == [{}, {}, {}]
    assert "1  c1 d0" in repr(healthy) and "heads" not in repr(healthy)  # there is no dropout to show


@pytest.mark.parametrize("name", CONTEXT_SYMPTOMS)
def test_each_fault_of_the_cut_shows(shown_of_context, name):
    found, (loss_is_wrong, ratio, worst) = shown_of_context[name], CONTEXT_SYMPTOMS[name]
    for seen in found.ranks:
        assert differs(seen.losses[0], found.expected.losses[0]) == loss_is_wrong
        assert differs(seen.norms[0], found.expected.norms[0])
        assert all(each.error >= EQUAL for each in seen.gradients) and all(each.error < EQUAL for each in seen.weights)
    assert found.parity.common_ratio == (None if ratio is None else pytest.approx(ratio))
    assert found.parity.worst(0).name.startswith(worst)
    assert found.ranks[0].losses == sorted(found.ranks[0].losses, reverse=True)  # and yet it seems to learn


# -- the three faults of shards ----------------------------------------------------------------------------------------

SHARDING_SYMPTOMS = {  # wrong cells by table; how many times too large norm, messages and optimizer are
    "replicas counted in the gradient norm": ([{"rank 0": 5}, {"norm": 4}, {}, {}], 2**0.5, 1, 1),
    "sends on every micro-batch": ([{}, {}, {}, {"sent": 4, "KB": 4}], 1, 3, 1),
    "optimizer made before sharding": ([{"rank 0": 5}, {"norm": 4}, {}, {"optimizer": 4}], 0, 1, 2),
}


@pytest.fixture(scope="module")
def shown_of_sharding():
    return symptoms_of_all(SHARDING)


def test_a_run_with_shards_is_healthy(shown_of_sharding):
    healthy = shown_of_sharding["healthy"]
    assert wrong_cells(healthy) == [{}, {}, {}, {}]
    assert "3  d3" in repr(healthy) and "reduce-scatters" in repr(healthy) and "heads" not in repr(healthy)


@pytest.mark.parametrize("name", SHARDING_SYMPTOMS)
def test_each_fault_of_shards_shows(shown_of_sharding, name):
    found, (wrong, norm, sent, held) = shown_of_sharding[name], SHARDING_SYMPTOMS[name]
    assert wrong_cells(found) == wrong
    for seen, healthy in zip(found.ranks, shown_of_sharding["healthy"].ranks):
        assert seen.norms[0] == pytest.approx(norm * found.expected.norms[0])
        assert seen.sharding.reduce_scatters == sent * healthy.sharding.reduce_scatters
        assert seen.sharding.kilobytes == pytest.approx(sent * healthy.sharding.kilobytes, abs=2)
        assert seen.sharding.in_optimizer == pytest.approx(held * seen.sharding.in_shards, rel=0.02)
    losses = found.ranks[0].losses
    assert (losses == sorted(losses, reverse=True)) == (norm > 0)


# -- the ten faults of experts -----------------------------------------------------------------------------------------

EXPERT_SYMPTOMS = {  # what is wrong in the first layout, and what in the second
    "expert gradients averaged over expert_dp": ({"norm", "experts' gradients 2"}, {"norm", "experts' gradients 0.5"}),
    "gradient norm without the experts": ({"norm"}, {"norm"}),
    "gradient norm of a rank's own experts": ({"norm", "norms of ep ranks"}, set()),
    "experts tagged as dense where ep is 1": (set(), {"norm", "experts' gradients", "copies ABAB"}),
    "auxiliary loss divided by t": (set(), {"norm", "gradients", "auxiliary loss 0.5"}),
    "auxiliary loss never attached": ({"norm", "gradients"}, {"norm", "gradients"}),
    "auxiliary loss with k forgotten": (
        {"norm", "gradients", "auxiliary loss 3"}, {"norm", "gradients", "auxiliary loss 3"},
    ),
    "counts in bfloat16": (
        {"norm", "gradients", "auxiliary loss 1", "choices 1"},
        {"norm", "gradients", "auxiliary loss 1", "choices 1", "biases"},
    ),
    "recomputation counts too": (
        {"norm", "gradients", "auxiliary loss 1", "choices 2"}, {"norm", "gradients", "auxiliary loss 1", "choices 2"},
    ),
    "every rank loads the first experts": (
        {"weights", "loss", "norm", "gradients", "auxiliary loss 0.99", "biases"}, set(),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def shown_of_experts():
    return symptoms_of_all(EXPERTS)


def found_with_experts(shown):
    """What is wrong in step 1, as a set of words; each can be read in the printed text."""
    expected, ranks, found = shown.expected, shown.ranks, set()
    if any(each.error >= EQUAL for seen in ranks for each in seen.weights):
        found.add("weights")
    for name, of_run in {"loss": "losses", "norm": "norms"}.items():
        if any(differs(getattr(seen, of_run)[0], getattr(expected, of_run)[0]) for seen in ranks):
            found.add(name)
    auxiliary, right = [seen.routing.auxiliary[0] for seen in ranks], expected.routing.auxiliary[0]
    if any(differs(each, right) for each in auxiliary):
        found.add(f"auxiliary loss {auxiliary[0] / right:.2g}")
    if differs(ranks[0].norms[0], ranks[1].norms[0]):
        assert [seen.norms[0] for seen in ranks[2:]] == [seen.norms[0] for seen in ranks[:2]]
        found.add("norms of ep ranks")
    wrong = [each for seen in ranks for each in seen.gradients if each.error >= EQUAL]
    if wrong and all(".experts." in each.name for each in wrong):
        ratios, is_factor = {f"{each.ratio:.2g}" for each in wrong}, all(each.rest < EQUAL for each in wrong)
        found.add(f"experts' gradients {ratios.pop()}" if is_factor and len(ratios) == 1 else "experts' gradients")
    elif wrong:
        found.add("gradients")
    if (letters := "".join(shown.letters("experts"))) != ("ABAB" if shown.layout.ep_size == 2 else "AAAA"):
        found.add(f"copies {letters}")
    if ranks[0].routing.counted[0] != [NUM_CHOICES] * 2:
        found.add(f"choices {ranks[0].routing.counted[0][1] / NUM_CHOICES:.2g}")
    biases = zip(chain(*ranks[0].routing.biases[0]), chain(*expected.routing.biases[0]))
    return found | ({"biases"} if any(went_elsewhere(*pair) for pair in biases) else set())


def test_healthy_runs_of_experts_show_nothing_in_both_layouts(shown_of_experts):
    healthy = shown_of_experts["healthy"]
    assert [table.num_wrong for table in healthy.tables()] == [0] * 8
    assert [found_with_experts(each) for each in healthy.shown.values()] == [set(), set()]
    assert "dp 2; experts: expert_tp 1, ep 2, expert_dp 2" in repr(healthy) and "1  c1 d0 e1" in repr(healthy)
    assert "dp 2; experts: expert_tp 1, ep 1, expert_dp 4" in healthy._repr_html_()
    sizes = [(each.dp_size * each.cp_size, each.expert_dp_size, each.tp_size, TOP_K) for each in LAYOUTS]
    assert sizes == [(4, 2, 1, 3), (2, 4, 2, 3)]  # an expert has fewer copies than there are losses, then more


@pytest.mark.parametrize("name", EXPERT_SYMPTOMS)
def test_each_fault_of_experts_shows(shown_of_experts, name):
    found = shown_of_experts[name]
    assert tuple(found_with_experts(each) for each in found.shown.values()) == EXPERT_SYMPTOMS[name]
    for each, words in zip(found.shown.values(), EXPERT_SYMPTOMS[name]):
        for row in each.tables()[0].rows:  # what a reader sees to differ is marked
            assert [here.is_wrong for here in row[2::2]] == [
                str(one) != str(here) for one, here in zip(row[1::2], row[2::2])
            ]
        assert bool(words) == any(table.num_wrong for table in each.tables())
        assert each.ranks[0].losses == sorted(each.ranks[0].losses, reverse=True)  # and yet it seems to learn
        assert all(norm > EXPERTS_CLIP_NORM for seen in each.ranks for norm in seen.norms)
    assert max(map(len, repr(found).splitlines())) <= 72


def test_no_two_faults_of_experts_look_alike(shown_of_experts):
    assert len(EXPERT_SYMPTOMS) == len(EXPERTS.faults) == 10
    shown = [[found_with_experts(each) for each in shown_of_experts[name].shown.values()] for name in EXPERT_SYMPTOMS]
    assert all(one != other for place, one in enumerate(shown) for other in shown[:place])


# -- the fault that only GPUs have -------------------------------------------------------------------------------------


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
