"""Splits a backward pass in two: first the gradient of the input, which another rank waits for,
then the weights'.

The graph of a stage is a path from the output back to the input, with weights beside it. The first
half goes along the path and keeps the gradient that arrives at each node with weights beside it;
the second half starts from those. Source of the idea: arXiv 2401.10241, section 2.
"""

from collections.abc import Callable, Sequence
from functools import partial
from graphlib import TopologicalSorter

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from labkit.torch_versions import graph_owner


def split_backward(
    output: GradientEdge, x: torch.Tensor, grad: torch.Tensor | None
) -> Callable[[], None]:
    """Fill ``x.grad`` of a leaf x, given the gradient of the output; return what adds to the
    gradients of the weights.

    Where there is no path from output to x (token numbers have no gradient), the second half is all
    of backward. If a weight is used at two nodes, the second half repeats all of backward: correct,
    but without gain. So it is under checkpointing. The graph, with all that it has saved, stays
    until the second half; the paper frees most of it after the first.
    """
    backward = partial(torch.autograd.backward, output, grad)
    if not x.requires_grad:
        return backward
    weights_at = _weights_beside(output.node, get_gradient_edge(x).node)
    if weights_at is None:
        return backward
    arrived: dict[Node, Sequence[torch.Tensor | None]] = {}
    hooks = [node.register_prehook(partial(arrived.__setitem__, node)) for node in weights_at]
    backward(inputs=[x], retain_graph=True)
    for hook in hooks:
        hook.remove()
    weights = set().union(*weights_at.values())
    if len(weights) < sum(map(len, weights_at.values())):
        return partial(backward, inputs=list(weights))

    owner = graph_owner(output)

    # A default, so that the function holds the owner
    def weight_gradient(owner: GradientEdge | None = owner) -> None:
        for node, grads in arrived.items():
            given = {
                GradientEdge(node, index): grad
                for index, grad in enumerate(grads)
                if grad is not None
            }
            torch.autograd.backward(
                list(given), list(given.values()), inputs=list(weights_at[node])
            )

    return weight_gradient


def _weights_beside(root: Node, x: Node) -> dict[Node, set[torch.Tensor]] | None:
    """Return the weights beside each node on a path from the output to x; None if there
    is no path.
    """
    graph: dict[Node, list[Node]] = {}  # each with the nodes it leads to
    found = [root]
    while found:
        node = found.pop()
        if node not in graph:
            graph[node] = [child for child, _ in node.next_functions if child is not None]
            found += graph[node]
    leaves: dict[Node, set[torch.Tensor]] = {}  # of nodes that do not lead to x
    beside: dict[Node, set[torch.Tensor]] = {}
    for node in TopologicalSorter(graph).static_order():  # each after the nodes it leads to
        weights = set().union(*(leaves[child] for child in graph[node] if child in leaves))
        if node is not x and all(child in leaves for child in graph[node]):
            leaf = getattr(node, "variable", None)
            leaves[node] = weights if leaf is None else {leaf}
        elif weights:
            beside[node] = weights
    return None if root in leaves else beside
