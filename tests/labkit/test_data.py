"""Text with a known floor: the floor is what word counts and a perfect reader say, and samples stand on their own."""

import os
import re
import resource
from collections import Counter

import numpy as np
import pytest

from labkit.data import EVALUATION_SAMPLES, LETTERS, InventedText, TokenFile

TEXT = InventedText(seed=1)


def whole_words(num_samples, num_tokens=4000):
    """The words of long samples, without those that a sample's ends may cut."""
    samples = (TEXT.decode(TEXT.sample(number, num_tokens)) for number in range(num_samples))
    return [word for text in samples for word in text.split(" ")[1:-1]]


def test_the_floor_is_the_entropy_of_counted_words():
    words = whole_words(num_samples=60)
    assert len(words) > 30_000
    shares = np.array(list(Counter(words).values())) / len(words)
    entropy, mean_length = -(shares @ np.log(shares)), sum(len(word) + 1 for word in words) / len(words)
    assert entropy / mean_length == pytest.approx(TEXT.floor_nats, rel=0.01)


def chance_of_next_letter(begun, letter):
    """What a reader who knows all words and how frequent they are says after the letters of a begun word."""
    fits = [frequency for word, frequency in zip(TEXT.words, TEXT.frequency) if f"{word} ".startswith(begun)]
    goes_on = [
        frequency for word, frequency in zip(TEXT.words, TEXT.frequency) if f"{word} ".startswith(begun + letter)
    ]
    return sum(goes_on) / sum(fits)


def test_only_a_reader_who_knows_the_words_reaches_the_floor():
    known = {}
    losses = []
    for number in range(20):
        _, _, text = TEXT.decode(TEXT.sample(number, 2000)).partition(" ")  # from the first whole word on
        begun = ""
        for letter in text:
            if (begun, letter) not in known:
                known[begun, letter] = chance_of_next_letter(begun, letter)
            losses.append(-np.log(known[begun, letter]))
            begun = "" if letter == " " else begun + letter
    assert np.mean(losses) == pytest.approx(TEXT.floor_nats, rel=0.02)
    counts = np.array(list(Counter("".join(word + " " for word in whole_words(20))).values()))
    only_letters = -(counts / counts.sum()) @ np.log(counts / counts.sum())
    assert only_letters > 2 * TEXT.floor_nats  # a reader who knows only how frequent letters are


def test_words_are_as_frequent_as_said():
    words = whole_words(num_samples=60)
    counted = Counter(words)
    assert set(counted) == set(TEXT.words) and len(set(TEXT.words)) == 64
    for word, frequency in zip(TEXT.words[:8], TEXT.frequency):
        assert counted[word] / len(words) == pytest.approx(frequency, rel=0.06)
    assert TEXT.frequency.sum() == pytest.approx(1)
    assert TEXT.frequency[0] == pytest.approx(2 * TEXT.frequency[1])  # Zipf


def test_a_sample_starts_at_any_place_of_the_text():
    """So the first position is no easier or harder than others: as many spaces there as anywhere."""
    samples = np.stack([TEXT.sample(number, 40) for number in range(8000)])
    spaces = (samples == LETTERS.index(" ")).mean(0)
    expected = 1 / (TEXT.frequency @ [len(word) + 1 for word in TEXT.words])
    assert spaces == pytest.approx(expected, abs=0.02)  # 5 standard deviations


def test_a_sample_depends_on_its_number_alone():
    first = [TEXT.sample(number, 50) for number in range(6)]
    again = [InventedText(seed=1).sample(number, 50) for number in reversed(range(6))]
    assert all(np.array_equal(a, b) for a, b in zip(first, reversed(again)))
    assert len({tuple(sample) for sample in first}) == 6
    assert not np.array_equal(InventedText(seed=2).sample(0, 50), first[0])
    assert InventedText(seed=2).words != TEXT.words


@pytest.mark.parametrize("num_words", [2, 64, 500])
def test_samples_have_the_length_asked_for(num_words):
    text = InventedText(num_words, seed=3)
    for num_tokens in [*range(1, 12), 100]:
        for number in range(30):
            sample = text.sample(number, num_tokens)
            assert sample.shape == (num_tokens,)
            assert sample.min() >= 0
            assert sample.max() < text.vocab_size


def test_fewer_than_two_words_are_refused():
    with pytest.raises(ValueError, match=r"num_words=1 leaves nothing to predict: use at least 2"):
        InventedText(num_words=1)


def test_any_file(tmp_path):
    path = tmp_path / "some.txt"
    content = "Wie schön, déjà vu!" * 3
    path.write_text(content, encoding="utf-8")
    text = TokenFile(path, seed=1)
    size = len(content.encode())
    for number in range(50):
        sample = text.sample(number, 10)
        assert sample.dtype == np.int64
        assert bytes(sample.tolist()) in content.encode()
        assert np.array_equal(sample, TokenFile(str(path), seed=1).sample(number, 10))
    assert len({bytes(text.sample(number, 10).tolist()) for number in range(50)}) > 10
    halves = [text.sample(number, size // 2) for number in (0, EVALUATION_SAMPLES)]
    assert bytes(np.concatenate(halves).tolist()) == content.encode()  # all of it, each half from its only place
    assert text.vocab_size == 256
    assert text.floor_nats is None


def test_what_is_not_a_file_is_refused(tmp_path):
    """Every rank reads it for itself, so a pipe would be empty for all but the first, and a device may never end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path, pipe, "/dev/zero"):
        with pytest.raises(ValueError, match=f"the text {path} is a folder, a pipe or a device: name a file"):
            TokenFile(path)


def test_every_place_of_a_file_is_drawn(tmp_path):
    path = tmp_path / "abc"
    path.write_bytes(b"abcdeXYZ")
    assert {bytes(TokenFile(path).sample(number, 3).tolist()) for number in range(60)} == {b"abc", b"bcd", b"cde"}


def test_no_run_trains_on_what_it_is_evaluated_on(tmp_path):
    """The last tenth of a file, or a sample's length of a short one: every place is drawn, in its own part only."""
    path = tmp_path / "numbers"
    for size, num_tokens, first_kept in ((200, 5, 180), (20, 5, 15), (10, 5, 5), (209, 21, 188)):
        path.write_bytes(bytes(range(size)))
        text = TokenFile(path)
        seen, kept = (
            {token for number in range(first, first + 2000) for token in text.sample(number, num_tokens).tolist()}
            for first in (0, EVALUATION_SAMPLES)
        )
        assert seen == set(range(first_kept))
        assert kept == set(range(first_kept, size))


@pytest.mark.parametrize(("bits", "unit"), [(8, "bytes"), (16, "16-bit tokens"), (32, "32-bit tokens")])
def test_a_file_is_mapped_and_not_read(tmp_path, bits, unit):
    """Of a file of a terabyte (sparse: it takes no place on the disk) a rank holds what it looks at."""
    path = tmp_path / "terabyte"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    tokens = TokenFile(path, bits=bits)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(10):
        assert not tokens.sample(number, 10).any()
        assert not tokens.sample(EVALUATION_SAMPLES + number, 10).any()
    assert tokens.fingerprint.startswith(f"{(8 << 40) // bits} {unit} with checksum ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@pytest.mark.parametrize(
    ("suffix", "bits", "dtype"),
    [("bin", 16, "<u2"), ("bin", 32, "<u4"), ("bin", 32, "<i4"), ("npy", 16, "<i4"), ("npy", 32, ">i8")],
)
def test_tokens_are_those_of_the_array(tmp_path, suffix, bits, dtype):
    """As numpy writes them: nanoGPT's and Megatron-LM's files are such bytes. An .npy says its type itself."""
    path, array = tmp_path / f"tokens.{suffix}", np.arange(1000, 1040).astype(dtype)
    np.save(path, array) if suffix == "npy" else array.tofile(path)
    tokens = TokenFile(path, 1, bits, vocab_size=1040)
    for first, part in ((0, range(1000, 1036)), (EVALUATION_SAMPLES, range(1036, 1040))):
        samples = [tokens.sample(first + number, 4) for number in range(300)]
        assert all((np.diff(sample) == 1).all() and sample.dtype == np.int64 for sample in samples)
        assert set(np.concatenate(samples)) == set(part)


def test_a_token_outside_of_the_vocabulary_is_named(tmp_path):
    path = tmp_path / "tokens.bin"
    np.array([*range(37), 50257, *range(38, 100)], np.uint16).tofile(path)
    read, way_out = "read as 16 bits, and vocab_size=50257", "give the vocab_size and token_bits with which the file"
    with pytest.raises(ValueError, match=re.escape(f"token 37 of {path} is 50257, {read}: {way_out} was made")):
        [TokenFile(path, bits=16, vocab_size=50257).sample(number, 30) for number in range(100)]
    TokenFile(path, bits=16, vocab_size=50258).sample(0, 30)
    np.save(tmp_path / "tokens.npy", np.full(100, -1))
    with pytest.raises(ValueError, match=r"npy is -1, read as 64 bits, and vocab_size=9: "):
        TokenFile(tmp_path / "tokens.npy", bits=16, vocab_size=9).sample(0, 30)


def test_what_is_not_an_array_of_tokens_is_refused(tmp_path):
    for content, message in (
        (np.ones(4), "holds float64 of shape (4,): save whole numbers in one dimension"),
        (np.ones((4, 4), int), "holds int64 of shape (4, 4): save whole numbers in one dimension"),
    ):
        np.save(tmp_path / "tokens.npy", content)
        with pytest.raises(ValueError, match=re.escape(message)):
            TokenFile(tmp_path / "tokens.npy", bits=16)
    (tmp_path / "odd").write_bytes(b"12345")
    with pytest.raises(ValueError, match="odd has 5 bytes, which is not whole 16-bit numbers: use token_bits"):
        TokenFile(tmp_path / "odd", bits=16)
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match=r"empty has 0 tokens, but a sample takes 4, and one more is kept for eval"):
        TokenFile(tmp_path / "empty", bits=16).sample(0, 4)


def test_files_are_told_apart(tmp_path):
    contents = [b"", b"a", b"b", b"x" * (3 << 20), b"x" * (3 << 20) + b"y", b"y" + b"x" * (3 << 20)]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    assert len({TokenFile(tmp_path / str(number)).fingerprint for number in range(len(contents))}) == len(contents)


@pytest.mark.parametrize("number", [0, EVALUATION_SAMPLES])
def test_a_short_file_is_refused(tmp_path, number):
    """For any sample: a run should not learn of it at its first evaluation."""
    path = tmp_path / "short"
    path.write_bytes(b"abcdefg")
    with pytest.raises(ValueError, match=r"short has 7 bytes, but a sample takes 4, and one more is kept for eval"):
        TokenFile(path).sample(number, 4)
