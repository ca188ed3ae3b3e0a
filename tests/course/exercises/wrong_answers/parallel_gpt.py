"""Answers to the exercise on the parallel GPT."""


def all_divided(hidden_size, tp_size):
    return (12 * hidden_size**2 + 13 * hidden_size) // tp_size


def weights_only(hidden_size, tp_size):
    return 12 * hidden_size * hidden_size // tp_size


def one_norm(hidden_size, tp_size):
    h = hidden_size
    attention = 3 * h * h // tp_size + 3 * h // tp_size + h * h // tp_size + h
    mlp = 4 * h * h // tp_size + 4 * h // tp_size + 4 * h * h // tp_size + h
    return 2 * h + attention + mlp


def row_biases_divided(hidden_size, tp_size):
    h = hidden_size
    return 4 * h + (12 * h * h + 9 * h) // tp_size


def biases_whole(hidden_size, tp_size):
    matrices = [(3 * hidden_size, hidden_size), (hidden_size, hidden_size)] + 2 * [(4 * hidden_size, hidden_size)]
    return sum(rows * columns // tp_size for rows, columns in matrices) + 13 * hidden_size


def by_shapes(hidden_size, tp_size):
    h, own = hidden_size, hidden_size // tp_size
    norms = 2 * (h + h)
    attention = 3 * own * h + 3 * own + h * own + h
    return norms + attention + 4 * own * h + 4 * own + h * 4 * own + h


WRONG = [
    ("layer_parameters", all_divided, "everything is divided"),
    ("layer_parameters", weights_only, "only weights count"),
    ("layer_parameters", one_norm, "one norm is forgotten"),
    ("layer_parameters", row_biases_divided, "row biases are cut"),
    ("layer_parameters", biases_whole, "all biases are whole"),
]

RIGHT = [("layer_parameters", by_shapes)]
