"""Text with a known floor: the floor is what word counts and a perfect reader say, and samples stand on their own."""

import io
import json
import os
import resource
from collections import Counter
from contextlib import nullcontext
from itertools import permutations

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from labtrain.data import EVALUATION_SAMPLES, LETTERS, InventedText, TokenFile, find_tokenizer, shuffled

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
    first, second, again = (TEXT.sample(number, 50) for number in (0, 1, 0))
    assert np.array_equal(first, again) and not np.array_equal(first, second)
    assert np.array_equal(InventedText(seed=1).sample(1, 50), second)
    other = InventedText(seed=2)
    assert other.words != TEXT.words and not np.array_equal(other.sample(0, 50), first)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(num_words=st.integers(2, 500), number=st.integers(0, 10**9), num_tokens=st.integers(1, 200))
def test_samples_have_the_length_asked_for(num_words, number, num_tokens):
    text = InventedText(num_words, seed=3)
    sample = text.sample(number, num_tokens)
    assert sample.shape == (num_tokens,)
    assert 0 <= sample.min() <= sample.max() < text.vocab_size


def test_any_file(tmp_path):
    path = tmp_path / "some.txt"
    content = ("Wie schön, déjà vu!" * 3).encode()
    path.write_bytes(content)
    text = TokenFile(path, seed=1)
    samples = [text.sample(number, 10) for number in range(50)]
    assert all(sample.dtype == np.int64 and bytes(sample.tolist()) in content for sample in samples)
    assert np.array_equal(samples[7], TokenFile(str(path), seed=1).sample(7, 10))
    halves = [text.sample(number, len(content) // 2) for number in (0, EVALUATION_SAMPLES)]
    assert bytes(np.concatenate(halves).tolist()) == content  # all of it, each half from its only place
    assert (text.vocab_size, text.floor_nats) == (256, None)


def test_what_is_not_a_file_is_refused(tmp_path):
    """Every rank reads it for itself, so a pipe would be empty for all but the first, and a device may never end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match=f"the text {path} is a folder, a pipe or a device: name a file"):
            TokenFile(path)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(size=st.integers(8, 300), seed=st.integers(0, 9))
def test_an_epoch_predicts_each_token_once(tmp_path_factory, size, seed):
    """But for what is left over at its ends, which is less than a window; and each epoch in an order of its own."""
    path = tmp_path_factory.mktemp("file") / "numbers.npy"
    np.save(path, np.arange(size))
    text = TokenFile(path, seed=seed, bits=None, vocab_size=size)
    num_trained = size - max(4, size // 10)
    num_windows = (num_trained - 1) // 3
    orders, seen = set(), set()
    for epoch in range(40):
        numbers = range(epoch * num_windows, (epoch + 1) * num_windows)
        predicted = [token for number in numbers for token in text.sample(number, 4)[1:]]
        first = min(predicted)
        assert sorted(predicted) == list(range(first, first + 3 * num_windows))
        orders.add(tuple(predicted))
        seen.update(predicted)
    assert seen == set(range(1, num_trained))
    assert len(orders) == 40 or num_windows < 7


def test_a_shuffle_prefers_no_order():
    """The places of the first two of a few numbers, over many keys: each pair of places as often as any other."""
    for size in (3, 5):
        keys, pairs = range(2000), list(permutations(range(size), 2))
        counts = Counter((shuffled(0, size, key), shuffled(1, size, key)) for key in keys)
        assert set(counts) == set(pairs)
        expected = len(keys) / len(pairs)
        chi_squared = sum((counts[pair] - expected) ** 2 / expected for pair in pairs)
        assert chi_squared / (len(pairs) - 1) < 1.9


def test_no_run_trains_on_what_it_is_evaluated_on(tmp_path):
    """The last tenth of a file, or a sample's length of a short one: every place is drawn, in its own part only."""
    path = tmp_path / "numbers"
    for size, num_tokens, first_kept in ((200, 5, 180), (20, 5, 15), (10, 5, 5), (209, 21, 188)):
        path.write_bytes(bytes(range(size)))
        text = TokenFile(path)
        seen, kept = (
            {token for number in range(first, first + 500) for token in text.sample(number, num_tokens).tolist()}
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


def saved(array):
    """The bytes of an .npy."""
    np.save(file := io.BytesIO(), array, allow_pickle=True)
    return file.getvalue()


def test_a_token_outside_of_the_vocabulary_is_named(tmp_path):
    path = tmp_path / "tokens.bin"
    np.array([*range(37), 50257, *range(38, 100)], np.uint16).tofile(path)
    said = "tokens.bin is 50257, read as 16 bits, and vocab_size=50257: give the vocab_size and token_bits with which"
    with pytest.raises(ValueError, match=f"token 37 of .*{said}"):
        [TokenFile(path, bits=16, vocab_size=50257).sample(number, 30) for number in range(100)]
    TokenFile(path, bits=16, vocab_size=50258).sample(0, 30)
    path.write_bytes(saved(np.full(100, -1)))
    with pytest.raises(ValueError, match="bin is -1, read as 64 bits, and vocab_size=9: "):
        TokenFile(path, bits=16, vocab_size=9).sample(0, 30)


IDS = np.random.default_rng(0).zipf(1.3, 20_000) % 50_257


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "says"),
    [
        ("<u2", 50_257, None),
        ("<u4", 128_256, None),
        ("<i4", 50_257, "read as 16-bit numbers, is 0 in every second place: .*, so give token_bits=32"),
        ("<i8", 50_257, "read as 16-bit numbers, is 0 in every second place: .*, so give token_bits=64"),
        ("<i8", 128_256, "read as 32-bit numbers, is 0 in every second place: .*, so give token_bits=64"),
        ("<u2", 128_256, "read as 32 bits, and vocab_size=128256: .* as 16-bit numbers, so give token_bits=16"),
        (">u2", 50_257, "read as 16 bits, and vocab_size=50257: its bytes make sense as big-endian 16-bit numbers"),
        (">i4", 50_257, "make sense as big-endian 32-bit numbers, so save them little-endian, or as an .npy, which st"),
        (">i8", 50_257, "is 0 in every second place: its bytes make sense as big-endian 64-bit numbers"),
    ],
)
def test_a_file_of_another_width_or_order_is_refused(tmp_path, dtype, vocab_size, says):
    """Unless one says how wide its numbers are, or it does: an .npy under any name."""
    path = tmp_path / "ids.bin"
    for zeros in (0, 100_000):  # which at first tell nothing
        np.concatenate([np.zeros(zeros), IDS]).astype(dtype).tofile(path)
        with pytest.raises(ValueError, match=f"ids.bin.* {says}") if says else nullcontext():
            TokenFile(path, bits=None, vocab_size=vocab_size)
        if dtype[0] == "<":
            assert TokenFile(path, bits=8 * int(dtype[2]), vocab_size=vocab_size).check() == zeros + len(IDS)
    with open(path, "wb") as file:
        np.save(file, IDS.astype(dtype))
    assert TokenFile(path, bits=None, vocab_size=vocab_size).check() == len(IDS)


@pytest.mark.parametrize("ids", [
    np.zeros(1000),
    np.arange(1000) % 2 * (np.arange(1000) < 30),  # 0 in every second place, but not often enough to be sure
    np.where(np.arange(1000) == 100, 3, np.arange(1000) % 2),  # once not 0
    np.concatenate([IDS, np.zeros(1_000_000)]),
], ids=range(4))  # fmt: skip
def test_a_file_of_many_zeros_is_read(tmp_path, ids):
    ids.astype("<u2").tofile(tmp_path / "ids.bin")
    assert TokenFile(tmp_path / "ids.bin", bits=None, vocab_size=50_257).check() == len(ids)


def test_a_width_that_is_given_is_believed(tmp_path):
    (np.arange(1000) % 2).astype("<u2").tofile(tmp_path / "ids.bin")
    with pytest.raises(ValueError, match="is 0 in every second place"):
        TokenFile(tmp_path / "ids.bin", bits=None, vocab_size=9)
    assert TokenFile(tmp_path / "ids.bin", bits=16, vocab_size=9).check() == 1000


def test_all_of_a_file_is_checked_in_parts(tmp_path):
    """Each part by one rank: a token that is out of the vocabulary is in one of them."""
    ids = np.tile(IDS, 150).astype("<u2")
    for place in (1_000_000, 2_222_222):
        np.put(bad := ids.copy(), place, 50_257)
        bad.tofile(tmp_path / "ids.bin")
        tokens, faults = TokenFile(tmp_path / "ids.bin", bits=None, vocab_size=50_257), []
        for part in range(3):
            try:
                assert tokens.check(part, 3) == len(ids) // 3
            except ValueError as error:
                faults.append((part, str(error).partition(" of ")[0]))
        assert faults == [(3 * place // len(ids), f"token {place}")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.npy", saved(np.ones(4)), r"holds float64 of shape \(4,\): save whole numbers in one dimension"),
        ("x.npy", saved(np.ones((4, 4), int)), r"holds int64 of shape \(4, 4\): save whole numbers in one dimension"),
        (
            "x.npy",
            saved(np.arange(99))[:500],
            r"an .npy \(mmap length is greater than file size\): if it was cut, copy",
        ),
        ("x.npy", saved(np.arange(99))[:50], r"cannot be read as an .npy \(EOF: reading array header"),
        ("x.npy", saved(np.array([1, "a"], object)), "as an .npy .*objects.*, otherwise save whole numbers in one dim"),
        ("x.npy", b"12345678", "does not begin as an .npy does: save it with numpy.save, or do not call it .npy"),
        ("odd", b"12345", "odd has 5 bytes, which is not whole 16-bit numbers: use token_bits"),
        ("empty", b"", "empty has 0 tokens, but a sample takes 4, and one more is kept for evaluation: name a file of"),
        ("short", bytes(10), "short has 5 tokens, but a sample takes 4, and one more"),
    ],
    ids=range(9),
)
def test_what_is_not_an_array_of_tokens_is_refused(tmp_path, name, content, message):
    """A file that is too short, for any sample: a run should not learn of it at its first evaluation."""
    (tmp_path / name).write_bytes(content)
    for number in (0, EVALUATION_SAMPLES):
        with pytest.raises(ValueError, match=message):
            TokenFile(tmp_path / name, bits=16).sample(number, 4)


def test_files_are_told_apart(tmp_path):
    contents = [b"", b"a", b"b", b"x" * (3 << 20), b"x" * (3 << 20) + b"y", b"y" + b"x" * (3 << 20)]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
    assert len({TokenFile(tmp_path / str(number)).fingerprint for number in range(len(contents))}) == len(contents)


def test_a_text_is_whole_whatever_its_tokenizer_was_last_called_with(tmp_path):
    """A tokenizer.json keeps truncation, padding and dropout; special tokens stand around a call's text, not here."""
    text, path = "hug the pug, hugs " * 300, tmp_path / "tokenizer.json"
    (tmp_path / "text").write_bytes(text.encode())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([text], tokenizers.trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet))
    tokenizer.add_special_tokens(["<s>"])
    expected = tokenizer.encode(text).ids
    start = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[start])
    tokenizer.enable_truncation(512)
    tokenizer.enable_padding(length=10_000)
    tokenizer.model.dropout = 0.5
    tokenizer.save(str(path))
    for name in ("truncation", "padding", "post_processor"):
        assert json.loads(path.read_text())[name]
    tokens = TokenFile(tmp_path / "text", vocab_size=512, tokenizer=path)
    assert list(tokens._tokens) == expected
    path.write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        TokenFile(tmp_path / "text", vocab_size=512, tokenizer=path)


@pytest.mark.parametrize(("files", "vocab_size", "says"), [
    (["tokenizer.json", "vocab.json"], 50_257, None),
    ([], 256, None),
    ([], 50_257, "has no tokenizer.json, and its 50257 tokens are not the 256 bytes of a text: put the model's there"),
    (["vocab.json", "merges.txt"], 50_257, "only merges.txt and vocab.json: let transformers write it, by AutoTok"),
    (["tokenizer.model"], 32_000, "only tokenizer.model: let transformers write it"),
    (["tokenizer.model"], 256, "only tokenizer.model: let transformers write it"),
])  # fmt: skip
def test_a_text_is_not_bytes_to_a_model_with_another_tokenizer(tmp_path, files, vocab_size, says):
    for name in files:
        (tmp_path / name).touch()
    if says is None:
        assert find_tokenizer(tmp_path, vocab_size) == (tmp_path / "tokenizer.json" if files else None)
        return
    with pytest.raises(ValueError, match=says):
        find_tokenizer(tmp_path, vocab_size)
