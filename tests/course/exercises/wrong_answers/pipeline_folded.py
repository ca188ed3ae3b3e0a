"""Answers to the exercise on a pipeline that folds."""


def of_kind(can_run, start):
    return [op for op in can_run if op.startswith(start)]


def one_place_is_enough(can_run, num_held, limit):
    for op in of_kind(can_run, "B"):
        return op
    if num_held < limit:
        for op in sorted(of_kind(can_run, "F"), key=lambda op: "." not in op):
            return op
    return next(iter(of_kind(can_run, "W")), None)


def limit_reached_is_fine(can_run, num_held, limit):
    late, early = of_kind(can_run, "B"), [op for op in of_kind(can_run, "F") if num_held <= limit]
    return (late + sorted(early, key=len, reverse=True) + of_kind(can_run, "W") + [None])[0]


def w_after_each_backward(can_run, num_held, limit):
    late = [op for op in of_kind(can_run, "F") if op.endswith(".1") and num_held < limit]
    early = [op for op in of_kind(can_run, "F") if not op.endswith(".1") and num_held + 1 < limit]
    order = of_kind(can_run, "W") + of_kind(can_run, "B")[::-1] + late + early
    return order[0] if order else None


def never_a_w(can_run, num_held, limit):
    order = [op for op in can_run if op[0] == "B"]
    order += [op for op in can_run if op[0] == "F" and (limit - num_held >= 2 or ("." in op and limit > num_held))]
    return order[0] if order else None


def gives_up_when_full(can_run, num_held, limit):
    if num_held >= limit:
        return None
    early = [op for op in can_run if op[0] == "F" and "." not in op and limit - num_held >= 2]
    order = sorted(of_kind(can_run, "B"), key=len, reverse=True)
    order += [op for op in can_run if op[0] == "F" and "." in op] + early + of_kind(can_run, "W")
    return order[0] if order else None


def index_of_the_op(can_run, num_held, limit):
    return 0


def letter_of_the_op(can_run, num_held, limit):
    return min(can_run, key=lambda op: "BFW".index(op[0]))[0]


def two_places_for_both(can_run, num_held, limit):
    order = of_kind(can_run, "B") + (of_kind(can_run, "F") if limit - num_held >= 2 else []) + of_kind(can_run, "W")
    return order[0] if order else None


def whatever_comes_first(can_run, num_held, limit):
    return can_run[0]


def chunk_0_first(can_run, num_held, limit):
    fits = [op for op in can_run if op[0] != "F" or num_held + 2 - op.count(".") <= limit]
    return sorted(fits, key=lambda op: ("BFW".index(op[0]), op.count(".")))[0] if fits else None


def nothing_is_returned(can_run, num_held, limit):
    sorted(can_run)


def by_urgency(can_run, num_held, limit):
    free = limit - num_held
    urgency = []
    for op in can_run:
        if op[0] == "B":
            urgency.append((0 if "." in op else 1, op))
        elif op[0] == "F" and "." in op and free >= 1:
            urgency.append((2, op))
        elif op[0] == "F" and "." not in op and free >= 2:
            urgency.append((3, op))
        elif op[0] == "W":
            urgency.append((4, op))
    return min(urgency)[1] if urgency else None


def forwards_while_they_fit(can_run, num_held, limit):
    for op in can_run:
        if op.startswith("F") and op.endswith(".1") and num_held < limit:
            return op
    for op in can_run:
        if op.startswith("F") and not op.endswith(".1") and num_held < limit - 1:
            return op
    backwards = [op for op in can_run if op.startswith("B")]
    if backwards:
        return max(backwards, key=len)
    return can_run[-1] if can_run[-1].startswith("W") else None


WRONG = [
    ("next_op", one_place_is_enough, "chunk 0 takes the last place"),
    ("next_op", limit_reached_is_fine, "one chunk more than the limit"),
    ("next_op", w_after_each_backward, "W before what others wait for"),
    ("next_op", never_a_w, "nothing becomes free"),
    ("next_op", gives_up_when_full, "waits although a W could run"),
    ("next_op", index_of_the_op, "an index instead of the op"),
    ("next_op", letter_of_the_op, "the kind instead of the op"),
    ("next_op", two_places_for_both, "chunk 1 needs its reserved place"),
    ("next_op", whatever_comes_first, "the limit is ignored"),
    ("next_op", chunk_0_first, "chunk 0 before chunk 1"),
    ("next_op", nothing_is_returned, "the return is missing"),
]

RIGHT = [("next_op", by_urgency), ("next_op", forwards_while_they_fit)]
