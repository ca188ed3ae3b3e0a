"""Provides what the small GPT learns: an invented text with a known best loss, any file, or a file of tokens.

Each sample is drawn by its number alone, so the order of the data does not depend on who reads it.
"""

import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

LETTERS = " abcdefghijklmnopqrstuvwxyz"
EVALUATION_SAMPLES = 1 << 40
"""Samples from this number on are for evaluation: no run trains on them, or on that end of a file."""


class InventedText:
    """A random sequence of ``num_words`` invented words, the n-th of them 1/n as frequent as the first (Zipf's law).

    A reader who knows the words can predict the letters inside a word, but not which word comes next. So the loss has a
    floor above zero, which can be computed.
    """

    vocab_size = len(LETTERS)
    fingerprint = "invented"

    def __init__(self, num_words: int = 64, seed: int = 0):
        if num_words < 2:
            raise ValueError(f"num_words={num_words} leaves nothing to predict: use at least 2")
        self.seed = seed
        self.words: list[str] = []  # of one to three syllables, such as fa, mori, tulevo
        draw = np.random.default_rng(seed).integers
        while len(self.words) < num_words:
            word = "".join("bdfgklmnprstvz"[draw(14)] + "aeiou"[draw(5)] for _ in range(draw(1, 4)))
            if word not in self.words:
                self.words.append(word)
        self.frequency = 1.0 / np.arange(1, num_words + 1)
        self.frequency /= self.frequency.sum()
        self._lengths = np.array([len(word) + 1 for word in self.words])  # with the space after it

    @property
    def floor_nats(self) -> float:
        """The loss per letter that no model can beat in the long run: a word's entropy over its mean length."""
        return float(-(self.frequency @ np.log(self.frequency)) / (self.frequency @ self._lengths))

    def sample(self, number: int, num_tokens: int) -> np.ndarray:
        """Return the tokens of sample ``number``, from a random place in the text: [num_tokens]."""
        generator = np.random.default_rng([self.seed, number])
        # A random place lies in a long word more often than in a short one, and anywhere in it.
        longer = self.frequency * self._lengths
        first = generator.choice(len(self.words), p=longer / longer.sum())
        skipped = generator.integers(self._lengths[first])
        rest = generator.choice(len(self.words), size=num_tokens // 3 + 1, p=self.frequency)
        text = " ".join(self.words[i] for i in [first, *rest])[skipped:] + " "
        return np.array([LETTERS.index(letter) for letter in text[:num_tokens]])

    def decode(self, tokens) -> str:
        """Return tokens as letters."""
        return "".join(LETTERS[token] for token in tokens)


@dataclass
class TokenFile:
    """A file of numbers, one for each token, mapped into memory; samples start at random places. No floor is known.

    With 8 bits it is any file, byte by byte. With 16 or 32 bits it holds little-endian numbers and nothing else, as
    Megatron-LM's and nanoGPT's .bin do; or it is an .npy, whose header says how many bits. The last tenth of the file,
    or one sample's length if that is more, is for evaluation. With a ``tokenizer``, a tokenizer.json of Hugging Face's
    tokenizers, it is a text that is made into tokens here, all at once.
    """

    path: str | Path
    seed: int = 0
    bits: int = 8
    vocab_size: int = 256
    tokenizer: str | Path | None = None
    floor_nats = None

    def __post_init__(self):
        path, name = Path(self.path), f"the {'text' if self.bits == 8 else 'token file'} {self.path}"
        try:
            if path.exists() and not path.is_file():
                raise ValueError(f"{name} is a folder, a pipe or a device: name a file")
            size, dtype = path.stat().st_size, f"<u{self.bits // 8}"
            if size and self.bits > 8 and path.suffix == ".npy":
                self._tokens = np.load(path, mmap_mode="r")
            elif size % (self.bits // 8):
                raise ValueError(f"{name} has {size} bytes, which is not whole {self.bits}-bit numbers: use token_bits")
            else:
                self._tokens = np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)
        except OSError as error:
            raise ValueError(f"{name} cannot be read ({error.strerror}): name a file") from error
        if self.tokenizer is not None:
            times = (Path(each).stat().st_mtime_ns for each in (path, self.tokenizer))
            self._tokens = _encoded(path, self.tokenizer, *times)
        if self._tokens.dtype.kind not in "iu" or self._tokens.ndim != 1:
            found = f"{self._tokens.dtype} of shape {self._tokens.shape}"
            raise ValueError(f"{name} holds {found}: save whole numbers in one dimension")
        self.bits = 8 * self._tokens.itemsize

    def sample(self, number: int, num_tokens: int) -> np.ndarray:
        """Return the tokens of sample ``number``: [num_tokens].

        Raises:
            ValueError: the file is shorter than two samples (one is for evaluation), or a token is out of range.
        """
        size, unit = len(self._tokens), "bytes" if self.bits == 8 else "tokens"
        if size < 2 * num_tokens:
            fault = f"has {size} {unit}, but a sample takes {num_tokens}, and one more is kept for evaluation"
            advice = f"name a file of at least {2 * num_tokens} {unit}, or use a shorter sequence"
            raise ValueError(f"{self.path} {fault}: {advice}")
        kept = max(size // 10, num_tokens)
        first, length = (size - kept, kept) if number >= EVALUATION_SAMPLES else (0, size - kept)
        start = first + int(np.random.default_rng([self.seed, number]).integers(length - num_tokens + 1))
        tokens = self._tokens[start : start + num_tokens].astype(np.int64)
        wrong = (tokens < 0) | (tokens >= self.vocab_size)
        if wrong.any():
            fault = f"is {tokens[wrong.argmax()]}, read as {self.bits} bits, and vocab_size={self.vocab_size}"
            advice = "give the vocab_size and token_bits with which the file was made"
            raise ValueError(f"token {start + wrong.argmax()} of {self.path} {fault}: {advice}")
        return tokens

    @property
    def fingerprint(self) -> str:
        """What tells this file from others: its length, and a checksum of the numbers at its two ends."""
        ends = self._tokens[: 1 << 20].tobytes() + self._tokens[-1 << 20 :].tobytes()
        unit = "bytes" if self.bits == 8 else f"{self.bits}-bit tokens"
        return f"{len(self._tokens)} {unit} with checksum {zlib.crc32(ends):08x}"


@lru_cache(maxsize=1)
def _encoded(path: Path, tokenizer: str | Path, *times: int) -> np.ndarray:
    """Return a text's tokens without special ones, [n]; remembered until a file is modified at a different time."""
    from tokenizers import Tokenizer

    try:
        encode = Tokenizer.from_file(str(tokenizer)).encode
    except Exception as error:  # it raises nothing more special
        raise ValueError(f"{tokenizer} cannot be read ({error}): give a file of tokens instead") from None
    return np.array(encode(path.read_text(errors="replace"), add_special_tokens=False).ids, dtype=np.uint32)
