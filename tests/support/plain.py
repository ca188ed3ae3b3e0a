"""Computes what labtrain computes, with plain torch in one process: a GPT of any form, its losses, its training.

It is written apart from labtrain. Queries and keys turn as complex numbers, keys and values are repeated for the
queries that share them, and every expert computes every token.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from labkit.groups import group_of_one
from labkit.shape import GPT
from labtrain.data import EVALUATION_SAMPLES
from labtrain.model import ParallelGPT


class Routed(NamedTuple):
    """What the router of a layer says of a batch: softmax scores of all experts, and how often each was chosen."""

    logits: torch.Tensor  # [batch, tokens, experts]
    load: torch.Tensor  # [experts], by scores and biases
    load_by_scores: torch.Tensor

    def balancing_loss(self, config):
        """The auxiliary loss of these tokens, and the z-loss."""
        num_experts = self.logits.size(-1)
        mean_scores = self.logits.softmax(-1).mean((0, 1))
        auxiliary = num_experts * (self.load_by_scores / self.load_by_scores.sum() * mean_scores).sum()
        z = self.logits.logsumexp(-1).square().mean()
        return config.aux_loss_coefficient * auxiliary + config.z_loss_coefficient * z


class PlainGPT:
    """A model of one process; its weights have the names and shapes of `ParallelGPT`'s."""

    def __init__(self, shape: GPT, weights: dict[str, torch.Tensor]):
        self.shape = shape
        self.weights = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
        num_experts = shape.num_experts or 0
        self.expert_biases = [torch.zeros(num_experts, dtype=torch.float64) for _ in range(shape.num_layers)]

    @property
    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {name: weight.grad for name, weight in self.weights.items()}

    def logits(self, ids):  # [batch, tokens] to [batch, tokens, vocabulary]
        """Return the logits, and what the router of each layer with experts says."""
        x = self.weights["embedding.weight"][ids]
        if self.shape.positions == "learned":
            x = x + self.weights["positions"][: ids.size(1)]
        routed = []
        for number in range(self.shape.num_layers):
            layer = f"layers.{number}"
            x = x + self.attention(self.norm(x, f"{layer}.attention_norm"), f"{layer}.attention")
            normed = self.norm(x, f"{layer}.mlp_norm")
            if self.shape.has_experts(number):
                output, said = self.experts(normed, f"{layer}.mlp", self.expert_biases[number])
                routed.append(said)
            else:
                output = self.mlp(normed, f"{layer}.mlp")
            x = x + output
        output_weight = "embedding.weight" if self.shape.tied else "output.weight"
        return self.norm(x, "norm") @ self.weights[output_weight].T, routed

    def loss(self, ids, targets):
        logits, _ = self.logits(ids)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def norm(self, x, name):
        weight = self.weights[f"{name}.weight"]
        if self.shape.norm == "layernorm":
            return F.layer_norm(x, x.shape[-1:], weight, self.weights[f"{name}.bias"], self.shape.norm_eps)
        return x / (x.square().mean(-1, keepdim=True) + self.shape.norm_eps).sqrt() * weight

    def linear(self, x, name):
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0)

    def attention(self, x, name):
        heads = self.shape.num_attention_heads
        kv_heads = self.shape.num_query_groups or heads
        head_size, num_sharing = self.shape.hidden_size // heads, heads // kv_heads
        parts = self.linear(x, f"{name}.qkv").chunk(num_sharing + 2, -1)
        *queries, k, v = (part.unflatten(-1, (kv_heads, head_size)) for part in parts)
        q = torch.stack(queries, -2).flatten(-3, -2)  # [batch, tokens, heads, size]: those of a group are neighbours
        k, v = (part.repeat_interleave(num_sharing, -2) for part in (k, v))
        if self.shape.positions == "rope":
            q, k = self.turned(q), self.turned(k)
        seq = x.size(1)
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) / math.sqrt(head_size)
        scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), float("-inf"))
        attended = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), v).flatten(-2)
        return self.linear(attended, f"{name}.out")

    def turned(self, x):  # [batch, tokens, heads, size]
        seq, _, size = x.shape[1:]
        speeds = self.shape.rotary_base ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
        turns = torch.polar(torch.ones(seq, size // 2, dtype=torch.float64), torch.arange(seq)[:, None] * speeds)
        pairs = torch.complex(*x.chunk(2, -1)) * turns[:, None]
        return torch.cat([pairs.real, pairs.imag], -1)

    def mlp(self, x, name):
        up = self.linear(x, f"{name}.up")
        if self.shape.mlp == "swiglu":
            gate, up = up.chunk(2, -1)
            hidden = gate * torch.sigmoid(gate) * up
        elif self.shape.mlp == "gelu_tanh":
            hidden = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        else:
            hidden = F.gelu(up)
        return self.linear(hidden, f"{name}.down")

    def experts(self, x, name, bias):
        """Softmax scores, and experts with GeLU."""
        up, down = self.weights[f"{name}.experts.up"], self.weights[f"{name}.experts.down"]
        logits = x @ self.weights[f"{name}.router.weight"].T
        scores = logits.softmax(-1)

        def chosen_by(preference):
            chosen = preference.topk(self.shape.top_k, -1).indices
            return F.one_hot(chosen, len(up)).sum(-2)  # [batch, tokens, experts]

        mask = chosen_by(scores + bias)
        probs = scores * mask / (scores * mask).sum(-1, keepdim=True)
        outputs = torch.stack([F.gelu(x @ one_up.T) @ one_down.T for one_up, one_down in zip(up, down)], -1)
        output = (outputs * probs.unsqueeze(-2)).sum(-1)
        return output, Routed(logits, mask.sum((0, 1)), chosen_by(scores).sum((0, 1)))


def train_plainly(config, leave_out=lambda targets, rows: targets, is_frozen=lambda name, step: False):
    """Losses, gradient norms and evaluation losses by what PyTorch has: optimizer, clipping, learning-rate schedule.

    ``leave_out(targets, rows)`` makes those targets -100 that do not count; ``is_frozen(name, step)`` says what is not
    trained in a step. The model that was trained comes with them.
    """
    text = config.make_dataset()
    start = ParallelGPT(config.shape, group_of_one(), seed=config.seed, dtype=torch.float64)
    model = PlainGPT(config.shape, dict(start.named_parameters()))
    weights = [*model.weights.values()]
    decayed = {"params": [weight for weight in weights if weight.dim() > 1]}
    others = {"params": [weight for weight in weights if weight.dim() <= 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(
        [decayed, others], lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay
    )
    rise = LinearLR(optimizer, start_factor=1 / config.warmup_steps, total_iters=config.warmup_steps - 1)
    fall = CosineAnnealingLR(optimizer, config.steps - config.warmup_steps, eta_min=config.min_learning_rate)
    rates = SequentialLR(optimizer, [rise, fall], milestones=[config.warmup_steps])

    def forward(first, rows):
        samples = [text.sample(first + row, config.seq_length + 1) for row in rows]
        tokens = torch.stack([torch.from_numpy(sample) for sample in samples])
        logits, routed = model.logits(tokens[:, :-1])
        targets = leave_out(tokens[:, 1:], rows)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), routed

    # Balancing looks at micro-batches; all else is the same for the batch at once.
    size = config.micro_batch_size if config.num_experts else config.batch_size
    share = size / config.batch_size
    result = []
    for step in range(config.steps):
        optimizer.zero_grad()
        for name, weight in model.weights.items():
            weight.requires_grad_(not is_frozen(name, step))
        total, loads = 0.0, 0
        for start in range(0, config.batch_size, size):
            loss, routed = forward(step * config.batch_size, range(start, start + size))
            (share * sum((said.balancing_loss(config) for said in routed), loss)).backward()
            total += share * loss.item()
            loads += torch.stack([said.load for said in routed]) if routed else 0
        norm = torch.nn.utils.clip_grad_norm_(weights, config.clip_norm or math.inf)
        optimizer.step()
        rates.step()
        for bias, load in zip(model.expert_biases, loads if config.num_experts else ()):
            bias += config.expert_bias_update_rate * (load.double().mean() - load).sign()
        with torch.no_grad():
            is_due = (step + 1) % config.eval_interval == 0
            evaluation = forward(EVALUATION_SAMPLES, range(config.batch_size))[0].item() if is_due else 0.0
        result += [total, norm.item(), evaluation]
    return result, model
