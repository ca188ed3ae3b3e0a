"""Tells how long a node of autograd's graph lives."""

import weakref

import torch


class Activation:
    """What a node of autograd's graph keeps until it is let go."""


class Keeps(torch.autograd.Function):
    """The identity, whose node keeps an `Activation`; a reference to that goes into a list."""

    @staticmethod
    def forward(ctx, x, given):
        ctx.activation = Activation()
        given.append(weakref.ref(ctx.activation))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None
