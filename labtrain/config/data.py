"""Options of the data: what there is to learn, and the vocabulary that it gives the model."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from labkit.shape import GPT
from labkit.sizes import whole_number
from labtrain.config.model import ModelOptions
from labtrain.config.values import set_value
from labtrain.data import InventedText, TokenFile, find_tokenizer


@dataclass(frozen=True)
class DataOptions(ModelOptions):
    """What a model learns, and so how large its vocabulary is."""

    # A file to learn byte by byte, or by the tokenizer.json of init_from, with its last tenth kept
    # for evaluation. Every epoch has each window of seq_length tokens once, in a new order;
    # documents are not told apart. By default "invented": words that labtrain makes up, with a
    # known best loss.
    text: str | None = None
    # A file of token numbers instead: little-endian ones and nothing else, or an .npy.
    tokens: str | None = None
    # Bits of each number in the token file; by default 16 up to a vocab_size of 65,536, else 32,
    # and a file that looks otherwise is refused. An .npy states it.
    token_bits: Literal[16, 32, 64, None] = None
    seed: int = 0  # Decides the weights, the data and the dropout.

    def make_dataset(self) -> InventedText | TokenFile:
        """Return what there is to learn."""
        if self.tokens is not None and self.vocab_size is not None:
            return TokenFile(self.tokens, self.seed, self.token_bits, self.vocab_size)
        if self.text is None or self.text == "invented":
            return InventedText(seed=self.seed)
        vocab_size = self.shape.vocab_size
        tokenizer = find_tokenizer(self.init_from, vocab_size) if self.init_from else None
        return TokenFile(self.text, self.seed, vocab_size=vocab_size, tokenizer=tokenizer)

    @property
    def shape(self) -> GPT:
        """The model's shape; its vocabulary is that of the text or the tokens."""
        dataset = InventedText if self.text == "invented" else TokenFile
        values = {field.name: getattr(self, field.name) for field in fields(GPT)}
        values["vocab_size"] = self.vocab_size or dataset.vocab_size
        return GPT(**values)

    def _check_seed(self) -> None:
        seed = whole_number(self.seed)
        if seed is None or not 0 <= seed < 1 << 63:
            fault = f"seed={self.seed!r} must be a whole number from 0 up"
            raise ValueError(f"{fault}, of at most 63 bits")
        set_value(self, "seed", seed)

    def _check_dataset(self) -> None:
        if not isinstance(self.text, str | Path):
            raise ValueError(f"text={self.text!r} is not a file: name one, or use 'invented'")
        if self.tokens is None:
            given = None
            if self.vocab_size is not None and not self.init_from:
                given = "vocab_size"
            elif self.token_bits is not None:
                given = "token_bits"
            if given:
                fault = f"{given}={getattr(self, given)} is for a file of tokens"
                raise ValueError(f"{fault}: name one by tokens=, or leave out {given}")
            return
        if not isinstance(self.tokens, str | Path) or self.text != "invented":
            both = f"text={self.text!r} and tokens={self.tokens!r}"
            raise ValueError(f"{both}: name one file, a text or tokens")
        if self.vocab_size is None:
            fault = f"tokens={self.tokens!r} needs the vocab_size of its tokenizer"
            raise ValueError(f"{fault}, such as 50257 for GPT-2's")

    def _check_vocabulary(self, model: GPT) -> None:
        needed = self.make_dataset().vocab_size
        if needed > model.vocab_size:
            has = f"the model in {self.init_from} {model.vocab_size}"
            fault = f"the text has {needed} different tokens, {has}"
            way_out = "give tokens= made by its tokenizer, or put its tokenizer.json there"
            raise ValueError(f"{fault}: {way_out}")
