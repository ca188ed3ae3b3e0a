"""The exercise of notebook 08: how many parameters of a transformer layer a rank holds."""

from course.exercises.base import Exercise


def my_layer_parameters(hidden_size, tp_size):
    h, t = hidden_size, tp_size
    column = (3 * h * h + 3 * h + 4 * h * h + 4 * h) // t  # Q-K-V and the MLP's first layer, biases too
    row_weights = (h * h + 4 * h * h) // t
    whole = 2 * h + 2 * 2 * h  # biases of the two row layers; weight and bias of the two norms
    return column + row_weights + whole


layer_parameters = Exercise(
    "layer_parameters",
    my_layer_parameters,
    notebook="08",
    cases=[(64, 1), (64, 2), (64, 4), (12288, 8)],
    hints=[
        "List the twelve tensors that the cell above printed for layers.0. Which six are the same for t = 4?",
        "Four weight matrices have 3 h², h², 4 h² and 4 h² numbers: 12 h² in all, and all are cut. The biases of "
        "column layers are cut, those of row layers are not.",
        "Whole on every rank: two norms with a weight and a bias each, and the biases of the two row layers: 6 h.",
    ],
)


def parameters_wrongly(hidden_size, tp_size, cut, whole) -> int:
    """Return 12 h² / t with ``cut`` more vectors of h numbers that are cut, and ``whole`` that are not."""
    return (12 * hidden_size + cut) * hidden_size // tp_size + whole * hidden_size


layer_parameters.mistakes_of(
    parameters_wrongly,
    (dict(cut=13, whole=0), "Not everything is cut. Norms and the biases of row layers are whole on every rank."),
    (dict(cut=0, whole=0), "These are the four weight matrices. Biases and norms have parameters, too."),
    (dict(cut=7, whole=2), "The norms are missing: two, each with a weight and a bias of h numbers."),
    (dict(cut=7, whole=4), "2 h too few: there are two norms, and each has a weight *and* a bias."),
    (dict(cut=0, whole=13), "A column layer's bias is cut with its outputs: each rank has those of its own columns."),
    (dict(cut=9, whole=4), "A row layer's bias is added after the sum, once for each of *all* outputs: it is not cut."),
    (dict(cut=11, whole=2), "A norm works on whole hidden states, so each rank has all of its weight and bias."),
)
