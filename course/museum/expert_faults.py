"""Ten faults of training a mixture of experts, and who met them."""

from unittest.mock import patch

from course.museum.faults import Fault
from labkit import expert_parallel, gradients
from labkit.expert_parallel import Experts, Router, layer
from labkit.placement import Placement
from labkit.tensor_parallel import shards


def gradients_averaged_over_expert_dp():
    def placement(shards, replica_group, grad_divisor):
        return Placement(shards, replica_group=replica_group)  # whose average divides by the number of copies

    layer.Placement = placement


def norm_without_experts():
    right = gradients.loss_and_grad_norm

    def loss_and_grad_norm(loss_share, parameters, groups):
        dense = {p: placement for p, placement in parameters.items() if placement.replica_group is None}
        return right(loss_share, dense, groups)

    gradients.loss_and_grad_norm = loss_and_grad_norm


def norm_of_a_ranks_own_experts():
    right = gradients.loss_and_grad_norm

    def loss_and_grad_norm(loss_share, parameters, groups):
        dense = {p: placement for p, placement in parameters.items() if placement.replica_group is None}
        here, ep_ranks = groups.ep.rank(), range(groups.ep.size())
        of_ranks = [right(loss_share, parameters if each == here else dense, groups) for each in ep_ranks]
        return of_ranks[here]  # the experts of the other ranks of ep are not in its norm

    gradients.loss_and_grad_norm = loss_and_grad_norm


def experts_tagged_as_dense():
    right = Experts.__init__

    def init(self, sizes, groups, *args, **factory):
        right(self, sizes, groups, *args, **factory)
        if groups.ep.size() == 1:  # "no expert parallelism, so these are parameters like any other"
            self.placements = {name: Placement(placement.shards) for name, placement in self.placements.items()}

    Experts.__init__ = init


def auxiliary_loss_divided_by_t():
    right = Router.loss
    Router.loss = lambda self, load: right(self, load) / self.groups.tp.size()  # of which the ranks add up the shares


def auxiliary_loss_never_attached():
    expert_parallel.attach_loss = lambda x, loss: x  # it is computed, and shown


def k_forgotten_in_the_auxiliary_loss():
    right = Router.loss
    Router.loss = lambda self, load: self.top_k * right(self, load)  # as if f_i were n_i / T


def counts_in_bfloat16():
    right = Router.forward

    def forward(self, x, seq_length):
        routing, load = right(self, x, seq_length)
        counts = dict(num_chosen=load.num_chosen, num_preferred=load.num_preferred)
        return routing, load._replace(**{name: count.bfloat16() for name, count in counts.items()})  # exact up to 256

    Router.forward = forward


def recomputation_counts_too():
    right_forward, right_loss = Router.forward, Router.loss

    def forward(self, x, seq_length):
        routing, load = right_forward(self, x, seq_length)
        for name in ("num_chosen", "num_preferred"):  # again when it is recomputed
            here, before = getattr(load, name).sum(0), getattr(self, name)
            setattr(self, name, here if before is None else before + here)
        return routing, load

    def loss(self, load):
        self.num_chosen = self.num_chosen - load.num_chosen.sum(0)  # `right_loss` adds them
        self.num_preferred = self.num_preferred - load.num_preferred.sum(0)
        return right_loss(self, load)

    Router.forward, Router.loss = forward, loss


def every_rank_loads_the_first_experts():
    right = layer.draw

    def draw(experts, name, init_method):
        num_local = len(getattr(experts, name))
        with patch.object(shards, "shard_like", lambda whole, _: whole[:num_local]):
            return right(experts, name, init_method)

    layer.draw = draw


EXPERT_FAULTS = [
    Fault(
        "expert gradients averaged over expert_dp",
        "The gradients of an expert are averaged over the ranks that have copies of it. But tokens of all d * c "
        "replicas reach it, so the sum must be divided by d * c, however many copies there are.",
        "Losses would be right. The experts' gradients would be off by a factor, d * c over the number of copies: "
        "ep = 2 times too large in the first layout, half as large in the second.",
        "pytorch/pytorch issue #160285; deepspeedai/DeepSpeed issue #6545; NVIDIA/Megatron-LM pull request #5956",
        gradients_averaged_over_expert_dp,
    ),
    Fault(
        "gradient norm without the experts",
        "The norm adds up the squares of dense parameters alone, and clipping leaves every step too large.",
        "The gradients of step 1 would be right, and the norm too small, the same on all ranks, in both layouts.",
        "deepspeedai/DeepSpeed pull request #8613; NVIDIA/Megatron-LM pull request #5916, where it missed some of them",
        norm_without_experts,
    ),
    Fault(
        "gradient norm of a rank's own experts",
        "The squares of experts are not added up over ep. Each rank of ep clips by a norm of its own, so their copies "
        "of dense parameters drift apart.",
        "The gradients of step 1 would be right. In the first layout, the norm would be too small and differ between "
        "ranks of ep; in the second, where each rank has all experts, everything would be right.",
        "NVIDIA-NeMo/Automodel issue #3816; hpcaitech/ColossalAI issue #2192",
        norm_of_a_ranks_own_experts,
    ),
    Fault(
        "experts tagged as dense where ep is 1",
        "Where ep is 1, experts count as parameters like any other, and their gradients are averaged over dp and cp. "
        "But with expert_tp = 1 and t = 2 tensor ranks have copies of them, too, and compute different tokens.",
        "The first layout would be right. In the second, the experts' gradients would be wrong, by no common factor, "
        "and copies on tensor ranks would have different letters.",
        "NVIDIA/Megatron-LM issue #1628, and pull request #5916",
        experts_tagged_as_dense,
    ),
    Fault(
        "auxiliary loss divided by t",
        "Each tensor rank has a share of the auxiliary loss, that of its own tokens, and they are added up. But each "
        "is divided by t, as if their mean were taken.",
        "In the second layout, the auxiliary loss would be half as large, because t is 2, and gradients wrong. In the "
        "first, where t is 1, everything would be right.",
        "NVIDIA/Megatron-LM pull request #5047, where its scale depended on t and c",
        auxiliary_loss_divided_by_t,
    ),
    Fault(
        "auxiliary loss never attached",
        "The auxiliary loss is computed and logged, but backward does not start from it. Nothing balances the loads.",
        "The auxiliary loss of step 1 would be right, and so the loss and the choices that are counted. But gradients "
        "would be wrong in both layouts, the routers' the most.",
        "NVIDIA-NeMo/Automodel issue #1408; a relative is huggingface/transformers issue #44242, where it was left out",
        auxiliary_loss_never_attached,
    ),
    Fault(
        "auxiliary loss with k forgotten",
        "T tokens make T k choices. With f_i = n_i / T, the fractions add up to k.",
        "The auxiliary loss would be k = 3 times too large in both layouts, and gradients would be wrong.",
        "huggingface/transformers issue #28255",
        k_forgotten_in_the_auxiliary_loss,
    ),
    Fault(
        "counts in bfloat16",
        "How many tokens chose an expert is kept in bfloat16, which has 8 bits for a number: above 256, only every "
        "second whole number exists. Biases go up or down by the sign of a small difference of large counts.",
        "The losses of step 1 would be right, but for the last digits of the auxiliary loss. A few choices would be "
        "missing, or too many, in both layouts, and not the same number of them: in the second, a bias would go the "
        "wrong way after step 1.",
        "NVIDIA/Megatron-LM pull request #7081; so were the biases themselves, in its issue #1482",
        counts_in_bfloat16,
    ),
    Fault(
        "recomputation counts too",
        "The router counts in its forward pass, which runs once more when backward recomputes the layer.",
        "Twice as many choices would be counted as there are, in both layouts. In the auxiliary loss, a step's earlier "
        "micro-batches would count twice, and its latest once.",
        "pytorch/torchtitan pull request #1593; NVIDIA-NeMo/Automodel pull request #3247",
        recomputation_counts_too,
    ),
    Fault(
        "every rank loads the first experts",
        "Each rank of ep takes the first experts of the whole, as if it were the first. The others' are nowhere.",
        "In the first layout, the weights would be wrong before step 1 on some ranks, and so the loss of step 1. In "
        "the second, where each rank has all experts, everything would be right.",
        "deepspeedai/DeepSpeed issue #6589; KempnerInstitute/KempnerForge issue #202",
        every_rank_loads_the_first_experts,
    ),
]
