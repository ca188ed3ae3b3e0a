"""Writes a plan as command-line options of Megatron-LM, torchtitan and labkit, and says what these cannot express."""

import shlex
from dataclasses import fields
from typing import NamedTuple

from course.sizing.megatron_options import megatron_options
from course.sizing.plan import Plan
from course.sizing.shapes import AnyGPT, latent_of, left_out, query_size
from course.sizing.torchtitan_options import torchtitan_options
from labkit.partition import check_divides
from labkit.shape import GPT
from labkit.sizes import check_size

SCRIPTS = {"megatron-lm": "pretrain_gpt.py", "torchtitan": "-m torchtitan.train", "labkit": "-m labtrain"}


class Arguments(NamedTuple):
    """A plan as a command. As text it is ready to paste into a shell, with what is missing as comments below it."""

    command: str
    options: dict[str, object]
    """Their values, True for a flag."""
    missing: list[str]
    """What the options do not say, one sentence each."""

    @property
    def words(self) -> list[str]:
        """The options as a program gets them."""
        return [word for option in self._written() for word in shlex.split(option)]

    def __str__(self) -> str:
        return "\n".join([" \\\n  ".join([self.command, *self._written()]), *(f"# {each}" for each in self.missing)])

    def _written(self) -> list[str]:
        return [name if value is True else f"{name} {_quoted(value)}" for name, value in self.options.items()]


def _quoted(value: object) -> str:
    return " ".join(shlex.quote(str(each)) for each in (value if isinstance(value, tuple) else (value,)))


def arguments(plan: Plan, framework: str, gpus_per_node: int = 8) -> Arguments:
    """Return a plan as options of "megatron-lm", "torchtitan" or "labkit", after the torchrun that starts it.

    On several nodes each runs the command, with the first one's name in HEAD_NODE.

    >>> llama = GPT(32, 4096, 8192, 128256, 32, 8, 14336, norm="rmsnorm", mlp="swiglu", positions="rope", tied=False)
    >>> said = arguments(Plan(llama, 8, 128, cp_size=2, zero_stage=1, fused_attention=True), "labkit")
    >>> said.command, said.options["--cp-size"]
    ('torchrun --standalone --nproc-per-node 8 -m labtrain', 2)

    Raises:
        ValueError: the framework is unknown, or the nodes do not share the GPUs.
    """
    if framework not in SCRIPTS:
        raise ValueError(f"framework={framework!r} is unknown: use {', '.join(SCRIPTS)}")
    here = min(check_size("gpus_per_node", gpus_per_node), plan.world_size)
    check_divides(here, "world_size", plan.world_size, parts_name="gpus_per_node")
    nodes = f"--nnodes {plan.world_size // here} --rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:29500"
    start = (
        f"torchrun {nodes if here < plan.world_size else '--standalone'} --nproc-per-node {here} {SCRIPTS[framework]}"
    )
    options, missing = _OPTIONS[framework](plan)
    if framework == "megatron-lm" and plan.zero_stage < 2 and (plan.tp_size > 1 or plan.cp_size > 1):
        start = f"CUDA_DEVICE_MAX_CONNECTIONS=1 {start}"  # it insists, except from Blackwell on
    said = {name: value for name, value in options.items() if value is not None and value is not False}
    sentences = [sentence for sentence, is_so in missing.items() if is_so]
    if more := left_out(plan.model):
        sentences.append(more)
    return Arguments(start, said, sentences)


def _labkit(plan: Plan) -> tuple[dict[str, object], dict[str, bool]]:
    model, v = plan.model, plan.num_chunks
    sizes = "num_layers", "hidden_size", "seq_length", "num_attention_heads"
    said, defaults = {}, {field.name: field.default for field in fields(GPT) if field.name != "vocab_size"}
    for name, default in defaults.items():
        if name in sizes or getattr(model, name) != default:
            said[name] = getattr(model, name)
    for name in ("batch_size", "micro_batch_size", "tp_size", "cp_size", "pp_size", "sequence_parallel", "zero_stage"):
        said[name] = getattr(plan, name)
    said |= {"context_parallel": plan.context_parallel if plan.cp_size > 1 else None, "stage_layers": plan.stage_layers}
    said |= {"schedule": plan.schedule or "interleaved", "num_chunks": v} if v > 1 else {}
    said |= {"recompute": "full" if plan.recompute == "full" else None, "precision": "bfloat16"}
    said |= {"ep_size": plan.ep_size, "expert_tp_size": plan.expert_tp_size} if model.num_experts else {}
    options: dict[str, object] = {}
    for name, value in said.items():
        turns_off = value is False and defaults.get(name) is True
        options[f"--{'no-' if turns_off else ''}{name.replace('_', '-')}"] = turns_off or value
    is_any = isinstance(model, AnyGPT)
    return options, {
        f"The vocabulary is its text's: add --tokens FILE --vocab-size {model.vocab_size}.": True,
        "A plan has no learning rate and number of steps: add --learning-rate, --steps.": True,
        "Heads are h/a wide there.": query_size(model) != model.hidden_size,
        "It refuses this h and a: with positions='rope' h/a must be even.":
            model.positions == "rope" and model.hidden_size // (model.num_attention_heads or 1) % 2 > 0,
        "It has no latent attention: this is plain attention.": latent_of(model) is not None,
        "Its attention has no window: each token sees all before it.": is_any and model.window is not None,
        "It recomputes all layers, or none.": plan.recompute_layers is not None,
        "It has no fused SwiGLU: it keeps two more numbers for each hidden unit.": plan.fused_mlp,
        "It has no norms inside attention.": is_any and model.attention_norms > 0,
        "Its routers take experts on any number of nodes.": is_any and bool(model.most_nodes),
        "It has no dense layers before those with experts.": is_any and model.num_dense_layers > 0,
        "It recomputes whole layers or nothing: fused attention keeps no scores anyway.": "core_attn" in plan.modules,
        f"It recomputes whole layers or nothing, not {', '.join(plan.recompute_modules or ())}: it keeps them.":
            plan.recompute_modules is not None,
        "It keeps activations on the GPU.": plan.offload_layers > 0,
        "Its Adam has a float32 copy and two moments in float32: 12 bytes for each parameter.":
            plan.optimizer_bytes != 12,
        "It weighs what experts return, which it keeps: use fused_experts=False.": plan.fused_experts,
        "Its attention is fused.": not plan.fused_attention,
        "It has no products in fp8: it computes in bfloat16.": plan.precision == "fp8",
        "It adds up and sends gradients in 4 bytes.": plan.gradient_bytes == 2,
    }  # fmt: skip


_OPTIONS = {"megatron-lm": megatron_options, "torchtitan": torchtitan_options, "labkit": _labkit}
