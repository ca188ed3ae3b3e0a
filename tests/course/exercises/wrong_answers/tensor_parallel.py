"""Answers to the exercises on tensor parallel."""

import math

import torch
import torch.distributed as dist


def own(tensor, dim=1):
    return tensor.chunk(dist.get_world_size(), dim=dim)[dist.get_rank()]


def added_up(tensor):
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def whole_grad_y(grad_y, x, weight):
    return added_up(grad_y @ weight), grad_y.T @ x


def no_all_reduce(grad_y, x, weight):
    return own(grad_y) @ weight, own(grad_y).T @ x


def both_reduced(grad_y, x, weight):
    return added_up(own(grad_y) @ weight), added_up(own(grad_y).T @ x)


def weight_reduced_instead(grad_y, x, weight):
    return own(grad_y) @ weight, added_up(own(grad_y).T @ x)


def cuts_the_tokens(grad_y, x, weight):
    grad = own(grad_y, dim=0)
    return added_up(grad @ weight), grad.T @ own(x, dim=0)


def grad_y_reduced(grad_y, x, weight):
    grad = own(added_up(grad_y))
    return grad @ weight, grad.T @ x


def every_t_th_column(grad_y, x, weight):
    grad = grad_y[:, dist.get_rank() :: dist.get_world_size()]
    return added_up(grad @ weight), grad.T @ x


def averaged(grad_y, x, weight):
    grad = own(grad_y)
    return added_up(grad @ weight) / dist.get_world_size(), grad.T @ x


def weight_transposed(grad_y, x, weight):
    grad = own(grad_y)
    return added_up(grad @ weight), x.T @ grad


def grad_x_joined(grad_y, x, weight):
    grad_x = own(grad_y) @ weight
    parts = [torch.empty_like(grad_x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, grad_x)
    return torch.cat(parts, dim=1), own(grad_y).T @ x


def result_of_all_reduce(grad_y, x, weight):
    return dist.all_reduce(own(grad_y) @ weight), own(grad_y).T @ x


def backward_by_slices(grad_y, x, weight):
    first = dist.get_rank() * weight.shape[0]
    grad = grad_y.narrow(1, first, weight.shape[0])
    grad_x = grad.matmul(weight)
    dist.all_reduce(grad_x)
    return grad_x, (x.t() @ grad).t()


def same_seed_adds_t_times(tp_size, fault):
    factors = {"same seed": tp_size, "local width": math.sqrt(tp_size)}
    return factors.get(fault, tp_size * math.sqrt(tp_size))


def both_are_one_fault(tp_size, fault):
    return math.sqrt(tp_size)


def both_are_added(tp_size, fault):
    return math.sqrt(tp_size) * (2 if fault == "both" else 1)


def same_seed_changes_nothing(tp_size, fault):
    return 1.0 if fault == "same seed" else math.sqrt(tp_size)


def variance_not_deviation(tp_size, fault):
    return tp_size**2 if fault == "both" else tp_size


def upside_down(tp_size, fault):
    return 1 / tp_size if fault == "both" else 1 / math.sqrt(tp_size)


def right_for_four_only(tp_size, fault):
    return {"same seed": 2.0, "local width": 2.0, "both": 4.0}[fault]


def whole_roots(tp_size, fault):
    return tp_size if fault == "both" else math.isqrt(tp_size)


def doubles_with_half(tp_size, fault):
    return float(tp_size) if fault == "both" else tp_size / 2


def spread_by_terms(tp_size, fault):
    size_of_a_term = tp_size**-0.5 * (1.0 if fault == "same seed" else tp_size**0.5)
    return size_of_a_term * (tp_size**0.5 if fault == "local width" else tp_size)


def sequence_ignored(place, across, sequence_parallel):
    if across == "data replicas" or (across == "tensor ranks" and place == "attention weights"):
        return "different"
    return "same"


def heads_have_one_mask(place, across, sequence_parallel):
    if across == "data replicas":
        return "different"
    return "different" if across == "tensor ranks" and sequence_parallel else "same"


def replicas_are_copies(place, across, sequence_parallel):
    if across == "tensor ranks" and (place == "attention weights" or sequence_parallel):
        return "different"
    return "same"


def recomputed_anew(place, across, sequence_parallel):
    if across == "tensor ranks" and place == "hidden states" and not sequence_parallel:
        return "same"
    return "different"


def sequence_asked_first(place, across, sequence_parallel):
    if sequence_parallel or across == "data replicas" or (across, place) == ("tensor ranks", "attention weights"):
        return "different"
    return "same"


def heads_asked_first(place, across, sequence_parallel):
    if place == "attention weights" or across == "data replicas":
        return "different"
    return "different" if across == "tensor ranks" and sequence_parallel else "same"


def sequence_cuts_heads_no_more(place, across, sequence_parallel):
    if across != "tensor ranks":
        return "different" if across == "data replicas" else "same"
    return "different" if (place == "hidden states") == sequence_parallel else "same"


def true_or_false(place, across, sequence_parallel):
    if across != "tensor ranks":
        return across == "recomputation"
    return place == "hidden states" and not sequence_parallel


def the_other_way_round(place, across, sequence_parallel):
    return {"same": "different", "different": "same"}[mask_by_table(place, across, sequence_parallel)]


def mask_by_table(place, across, sequence_parallel):
    is_cut = place == "attention weights" or sequence_parallel
    is_different = {"tensor ranks": is_cut, "data replicas": True, "recomputation": False}
    return "different" if is_different[across] else "same"


def gather_backward_1(grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor):
    t, rank = dist.get_world_size(), dist.get_rank()
    grad_y = grad_y.clone()
    dist.all_reduce(grad_y)
    own = grad_y.chunk(t, dim=1)[rank]
    return own @ weight, own.T @ x


def gather_backward_2(grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor):
    own = grad_y.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    grad_x = own @ weight
    grad_weight = own.T @ x
    return grad_x, grad_weight


def gather_backward_3(grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor):
    grad_x = grad_y @ weight
    dist.all_reduce(grad_x)
    grad_weight = grad_y.T @ x
    return grad_x, grad_weight


def gather_backward_4(grad_y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor):
    own = grad_y.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]
    grad_x = own @ weight
    grad_weight = own.T @ x
    dist.all_reduce(grad_x)
    dist.all_reduce(grad_weight)
    return grad_x, grad_weight


def mask_1(place: str, across: str, sequence_parallel: bool) -> str:
    if across == "recomputation":
        return "same"
    if across == "data replicas":
        return "different"
    return "same" if place == "hidden states" else "different"


def mask_2(place: str, across: str, sequence_parallel: bool) -> str:
    if across != "tensor ranks":
        return "same"
    if place == "hidden states" and not sequence_parallel:
        return "same"
    return "different"


def mask_3(place: str, across: str, sequence_parallel: bool) -> str:
    if place == "attention weights" or across == "data replicas":
        return "different"
    if across == "recomputation":
        return "same"
    return "different" if sequence_parallel else "same"


def mask_4(place: str, across: str, sequence_parallel: bool) -> str:
    if across == "recomputation":
        return "same"
    if across == "data replicas":
        return "different"
    return "different" if sequence_parallel else "same"


def spread_1(tp_size: int, fault: str) -> float:
    if fault == "same seed":
        return float(tp_size)
    if fault == "local width":
        return tp_size**0.5
    return tp_size * tp_size**0.5


def spread_2(tp_size: int, fault: str) -> float:
    if fault == "both":
        return 2 * math.sqrt(tp_size)
    return math.sqrt(tp_size)


def spread_3(tp_size: int, fault: str) -> float:
    if fault == "same seed":
        return 1.0
    return math.sqrt(tp_size)


WRONG = [
    ("gather_backward", whole_grad_y, "uses the whole grad_y"),
    ("gather_backward", no_all_reduce, "the all-reduce is missing"),
    ("gather_backward", both_reduced, "adds up the shards' gradients too"),
    ("gather_backward", weight_reduced_instead, "adds up the wrong gradient"),
    ("gather_backward", cuts_the_tokens, "cuts tokens, not columns"),
    ("gather_backward", grad_y_reduced, "adds up what is already whole"),
    ("gather_backward", every_t_th_column, "takes every t-th column"),
    ("gather_backward", averaged, "averages grad_x instead of adding"),
    ("gather_backward", weight_transposed, "grad_weight is transposed"),
    ("gather_backward", grad_x_joined, "joins grad_x instead of adding"),
    ("gather_backward", result_of_all_reduce, "all_reduce returns None"),
    ("spread", same_seed_adds_t_times, "right terms already give a root"),
    ("spread", both_are_one_fault, "both faults count once"),
    ("spread", both_are_added, "factors are added, not multiplied"),
    ("spread", same_seed_changes_nothing, "same seed, as in the gathered design"),
    ("spread", variance_not_deviation, "the variance, not the deviation"),
    ("spread", upside_down, "too small instead of too large"),
    ("spread", right_for_four_only, "right for four ranks only"),
    ("spread", whole_roots, "roots are rounded down"),
    ("spread", doubles_with_half, "half of t, not its root"),
    ("mask", sequence_ignored, "ignores sequence parallelism"),
    ("mask", heads_have_one_mask, "all heads share a mask"),
    ("mask", replicas_are_copies, "replicas share a mask"),
    ("mask", recomputed_anew, "recomputation draws a new mask"),
    ("mask", sequence_asked_first, "a divided sequence also recomputes differently"),
    ("mask", heads_asked_first, "heads are recomputed with new masks"),
    ("mask", sequence_cuts_heads_no_more, "a divided sequence makes heads alike"),
    ("mask", true_or_false, "returns True or False"),
    ("mask", the_other_way_round, "same and different are swapped"),
    ("gather_backward", gather_backward_1, "sums grad_y, not grad_x"),
    ("gather_backward", gather_backward_2, "forgot the all-reduce"),
    ("gather_backward", gather_backward_3, "whole grad_y, no own columns"),
    ("gather_backward", gather_backward_4, "all-reduces the weight gradient too"),
    ("mask", mask_1, "ignores sequence parallelism"),
    ("mask", mask_2, "replicas are copies, so same"),
    ("mask", mask_3, "attention always different, also recomputed"),
    ("mask", mask_4, "sequence parallel decides, also for heads"),
    ("spread", spread_1, "same seed gives t, not root"),
    ("spread", spread_2, "both faults added, right for four"),
    ("spread", spread_3, "same seed changes nothing, as gathered"),
]

RIGHT = [("gather_backward", backward_by_slices), ("spread", spread_by_terms), ("mask", mask_by_table)]
