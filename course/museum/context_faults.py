"""Three faults of training with a sequence cut across ranks, and who met them."""

import torch.nn.functional as F

from course.museum.faults import Fault
from labkit import pipeline
from labtrain import Trainer, model


def labels_shifted_after_the_cut():
    right = Trainer.micro_batches

    def micro_batches(self, first_sample):
        inputs, _ = right(self, first_sample)
        return inputs, [F.pad(tokens[:, 1:], (0, 1), value=-100) for tokens in inputs]  # the next that this rank has

    Trainer.micro_batches = micro_batches


def positions_of_consecutive_tokens():
    right = model.positions
    model.positions = lambda *cut, device: right(*cut[:3], zigzag=False, device=device)  # the tokens are zigzag


def loss_divided_by_c_twice():
    right = pipeline.run

    def run(schedule, chunks, groups, *args, loss, **options):
        c = groups.cp.size()  # the average over dp x cp divides by c, too
        total = right(schedule, chunks, groups, *args, loss=lambda *given: loss(*given) / c, **options)
        return None if total is None else total * c  # what is shown is not divided

    pipeline.run = run


CONTEXT_FAULTS = [
    Fault(
        "labels shifted after the cut",
        "Each rank makes its labels from its own tokens. Where its chunks end, what comes next is on a different rank: "
        "one label is lost, and where an early and a late chunk meet, one is wrong (but not on "
        "the last rank, where they touch).",
        "The weights would be right. The loss of step 1 would be wrong, the same on all ranks, and so would every "
        "gradient, by no common factor; those of the positions would not stand out.",
        "huggingface/transformers issue #36607",
        labels_shifted_after_the_cut,
    ),
    Fault(
        "positions of consecutive tokens",
        "Tokens are dealt out in zigzag, an early and a late chunk, but each rank numbers its own as if they were "
        "consecutive.",
        "The weights would be right. The loss of step 1 would be wrong, the same on all ranks, and so would every "
        "gradient, by no common factor; worst of all would be the gradient of the positions.",
        "sgl-project/sglang pull request #28463, where tokens are dealt out in turn: rotary positions were those of "
        "different tokens",
        positions_of_consecutive_tokens,
    ),
    Fault(
        "loss divided by c twice",
        "Each rank divides its loss by c. But gradients are averaged over dp x cp, which divides by c already.",
        "Every gradient would be 1/c = 0.5 times what one process has, and so would the norm. The loss of step 1 would "
        "be right.",
        "NovaSky-AI/SkyRL pull request #1420; NVIDIA/Megatron-LM pull request #3959; readers of the code asked whether "
        "it was so in NVIDIA/Megatron-LM issues #673, #906 and #1124",
        loss_divided_by_c_twice,
    ),
]
