"""Counts what a layer with experts sends: tokens to their experts and back, in place of an MLP's all-reduces.

A rank routes T tokens of its own, s b/(c t), each to k experts. The counts are those of `labkit.expert_parallel`, whose
one message each way has as many bytes as an all-to-all over ep, and a gather or a sum over expert_tp.
Sources: arXiv 2006.16668, section 3; arXiv 2504.14960.
"""

from typing import NamedTuple

from course.sizing.shapes import AnyGPT
from labkit.shape import GPT

KEPT_OF_HIDDEN = {"gelu": 2, "swiglu": 4}
"""How many numbers backward needs for each hidden unit of an MLP: GeLU's input and output; SwiGLU's four. One of them
goes into a linear layer."""


def hidden_bytes(model: GPT, fused_mlp: bool = False, input_bytes: int = 2) -> int:
    """Return the bytes that an MLP keeps for each hidden unit; fused, SwiGLU keeps its two inputs and the product only.

    ``input_bytes`` is for the number that goes into the last product: 1 in fp8.
    """
    numbers = 3 if model.mlp == "swiglu" and fused_mlp else KEPT_OF_HIDDEN[model.mlp]
    return 2 * (numbers - 1) + input_bytes


def all_to_all_bytes(model: GPT, ep_size: int, token_bytes: float) -> float:
    """Return what a rank sends over ep to bring tokens there and back: 2 T k h e (1 - 1/ep), where T h e are its own.

    >>> model = GPT(2, 16, 8, 32, num_experts=4, top_k=2)
    >>> all_to_all_bytes(model, ep_size=4, token_bytes=100)
    300.0
    """
    return 2 * model.top_k * token_bytes * (1 - 1 / ep_size)


def nodes_of_a_token(model: GPT, num_nodes: float) -> float:
    """Return on how many of the nodes with its experts a token has some, on average, if any are as likely.

    A router may take them from a few nodes only. Source: arXiv 2412.19437, section 2.1.2.

    >>> nodes_of_a_token(GPT(2, 16, 8, 32, num_experts=4, top_k=2), num_nodes=2)
    1.5
    """
    most = model.most_nodes if isinstance(model, AnyGPT) and model.most_nodes else num_nodes
    return min(most, ranks_of_a_token(model, num_nodes))


def ranks_of_a_token(model: GPT, num_ranks: float) -> float:
    """Return the same for ranks, of whatever nodes."""
    return num_ranks * (1 - (1 - 1 / num_ranks) ** model.top_k)


def expert_gather_bytes(model: GPT, expert_tp_size: int, token_bytes: float) -> float:
    """Return what it sends over expert_tp, each of whose ranks needs all rows, and has a partial sum of all outputs."""
    return 2 * model.top_k * token_bytes * (expert_tp_size - 1)


def mlp_halves(model: GPT, sequence_parallel: bool) -> int:
    """Return how many times the all-reduces of an MLP, half of a layer's, a layer with experts has.

    Without sequence parallelism each tensor rank routes its slice of the same tokens, and the slices of the output are
    put together by an all-reduce. With it, a rank has tokens of its own. Shared experts are an MLP.
    """
    return (0 if sequence_parallel else 1) + (1 if model.num_shared_experts else 0)


class Kept(NamedTuple):
    """The bytes that a layer's experts keep for each token that a rank routes."""

    activation: int
    """Of what experts compute between their two products: all but the first one's results."""
    others: int


def kept_of_experts(
    model: GPT, expert_tp_size: int, fused_mlp: bool = False, input_bytes: int = 2, fused_experts: bool = False
) -> Kept:
    """Return the bytes that a layer keeps for backward for each token that a rank routes, if loads are even.

    The router has the token in float32, its logits and its scores. Of the k choices: the row that each of the experts'
    ranks got, with an expert's hidden units, and the output twice: as it came back, and in the place where it is
    weighed. With ``fused_experts`` rows are weighed before, so that there is no output to keep, and the router has the
    token in 16 bits. Not counted: probabilities, and the indices that sort rows. See `hidden_bytes` for the rest.
    """
    h, k, width = model.hidden_size, model.top_k, model.expert_width
    of_first_product = 2 * (2 if model.mlp == "swiglu" else 1) * width
    activation = hidden_bytes(model, fused_mlp, input_bytes) * width - of_first_product
    of_output = 0 if fused_experts else 2 * 2 * h
    of_router = (2 if fused_experts else 4) * h + 2 * 4 * (model.num_experts or 0)
    return Kept(k * activation, of_router + k * (input_bytes * h * expert_tp_size + of_first_product + of_output))


def kept_bytes_per_token(model: GPT, expert_tp_size: int, fused_mlp: bool = False, input_bytes: int = 2) -> int:
    """Return the sum of `kept_of_experts`, as `labkit.expert_parallel` keeps them."""
    return sum(kept_of_experts(model, expert_tp_size, fused_mlp, input_bytes))
