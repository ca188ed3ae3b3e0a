"""A backward pass in two halves: first the gradient of the input, which another rank waits for, then the weights'.

The graph of a stage is a path from the output back to the input, with weights beside it. The first half goes along the
path and keeps the gradient that arrives at each node with weights beside it; the second half starts from those.
Source of the idea: arXiv 2401.10241, section 2.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge


class SplitBackward:
    """The backward of ``output`` with respect to ``x``, a leaf, and to the weights in between.

    Where there is no path from output to x (token numbers have no gradient), the second half is all of backward. If a
    weight is used at two nodes, the second half goes the whole path again: right, but nothing is saved. Layers under
    checkpointing save nothing either: they are computed again for the first half, and for each node of the second.
    """

    def __init__(self, output: torch.Tensor, x: torch.Tensor):
        self.output, self.x = output, x
        self.grad: torch.Tensor | None = None
        self.arrived: dict[Node, Sequence[torch.Tensor | None]] = {}
        self.weights_at: dict[Node, set[torch.Tensor]] = {}
        self.has_first_half = False
        if output.requires_grad and x.requires_grad:
            root = get_gradient_edge(output).node
            self.has_first_half, self.weights_at = _weights_beside(root, get_gradient_edge(x).node)

    def input_gradient(self, grad: torch.Tensor | None) -> None:
        """Fill ``x.grad``, given the gradient of the output (None for a scalar)."""
        self.grad = grad
        if self.has_first_half:
            hooks = [node.register_prehook(partial(self.arrived.__setitem__, node)) for node in self.weights_at]
            torch.autograd.backward(self.output, grad, inputs=[self.x], retain_graph=True)
            for hook in hooks:
                hook.remove()

    def weight_gradient(self) -> None:
        """Add to the gradients of the weights."""
        beside = list(self.weights_at.values())
        weights = set().union(*beside)
        if not self.has_first_half:
            if self.output.requires_grad:
                torch.autograd.backward(self.output, self.grad)
        elif len(weights) < sum(map(len, beside)):
            torch.autograd.backward(self.output, self.grad, inputs=list(weights))
        else:
            for node, grads in self.arrived.items():
                given = [index for index, grad in enumerate(grads) if grad is not None]
                edges = [GradientEdge(node, index) for index in given]
                weights = list(self.weights_at[node])
                torch.autograd.backward(edges, [grads[index] for index in given], inputs=weights)


def _weights_beside(root: Node, x: Node) -> tuple[bool, dict[Node, set[torch.Tensor]]]:
    """Return whether a path leads from the output to x, and for each node on it the weights that lie beside it."""
    leads_to_x: dict[Node, bool] = {}
    leaves: dict[Node, set[torch.Tensor]] = {}  # of nodes that do not lead to x
    beside: dict[Node, set[torch.Tensor]] = {}
    for node in _children_first(root):
        children = _children(node)
        leads_to_x[node] = node is x or any(leads_to_x[child] for child in children)
        found = set().union(*(leaves[child] for child in children if not leads_to_x[child]))
        if not leads_to_x[node]:
            leaf = getattr(node, "variable", None)
            leaves[node] = found if leaf is None else {leaf}
        elif found:
            beside[node] = found
    return leads_to_x[root], beside


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _children_first(root: Node) -> list[Node]:
    """Return all nodes of a graph, each after the nodes it leads to. (No recursion: graphs may be deep.)"""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False)]
    while stack:
        node, children_are_done = stack.pop()
        if children_are_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack += [(node, True), *((child, False) for child in _children(node))]
    return order
