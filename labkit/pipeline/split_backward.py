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
    output: torch.Tensor, x: torch.Tensor, grad: torch.Tensor | None
) -> Callable[[], None]:
    """Fill ``x.grad`` of a leaf x, given the gradient of the output; return what adds to the
    gradients of the weights.

    Where there is no path from output to x (token numbers have no gradient), the second half is all
    of backward. If a weight is used at two nodes, it goes the whole path again: that is right, but
    saves nothing, as checkpointing.
    """
    if not output.requires_grad:
        return lambda: None
    backward = partial(torch.autograd.backward, output, grad)
    if not x.requires_grad:
        return backward
    weights_at = _weights_beside(get_gradient_edge(output).node, get_gradient_edge(x).node)
    if weights_at is None:
        return backward
    arrived: dict[Node, Sequence[torch.Tensor | None]] = {}
    hooks = [node.register_prehook(partial(arrived.__setitem__, node)) for node in weights_at]
    backward(inputs=[x], retain_graph=True)
    for hook in hooks:
        hook.remove()
    weights = set().union(*weights_at.values())
    if len(weights) < sum(map(len, weights_at.values())):
        return partial(backward, inputs=[*dict.fromkeys(map(_leaf_of, weights))])

    owner = graph_owner(output)

    def weight_gradient(
        owner: GradientEdge | None = owner,
    ) -> None:  # a default, so that the function holds it
        for node, grads in arrived.items():
            given = {
                GradientEdge(node, index): grad
                for index, grad in enumerate(grads)
                if grad is not None
            }
            _backward_to_weights(given, weights_at[node])

    return weight_gradient


Weight = torch.Tensor | GradientEdge  # a leaf; or, sharded, the node after the one that gathers it


def _backward_to_weights(given: dict[GradientEdge, torch.Tensor], weights: set[Weight]) -> None:
    """Go on with the gradients of a node, only to the weights beside it."""
    leaves = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    gathered = [weight for weight in weights if isinstance(weight, GradientEdge)]
    outputs = list(given)
    grads = list(given.values())
    if leaves:
        torch.autograd.backward(outputs, grads, retain_graph=bool(gathered), inputs=leaves)
    if gathered:  # all nodes of a unit lead to its leaf, so stop before it
        of_weights = torch.autograd.grad(outputs, gathered, grads)
        torch.autograd.backward(gathered, of_weights)


def _leaf_of(weight: Weight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight
    [(gather, _)] = weight.node.next_functions
    assert gather is not None
    accumulate = next(child for child, _ in gather.next_functions if child is not None)
    return accumulate.variable  # pyright: ignore[reportAttributeAccessIssue]


def _weights_beside(root: Node, x: Node) -> dict[Node, set[Weight]] | None:
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
    leaves: dict[Node, set[Weight]] = {}  # of nodes that do not lead to x
    beside: dict[Node, set[Weight]] = {}

    def weights_of(node: Node) -> set[Weight]:
        found: set[Weight] = set()
        for child, index in node.next_functions:
            beyond = () if child is None else child.next_functions
            if any(getattr(node, "gathers_weights", False) for node, _ in beyond):
                found.add(GradientEdge(child, index))  # pyright: ignore[reportArgumentType]
            elif child in leaves:
                found |= leaves[child]
        return found

    for node in TopologicalSorter(graph).static_order():  # each after the nodes it leads to
        weights = weights_of(node)
        if node is not x and all(child in leaves for child in graph[node]):
            leaf = getattr(node, "variable", None)
            leaves[node] = weights if leaf is None else {leaf}
        elif weights:
            beside[node] = weights
    return None if root in leaves else beside
