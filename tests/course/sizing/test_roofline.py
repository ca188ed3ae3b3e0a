"""The operations below a roof: their FLOPs are the step's, their bytes each number once, and who limits them."""

import pytest

from course.sizing import DGX_A100, DGX_H100, Plan, flops_per_step, operations, ridge
from course.sizing.runs import LLAMA_70B
from labkit.shape import GPT

GPT_3 = GPT(96, 12288, 2048, 51200, 96)
CASES = [(GPT_3, 1, {}), (GPT_3, 8, {}), (LLAMA_70B, 1, {}), (LLAMA_70B, 4, {"sequence_parallel": True})]


@pytest.mark.parametrize(("model", "t", "options"), CASES)
def test_all_products_together_are_the_forward_pass(model, t, options):
    plan = Plan(model, t, 2, t, micro_batch_size=2, recompute="none", **options)
    found = operations(plan)
    layer = sum(each.flops for each in found if each.kind == "product" and "logits" not in each.name)
    [logits] = [each.flops for each in found if "logits" in each.name]
    [attention] = [each for each in found if each.kind == "attention"]
    scores = model.num_attention_heads / t * 2 * model.seq_length**2
    whole = model.num_layers * (layer + attention.flops - 5 * scores) + logits
    assert whole * t == pytest.approx(flops_per_step(model, 2, "none") / 3)


def test_a_product_moves_its_input_its_weight_and_its_output():
    plan = Plan(GPT_3, 8, 1, 8)
    [up] = [each for each in operations(plan) if each.name.startswith("MLP, up")]
    assert up.moved_bytes == 2 * (2048 * 12288 + 12288 * 6144 + 2048 * 6144)
    assert up.flops == 2 * 2048 * 12288 * 6144 and up.intensity == up.flops / up.moved_bytes
    [wide] = [each for each in operations(plan, element_bytes=4) if each.name == up.name]
    assert wide.moved_bytes == 2 * up.moved_bytes and wide.flops == up.flops


def test_scores_that_are_stored_make_attention_wait_for_memory():
    stored, fused = (operations(Plan(GPT_3, 8, 1, 8, fused_attention=way))[2] for way in (False, True))
    assert stored.is_limited_by_memory(DGX_A100) and not fused.is_limited_by_memory(DGX_A100)
    assert fused.flops < stored.flops / 2 and fused.moved_bytes < stored.moved_bytes / 10


def test_the_roof_is_the_slower_of_peak_and_memory():
    for each in operations(Plan(LLAMA_70B, 4, 1, 4, fused_attention=True, recompute="none")):
        computing, moving = each.flops / DGX_H100.peak_flops, each.moved_bytes / DGX_H100.memory_bytes_per_second
        assert each.seconds(DGX_H100) == max(computing, moving)
        assert each.is_limited_by_memory(DGX_H100) == (moving > computing) == (each.kind == "memory")
    assert ridge(DGX_H100) == pytest.approx(989 / 3.35)


def test_sequence_parallelism_divides_what_is_between_the_halves():
    whole, divided = (operations(Plan(GPT_3, 8, 1, 8, sequence_parallel=way)) for way in (False, True))
    for one, other in zip(whole, divided):
        times = 8 if one.name in ("norm", "residual") else 1
        assert (one.flops, one.moved_bytes) == (times * other.flops, times * other.moved_bytes)
