"""Provides what the small GPT learns: an invented text with a known best loss, any file, or a file
of tokens.

Each sample follows from its number alone, so the order of the data does not depend on who reads it.
"""

import hashlib
import math
import time
import zlib
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np

LETTERS = " abcdefghijklmnopqrstuvwxyz"
EVALUATION_SAMPLES = 1 << 40
"""Samples from this number on are for evaluation: no run trains on them, or on that end
of a file.
"""

STRETCH = 1 << 14  # numbers at the beginning, in the middle and at the end that tell their width
CHUNK = 1 << 20  # numbers read at once where a whole file is checked
OTHER_TOKENIZERS = ("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken")


class InventedText:
    """A random sequence of ``num_words`` invented words, the n-th of them 1/n as frequent as the
    first (Zipf's law).

    A reader who knows the words can predict the letters inside a word, but not which word comes
    next. So the loss has a floor above zero, which can be computed.
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
        """The loss per letter that no model can beat in the long run: a word's entropy over its
        mean length.
        """
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
    """A file of numbers, one for each token, mapped into memory. No floor is known.

    With 8 bits it is any file, byte by byte. With 16, 32 or 64 bits it holds little-endian numbers
    and nothing else, as Megatron-LM's and nanoGPT's .bin do; or it is an .npy, whose header says
    how wide its numbers are. With None it has 16 bits if the vocabulary fits into them, otherwise
    32, and a file whose bytes say otherwise is refused. With a ``tokenizer``, a tokenizer.json of
    Hugging Face's tokenizers, it is a text that is made into tokens here, all at once.

    The last tenth of the file, or one sample's length if that is more, is for evaluation. The rest
    is cut into windows of one sample each. A window ends with the token that the next one begins
    with, so each token is predicted once. Every epoch has each window once, in an order of its own.
    Documents are not told apart: a window may have the end of one and the beginning of the next,
    and attention sees both.
    """

    path: str | Path
    seed: int = 0
    bits: int | None = 8
    vocab_size: int = 256
    tokenizer: str | Path | None = None
    floor_nats = None

    def __post_init__(self):
        path = Path(self.path)
        kind = "text" if self.bits == 8 else "token file"
        name = f"the {kind} {self.path}"
        narrowest = 16 if self.vocab_size <= 1 << 16 else 32
        bits = self.bits or narrowest
        try:
            if path.exists() and not path.is_file():
                raise ValueError(f"{name} is a folder, a pipe or a device: name a file")
            self._states_width = bits > 8 and _is_npy(path, name)
            if self.tokenizer is not None:
                times = [Path(file).stat().st_mtime_ns for file in (path, self.tokenizer)]
                self._tokens = _encoded(path, self.tokenizer, *times)
            elif self._states_width:
                self._tokens = _read_npy(path, name)
            else:
                self._tokens = _mapped(path, bits, name)
        except OSError as error:
            raise ValueError(f"{name} cannot be read ({error.strerror}): name a file") from error
        if self._tokens.dtype.kind not in "iu" or self._tokens.ndim != 1:
            found = f"{self._tokens.dtype} of shape {self._tokens.shape}"
            raise ValueError(f"{name} holds {found}: save whole numbers in one dimension")
        is_guess = self.bits is None and not self._states_width
        self.bits = 8 * self._tokens.itemsize
        self._check_stretches(is_guess)

    def sample(self, number: int, num_tokens: int) -> np.ndarray:
        """Return the tokens of sample ``number``: [num_tokens].

        Raises:
            ValueError: the file is shorter than two samples (one is for evaluation), or a token is
                out of range.
        """
        size = len(self._tokens)
        if size < 2 * num_tokens:
            unit = "bytes" if self.bits == 8 else "tokens"
            fault = f"{self.path} has {size} {unit}, but a sample takes {num_tokens}"
            fault += ", and one more is kept for evaluation"
            advice = f"name a file of at least {2 * num_tokens} {unit}, or use a shorter sequence"
            raise ValueError(f"{fault}: {advice}")
        kept = max(size // 10, num_tokens)
        part = range(size - kept)
        if number >= EVALUATION_SAMPLES:
            number -= EVALUATION_SAMPLES
            part = range(size - kept, size)
        step = max(1, num_tokens - 1)
        last_window, left_over = divmod(len(part) - num_tokens, step)
        epoch, turn = divmod(number, last_window + 1)
        window = shuffled(turn, last_window + 1, self.seed, epoch)
        # Without an offset, every epoch would leave out the same last tokens.
        offset = _draw(self.seed, epoch) % (left_over + 1)
        start = part.start + offset + step * window
        tokens = self._tokens[start : start + num_tokens]
        self._check(start, tokens)
        return tokens.astype(np.int64)

    def check(self, part: int = 0, num_parts: int = 1, seconds: float = math.inf) -> int:
        """Check the tokens in one of equal parts of the file; return how many were checked.

        It takes no more than so many seconds, and no memory that grows with the file.

        Raises:
            ValueError: a token is outside of the vocabulary.
        """
        first = self.num_tokens * part // num_parts
        stop = self.num_tokens * (part + 1) // num_parts
        deadline = time.monotonic() + seconds
        if self._cannot_be_wrong or not isinstance(self._tokens, np.memmap):
            return stop - first  # what is in memory was checked when it was made
        for start in range(first, stop, CHUNK):
            if time.monotonic() > deadline:
                return start - first
            where = self._tokens.offset + start * self._tokens.itemsize
            count = min(CHUNK, stop - start)
            # Read, not mapped: pages of a mapped file would count as memory of this process.
            self._check(start, np.fromfile(self.path, self._tokens.dtype, count, offset=where))
        return stop - first

    @property
    def num_tokens(self) -> int:
        """How many tokens the file has."""
        return len(self._tokens)

    @property
    def fingerprint(self) -> str:
        """What tells this file from others: its length, and a checksum of the numbers at its two
        ends.
        """
        ends = self._tokens[: 1 << 20].tobytes() + self._tokens[-1 << 20 :].tobytes()
        unit = "bytes" if self.bits == 8 else f"{self.bits}-bit tokens"
        return f"{len(self._tokens)} {unit} with checksum {zlib.crc32(ends):08x}"

    @property
    def _cannot_be_wrong(self) -> bool:
        """Whether every number that a token could be read as is in the vocabulary."""
        limits = np.iinfo(self._tokens.dtype)
        return limits.min == 0 and limits.max < self.vocab_size

    def _check_stretches(self, width_is_guessed: bool) -> None:
        """Check a short file, what a tokenizer made, or both ends and the middle of a long file."""
        size = self.num_tokens
        starts = [0, size // 2, size - STRETCH]
        length = STRETCH
        if size <= 3 * STRETCH or self.tokenizer is not None:
            starts = [0]
            length = size
        starts = [start // 8 * 8 for start in starts]  # so that a wider number is not cut
        stretches = [self._tokens[start : start + length] for start in starts]
        tokens = np.concatenate(stretches)
        if width_is_guessed and _are_parts_of_wider(tokens):
            fault = f"{self.path}, read as {self.bits}-bit numbers, is 0 in every second place"
            raise ValueError(f"{fault}: {self._advice(tokens)}")
        for start, stretch in zip(starts, stretches):
            self._check(start, stretch)

    def _check(self, start: int, tokens: np.ndarray) -> None:
        """Raise a ValueError if one of the tokens from ``start`` on is not in the vocabulary."""
        if not len(tokens) or (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            return
        wrong = int(((tokens < 0) | (tokens >= self.vocab_size)).argmax())
        fault = f"token {start + wrong} of {self.path} is {tokens[wrong]}"
        limit = f"and vocab_size={self.vocab_size}"
        if self.tokenizer is not None:
            raise ValueError(f"{fault} by {self.tokenizer}, {limit}: use the model's tokenizer")
        fault += f", read as {self.bits} bits, {limit}"
        first = max(0, start + wrong - STRETCH // 2) // 8 * 8
        raise ValueError(f"{fault}: {self._advice(self._tokens[first : first + STRETCH])}")

    def _advice(self, tokens: np.ndarray) -> str:
        """Return how to read a file of which these tokens cannot be right as they are read."""
        if self._states_width:
            return "give the vocab_size with which the file was made"
        stretch = tokens[: len(tokens) // 8 * 8].view(np.uint8)
        for order, bits in product("<>", (16, 32, 64)):
            if not _make_sense(stretch.view(f"{order}u{bits // 8}"), self.vocab_size):
                continue
            if order == ">":
                advice = "save them little-endian, or as an .npy, which states the order"
                return f"its bytes make sense as big-endian {bits}-bit numbers, so {advice}"
            return f"its bytes make sense as {bits}-bit numbers, so give token_bits={bits}"
        return "give the vocab_size and token_bits with which the file was made"


def shuffled(index: int, size: int, *key: int) -> int:
    """Return what stands at ``index`` in a shuffle of ``range(size)`` that is never written down.

    Each key has its own shuffle. A Feistel network permutes the numbers below a power of 4: a round
    replaces (left, right) by (right, left XOR a hash of right), which can be undone. A number that
    comes out too large goes in again, until it is below ``size``.
    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002.

    >>> sorted(shuffled(index, 5, 1) for index in range(5))
    [0, 1, 2, 3, 4]
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        for number in range(8):  # fewer rounds make shuffles of a few windows uneven
            left = index >> half_bits
            right = index & mask
            index = right << half_bits | (left ^ _draw(*key, number, right) & mask)
        if index < size:
            return index


def _draw(*key: int) -> int:
    """Return a number of 64 bits, always the same for a key."""
    text = " ".join(str(int(number)) for number in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _is_npy(path: Path, name: str) -> bool:
    """Return whether a file begins as an .npy does; one that is called so must."""
    with open(path, "rb") as file:
        start = file.read(6)
    is_npy = start == b"\x93NUMPY"
    if path.suffix == ".npy" and start and not is_npy:
        way_out = "save it with numpy.save, or do not call it .npy"
        raise ValueError(f"{name} does not begin as an .npy does: {way_out}")
    return is_npy


def _read_npy(path: Path, name: str) -> np.ndarray:
    """Return the array of an .npy, mapped into memory."""
    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        way_out = "if it was cut, copy it again, otherwise save whole numbers in one dimension"
        raise ValueError(f"{name} cannot be read as an .npy ({error}): {way_out}") from None


def _mapped(path: Path, bits: int, name: str) -> np.ndarray:
    """Return the numbers of a file that has nothing else, mapped into memory."""
    size = path.stat().st_size
    dtype = f"<u{bits // 8}"
    if size % (bits // 8):
        fault = f"{name} has {size} bytes, which is not whole {bits}-bit numbers"
        raise ValueError(f"{fault}: use token_bits")
    return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)


def _are_parts_of_wider(tokens: np.ndarray) -> bool:
    """Return whether every second number is 0, as the upper halves of small numbers are."""
    counts = sorted(np.count_nonzero(half) for half in (tokens[0::2], tokens[1::2]))
    return bool(counts[0] == 0 and counts[1] >= 16)  # fewer could be chance


def _make_sense(tokens: np.ndarray, vocab_size: int) -> bool:
    """Return whether numbers could be tokens, of this width and in this byte order."""
    if len(tokens) < 16 or tokens.max() >= vocab_size or _are_parts_of_wider(tokens):
        return False
    # In the wrong byte order, small numbers become multiples of 256.
    num_swapped = np.count_nonzero(tokens) - np.count_nonzero(tokens & 0xFF)
    return bool(num_swapped <= len(tokens) // 2)


def find_tokenizer(folder: str | Path, vocab_size: int) -> Path | None:
    """Return the tokenizer.json in a model's folder, or None if its tokens are a text's bytes.

    Raises:
        ValueError: it is not there, and the model's vocabulary is not that of bytes.
    """
    path = Path(folder) / "tokenizer.json"
    if path.exists():
        return path
    files = [file for pattern in OTHER_TOKENIZERS for file in Path(folder).glob(pattern)]
    fault = f"{folder} has no tokenizer.json"
    if files:
        fault += f", only {' and '.join(sorted(file.name for file in files))}"
        convert = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        way_out = f"let transformers write it, by {convert}"
    elif vocab_size == TokenFile.vocab_size:
        return None
    else:
        fault += f", and its {vocab_size} tokens are not the 256 bytes of a text"
        way_out = "put the model's there"
    raise ValueError(f"{fault}: {way_out}, or give --tokens, made by its tokenizer")


@lru_cache(maxsize=1)
def _encoded(path: Path, tokenizer: str | Path, *times: int) -> np.ndarray:
    """Return a text's tokens, [n]; remembered until a file is modified at a different time.

    Special tokens around a text, such as Llama's first one, are left out: samples begin anywhere.
    """
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(str(tokenizer))
    except Exception as error:  # it raises nothing more special
        fault = f"{tokenizer} cannot be read ({error})"
        raise ValueError(f"{fault}: give a file of tokens instead") from None
    # A file remembers how its tokenizer was last called. transformers, too, forgets these two.
    loaded.no_truncation()
    loaded.no_padding()
    if getattr(loaded.model, "dropout", None):  # each rank would draw its own tokens
        loaded.model.dropout = None
    text = path.read_bytes().decode("utf-8", errors="replace")  # whatever the machine's locale
    return np.array(loaded.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
