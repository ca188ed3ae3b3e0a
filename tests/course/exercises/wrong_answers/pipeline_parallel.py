"""Answers to the exercises on pipeline parallel."""

import torch


def one_f_one_b(num_warm_up, num_micro_batches):
    """The ops with so many forwards first, then one forward and one backward in turns."""
    ops = [f"F{i}" for i in range(num_warm_up)]
    for i in range(num_warm_up, num_micro_batches):
        ops += [f"F{i}", f"B{i - num_warm_up}"]
    return ops + [f"B{i}" for i in range(num_micro_batches - min(num_warm_up, num_micro_batches), num_micro_batches)]


def one_forward_too_many(rank, num_stages, num_micro_batches):
    return one_f_one_b(min(num_stages - rank, num_micro_batches), num_micro_batches)


def ranks_counted_backwards(rank, num_stages, num_micro_batches):
    return one_f_one_b(min(rank, num_micro_batches), num_micro_batches)


def warm_up_without_limit(rank, num_stages, num_micro_batches):
    return one_f_one_b(num_stages - rank - 1, num_micro_batches)


def gpipe(rank, num_stages, num_micro_batches):
    return [f"{kind}{i}" for kind in "FB" for i in range(num_micro_batches)]


def no_warm_up(rank, num_stages, num_micro_batches):
    return one_f_one_b(0, num_micro_batches)


def last_backward_first(rank, num_stages, num_micro_batches):
    num_warm_up = min(num_stages - rank - 1, num_micro_batches)
    ops = one_f_one_b(num_warm_up, num_micro_batches)
    return ops[: len(ops) - num_warm_up] + ops[len(ops) - num_warm_up :][::-1]


def no_cool_down(rank, num_stages, num_micro_batches):
    num_warm_up = min(num_stages - rank - 1, num_micro_batches)
    ops = one_f_one_b(num_warm_up, num_micro_batches)
    return ops[: len(ops) - num_warm_up]


def counts_from_1(rank, num_stages, num_micro_batches):
    ops = one_f_one_b(min(num_stages - rank - 1, num_micro_batches), num_micro_batches)
    return [f"{op[0]}{int(op[1:]) + 1}" for op in ops]


def one_line_of_text(rank, num_stages, num_micro_batches):
    return " ".join(one_f_one_b(min(num_stages - rank - 1, num_micro_batches), num_micro_batches))


def order_by_counting(rank, num_stages, num_micro_batches):
    ops, forwards, backwards = [], 0, 0
    while backwards < num_micro_batches:
        if forwards < num_micro_batches and forwards - backwards < num_stages - rank:
            ops.append("F" + str(forwards))
            forwards += 1
        else:
            ops.append("B" + str(backwards))
            backwards += 1
    return ops


def definitions_swapped(p, m, v):
    return (p - 1) / (v * m + p - 1), (p - 1) / (v * m)


def chunks_ignored(p, m, v):
    return (p - 1) / m, (p - 1) / (m + p - 1)


def chunks_in_the_first_only(p, m, v):
    return (p - 1) / (v * m), (p - 1) / (m + p - 1)


def p_waits(p, m, v):
    return p / (v * m), p / (v * m + p)


def whole_division(p, m, v):
    return (p - 1) // (v * m), (p - 1) // (v * m + p - 1)


def chunks_make_it_larger(p, m, v):
    return v * (p - 1) / m, v * (p - 1) / (m + v * (p - 1))


def total_has_p(p, m, v):
    return (p - 1) / (v * m), (p - 1) / (v * m + p)


def in_percent(p, m, v):
    return 100 * (p - 1) / (v * m), 100 * (p - 1) / (v * m + p - 1)


def share_of_work(p, m, v):
    return (p - 1) / (v * m), v * m / (v * m + p - 1)


def bubble_from_makespan(p, m, v):
    ideal = 3 * m
    total = 3 * (m + (p - 1) / v)
    return (total - ideal) / ideal, (total - ideal) / total


def squares(x, weight):
    return (x @ weight) ** 2


def mean_of_means(weight, micro_batches):
    total = 0
    for x in micro_batches:
        loss = squares(x, weight).mean() / len(micro_batches)
        loss.backward()
        total += loss.item()
    return total, weight.grad


def gradient_not_divided(weight, micro_batches):
    total, num_rows = 0, sum(len(x) for x in micro_batches)
    for x in micro_batches:
        loss = squares(x, weight).sum()
        loss.backward()
        total += loss.item()
    return total / num_rows, weight.grad


def loss_not_divided(weight, micro_batches):
    total, num_rows = 0, sum(len(x) for x in micro_batches)
    for x in micro_batches:
        loss = squares(x, weight).sum()
        (loss / num_rows).backward()
        total += loss.item()
    return total, weight.grad


def last_loss_only(weight, micro_batches):
    num_rows = sum(len(x) for x in micro_batches)
    for x in micro_batches:
        loss = squares(x, weight).sum() / num_rows
        loss.backward()
    return loss.item(), weight.grad


def one_backward_for_all(weight, micro_batches):
    loss = squares(weight=weight, x=micro_batches[0]).sum()
    for x in micro_batches[1:]:
        loss = loss + squares(x, weight).sum()
    loss = loss / sum(len(x) for x in micro_batches)
    loss.backward()
    return loss.item(), weight.grad


def numbers_not_rows(weight, micro_batches):
    total, count = 0, sum(x.numel() for x in micro_batches)
    for x in micro_batches:
        loss = squares(x, weight).sum() / count
        loss.backward()
        total += loss.item()
    return total, weight.grad


def clears_each_time(weight, micro_batches):
    total, num_rows = 0, sum(len(x) for x in micro_batches)
    for x in micro_batches:
        weight.grad = None
        loss = squares(x, weight).sum() / num_rows
        loss.backward()
        total += loss.item()
    return total, weight.grad


def loss_forgotten(weight, micro_batches):
    return average_by_shares(weight, micro_batches)[1]


def gradient_first(weight, micro_batches):
    return average_by_shares(weight, micro_batches)[::-1]


def average_by_shares(weight, micro_batches):
    num_rows, losses = sum(x.shape[0] for x in micro_batches), []
    for x in micro_batches:
        share = squares(x, weight).mean() * (len(x) / num_rows)
        share.backward()
        losses.append(share.detach())
    return float(sum(losses)), weight.grad


def row(ops):
    def my_row():
        return ops

    return my_row


def average_gradient_1(weight: torch.Tensor, micro_batches: list[torch.Tensor]):
    total = 0.0
    for x in micro_batches:
        loss = ((x @ weight) ** 2).mean() / len(micro_batches)
        loss.backward()
        total += loss.item()
    return total, weight.grad


def average_gradient_2(weight: torch.Tensor, micro_batches: list[torch.Tensor]):
    num_rows = sum(len(x) for x in micro_batches)
    total = 0.0
    for x in micro_batches:
        loss = ((x @ weight) ** 2).sum()
        loss.backward()
        total += loss.item()
    return total / num_rows, weight.grad


def average_gradient_3(weight: torch.Tensor, micro_batches: list[torch.Tensor]):
    num_rows = len(micro_batches) * micro_batches[0].shape[0]
    total = 0.0
    for x in micro_batches:
        loss = ((x @ weight) ** 2).sum() / num_rows
        loss.backward()
        total += loss.item()
    return total, weight.grad


def average_gradient_4(weight: torch.Tensor, micro_batches: list[torch.Tensor]):
    num_rows = sum(x.shape[0] for x in micro_batches)
    total = 0.0
    for x in micro_batches:
        loss = (x @ weight) ** 2 / num_rows
        loss.backward()
        total += loss.sum().item()
    return total, weight.grad


def average_gradient_5(weight: torch.Tensor, micro_batches: list[torch.Tensor]):
    num_rows = sum(x.shape[0] for x in micro_batches)
    for x in micro_batches:
        loss = ((x @ weight) ** 2).sum() / num_rows
        loss.backward()
    return loss.item(), weight.grad


def bubble_1(p: int, m: int, v: int) -> tuple[float, float]:
    return (p - 1) / m, (p - 1) / (m + p - 1)


def bubble_2(p: int, m: int, v: int) -> tuple[float, float]:
    return (p - 1) / (v * m), (p - 1) / (m + p - 1)


def bubble_3(p: int, m: int, v: int) -> tuple[float, float]:
    return (p - 1) / m / v, (p - 1) / (m + p - 1) / v


def bubble_4(p: int, m: int, v: int) -> tuple[float, float]:
    idle = v * (p - 1)
    return idle / m, idle / (m + idle)


def mended_row_1() -> str:
    return "F0 F1 F2 B0 B1 B2"


def mended_row_2() -> str:
    return "F0 B0 F1 B1 F2 B2"


def mended_row_3() -> str:
    return "F0 F1 B0 F2 B1"


def one_f_one_b_order_1(rank: int, num_stages: int, num_micro_batches: int) -> list[str]:
    warmup = num_stages - rank - 1
    ops = [f"F{i}" for i in range(warmup)]
    for i in range(num_micro_batches - warmup):
        ops += [f"F{warmup + i}", f"B{i}"]
    ops += [f"B{i}" for i in range(num_micro_batches - warmup, num_micro_batches)]
    return ops


def one_f_one_b_order_2(rank: int, num_stages: int, num_micro_batches: int) -> list[str]:
    warmup = min(rank, num_micro_batches)
    ops = [f"F{i}" for i in range(warmup)]
    for i in range(num_micro_batches - warmup):
        ops += [f"F{warmup + i}", f"B{i}"]
    for i in range(num_micro_batches - warmup, num_micro_batches):
        ops.append(f"B{i}")
    return ops


def one_f_one_b_order_3(rank: int, num_stages: int, num_micro_batches: int) -> list[str]:
    warmup = min(num_stages - rank, num_micro_batches)
    ops = [f"F{i}" for i in range(warmup)]
    forward, backward = warmup, 0
    while forward < num_micro_batches:
        ops.append(f"F{forward}")
        ops.append(f"B{backward}")
        forward += 1
        backward += 1
    while backward < num_micro_batches:
        ops.append(f"B{backward}")
        backward += 1
    return ops


def one_f_one_b_order_4(rank: int, num_stages: int, num_micro_batches: int) -> list[str]:
    warmup = min(num_stages - 1 - rank, num_micro_batches)
    ops = []
    for i in range(warmup):
        ops.append(f"F{i}")
    for i in range(num_micro_batches - warmup):
        ops.append(f"F{i + warmup}")
        ops.append(f"B{i}")
    return ops


def one_f_one_b_order_5(rank: int, num_stages: int, num_micro_batches: int) -> list[str]:
    forwards = [f"F{i}" for i in range(num_micro_batches)]
    backwards = [f"B{i}" for i in range(num_micro_batches)]
    return forwards + backwards


def bubble_anew_swapped(p, m, v):
    return (p - 1) / (v * m + p - 1), (p - 1) / (v * m)


def bubble_anew_v_upstairs(p, m, v):
    return (v * p - 1) / (v * m), (v * p - 1) / (v * m + v * p - 1)


def bubble_anew_percent(p, m, v):
    ideal = m * v
    idle = p - 1
    return round(100 * idle / ideal, 2), round(100 * idle / (ideal + idle), 2)


def bubble_anew_int(p, m, v):
    over_ideal = (p - 1) / (v * m)
    return over_ideal, over_ideal / (1 - over_ideal) if over_ideal != 1 else float("inf")


def average_gradient_anew_weighted(weight, micro_batches):
    sizes = torch.tensor([x.size(0) for x in micro_batches], dtype=torch.float64)
    weights = sizes / sizes.sum()
    mean_loss = 0.0
    for share, x in zip(weights.tolist(), micro_batches):
        loss = share * (x @ weight).square().mean() / len(micro_batches)
        loss.backward()
        mean_loss += loss.item() * len(micro_batches)
    return mean_loss, weight.grad


def average_gradient_anew_clone_grad(weight, micro_batches):
    n = sum(x.size(0) for x in micro_batches)
    total = 0.0
    for x in micro_batches:
        loss = (x @ weight).square().sum()
        loss.backward()
        weight.grad.div_(n)
        total += loss.item() / n
    return total, weight.grad


def one_f_one_b_order_anew_cooldown_reversed(rank, num_stages, num_micro_batches):
    warm = min(num_stages - rank - 1, num_micro_batches)
    ops = [f"F{i}" for i in range(warm)]
    for i in range(num_micro_batches - warm):
        ops += [f"F{warm + i}", f"B{i}"]
    ops += [f"B{i}" for i in reversed(range(num_micro_batches - warm, num_micro_batches))]
    return ops


def bubble_anew_fraction(p, m, v):
    from fractions import Fraction

    x = Fraction(p - 1, v * m)
    return x, x / (1 + x)


WRONG = [
    ("one_f_one_b_order", one_forward_too_many, "one forward too many at first"),
    ("one_f_one_b_order", ranks_counted_backwards, "the last rank warms up most"),
    ("one_f_one_b_order", warm_up_without_limit, "more forwards than micro-batches"),
    ("one_f_one_b_order", gpipe, "all forwards first: GPipe"),
    ("one_f_one_b_order", no_warm_up, "the warm-up is missing"),
    ("one_f_one_b_order", last_backward_first, "the last backwards run in reverse"),
    ("one_f_one_b_order", no_cool_down, "the last backwards are missing"),
    ("one_f_one_b_order", counts_from_1, "micro-batches count from 1"),
    ("one_f_one_b_order", one_line_of_text, "one text instead of a list"),
    ("bubble", definitions_swapped, "the two definitions are swapped"),
    ("bubble", chunks_ignored, "ignores the chunks"),
    ("bubble", chunks_in_the_first_only, "the second ignores the chunks"),
    ("bubble", p_waits, "p instead of p - 1"),
    ("bubble", whole_division, "integer division gives zero"),
    ("bubble", chunks_make_it_larger, "chunks make the bubble larger"),
    ("bubble", total_has_p, "the total has one slot too many"),
    ("bubble", in_percent, "percent instead of shares"),
    ("bubble", share_of_work, "the share of work, not idle"),
    ("average_gradient", mean_of_means, "the short micro-batch counts too much"),
    ("average_gradient", gradient_not_divided, "divides the reported loss only"),
    ("average_gradient", loss_not_divided, "divides the gradient only"),
    ("average_gradient", last_loss_only, "returns the last loss only"),
    ("average_gradient", one_backward_for_all, "one backward for all micro-batches"),
    ("average_gradient", numbers_not_rows, "divides by numbers, not rows"),
    ("average_gradient", clears_each_time, "only the last gradient is left"),
    ("average_gradient", loss_forgotten, "the loss is not returned"),
    ("average_gradient", gradient_first, "the two results are swapped"),
    ("mended_row", row("F0 B0 F1 F2 B1 B2"), "the row that got stuck"),
    ("mended_row", row("F0 F1 F2 B0 B1 B2"), "holds three micro-batches"),
    ("mended_row", row("F0 B0 F1 B1 F2 B2"), "still waits for B0 too early"),
    ("mended_row", row("F0 F1 B0 B1 B2 F2"), "B2 runs before its F2"),
    ("mended_row", row("F0 F1 B0 F2 B1"), "B2 is missing"),
    ("mended_row", row("F1 F2 B1 F3 B2 B3"), "micro-batches count from 1"),
    ("mended_row", row("F0, F1, B0, F2, B1, B2"), "commas between the ops"),
    ("average_gradient", average_gradient_1, "mean of means, unequal last batch"),
    ("average_gradient", average_gradient_2, "only the reported loss is divided"),
    ("average_gradient", average_gradient_3, "rows of first batch times m"),
    ("average_gradient", average_gradient_4, "backward on a vector raises"),
    ("average_gradient", average_gradient_5, "reports the last batch's loss"),
    ("bubble", bubble_1, "ignores the chunks"),
    ("bubble", bubble_2, "idle over total without v"),
    ("bubble", bubble_3, "both simply divided by v"),
    ("bubble", bubble_4, "v multiplies instead of divides"),
    ("mended_row", mended_row_1, "all forwards first, holds three"),
    ("mended_row", mended_row_2, "strict turns, still stuck"),
    ("mended_row", mended_row_3, "last backward forgotten"),
    ("one_f_one_b_order", one_f_one_b_order_1, "warmup not limited by micro-batches"),
    ("one_f_one_b_order", one_f_one_b_order_2, "warmup counted from first rank"),
    ("one_f_one_b_order", one_f_one_b_order_3, "one warmup forward too many"),
    ("one_f_one_b_order", one_f_one_b_order_4, "last backwards missing"),
    ("one_f_one_b_order", one_f_one_b_order_5, "GPipe's order"),
    ("bubble", bubble_anew_swapped, "the two definitions swapped"),
    ("bubble", bubble_anew_v_upstairs, "chunks counted as ranks"),
    ("bubble", bubble_anew_percent, "rounded percent"),
    ("bubble", bubble_anew_int, "x / (1 - x) for the share"),
    ("average_gradient", average_gradient_anew_weighted, "divided by rows, and by m again"),
    ("average_gradient", average_gradient_anew_clone_grad, "gradient divided in the loop"),
    ("one_f_one_b_order", one_f_one_b_order_anew_cooldown_reversed, "the last backwards in reverse"),
]

RIGHT = [
    ("one_f_one_b_order", order_by_counting),
    ("bubble", bubble_from_makespan),
    ("average_gradient", average_by_shares),
    ("mended_row", row("F0 F1 B0 B1 F2 B2")),
    ("mended_row", row("F0 F1 B0 F2 B2 B1")),
    ("mended_row", row(["F0", "F1", "B0", "F2", "B1", "B2"])),
    ("bubble", bubble_anew_fraction),
]
