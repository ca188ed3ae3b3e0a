"""The small run that tests of the trainer and of checkpoints share."""

from dataclasses import replace

from labtrain import TrainConfig

TINY = TrainConfig(
    steps=10, batch_size=8, micro_batch_size=2, seq_length=8, hidden_size=16, num_attention_heads=8, num_layers=4,
    precision="float64", warmup_steps=3, learning_rate=0.01, min_learning_rate=0.001, eval_interval=5,
)  # fmt: skip
# Step 2 shows what step 1 has left behind, and the evaluation after the last one shows its update too.
SHORT = replace(TINY, steps=2, warmup_steps=2, eval_interval=2)
# The third step shows what biases do after two changes.
MOE = replace(TINY, steps=3, warmup_steps=2, eval_interval=3, num_experts=8, moe_ffn_hidden_size=8)
TODAY = dict(norm="rmsnorm", mlp="swiglu", positions="rope", num_query_groups=4, bias=False, tied=False)
"""What makes it a model of today instead of GPT-2's form."""


def numbers(all_steps):
    """What must be the same in every layout."""
    return [value for step in all_steps for value in (step.loss, step.grad_norm, step.evaluation_loss or 0.0)]
