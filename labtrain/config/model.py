"""Options of the model: its shape, or a folder of weights that says it."""

from dataclasses import dataclass, fields
from numbers import Real

from labkit.shape import GPT
from labtrain.config.values import set_value


@dataclass(frozen=True)
class ModelOptions(GPT):
    """The shape of a GPT, as a run takes it. Its vocabulary is that of what there is to learn, so
    ``config.shape`` is the GPT itself.
    """

    num_layers: int = 4  # Transformer layers.
    hidden_size: int = 64  # Width of the hidden states.
    seq_length: int = 64  # Tokens per sequence.
    # How many tokens the tokenizer of the token file knows.
    vocab_size: int | None = None
    num_attention_heads: int = 4  # Attention heads per layer.
    # A folder in Hugging Face's format (GPT-2, Llama, Mistral, Mixtral) to start from. It says the
    # shape; only the seq_length may be less. With --resume, weights of a checkpoint take the place
    # of its weights.
    init_from: str | None = None
    dropout: float = 0.0  # Probability to drop, in attention and hidden states.

    def _take_shape(self, folder: str) -> None:
        """Set the fields of the shape to those of the weights in a folder, which is whole and fits
        them.
        """
        from labtrain import pretrained  # it imports half of torch

        shape = pretrained.read_shape(folder, self.seq_length)
        for field in fields(GPT):
            name = field.name
            given = getattr(self, name)
            there = getattr(shape, name)
            is_default = given == getattr(ModelOptions, name)
            if given != there and not is_default and name != "seq_length":
                fault = f"{name}={given!r} contradicts init_from={folder}, which has {there!r}"
                raise ValueError(f"{fault}: leave it out")
            set_value(self, name, there)
        pretrained.check(folder, shape)

    def _check_dropout(self) -> None:
        if not (isinstance(self.dropout, Real) and 0 <= self.dropout < 1):
            raise ValueError(f"dropout={self.dropout!r} must be in [0, 1)")
