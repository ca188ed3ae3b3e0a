"""A run learns tokens from a file as it learns a text."""

import io
from contextlib import redirect_stdout
from dataclasses import replace

import numpy as np
import pytest

from labtrain import train, world
from labtrain.console import describe_start
from labtrain.data import TokenFile
from tests.labtrain.tiny import TINY, numbers


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(np.random.default_rng(1).integers(97, 123, 500).tolist()))
    return path


def test_tokens_are_learned_as_a_text_of_the_same_numbers(on_ranks, text):
    tokens = text.with_suffix(".bin")
    np.frombuffer(text.read_bytes(), np.uint8).astype("<u4").tofile(tokens)
    config = replace(TINY, steps=2, eval_interval=1)
    [expected, _] = on_ranks(train, replace(config, text=str(text)))
    [steps, _] = on_ranks(train, replace(config, tokens=str(tokens), vocab_size=256, token_bits=32))
    assert numbers(steps) == numbers(expected)


@pytest.mark.parametrize(("vocab_size", "bits"), [(50257, 16), (65536, 16), (65537, 32), (128256, 32)])
def test_the_vocabulary_says_how_many_bits_a_number_has(text, vocab_size, bits):
    np.arange(500, dtype=f"<u{bits // 8}").tofile(text)
    config = replace(TINY, tokens=str(text), vocab_size=np.int64(vocab_size))
    tokens = config.make_dataset()
    assert isinstance(tokens, TokenFile)
    assert (tokens.bits, tokens.vocab_size) == (bits, vocab_size)
    assert config.shape.vocab_size == vocab_size
    assert f"; no floor is known for {text}; " in describe_start(config, 1, None)


def test_a_token_outside_of_the_vocabulary_is_found_before_the_first_step(on_ranks, tmp_path):
    """In the part of the second rank, and in no end that is looked at."""
    place = 1_700_000
    ids = np.arange(2_000_000, dtype="<u2") % 99
    ids[place] = 99
    ids.tofile(tmp_path / "ids.bin")
    config = replace(TINY, tokens=str(tmp_path / "ids.bin"), vocab_size=99, metrics=str(tmp_path / "metrics"))
    with pytest.raises(
        Exception, match=rf"token {place} of \S+ is 99, read as 16 bits, and vocab_size=99: give the voc"
    ):
        on_ranks(train, config)
    assert not (tmp_path / "metrics").exists()


def test_what_there_is_no_time_to_check_is_said(on_ranks, tmp_path):
    """A file of a terabyte (sparse: it takes no place on the disk), and no time."""
    with open(tmp_path / "ids.bin", "wb") as file:
        file.truncate(1 << 40)

    def check(config):
        world.CHECK_SECONDS = 0.0
        with redirect_stdout(io.StringIO()) as printed:
            world.check_tokens(config)
        return printed.getvalue()

    says = f"0% of {tmp_path}/ids.bin is checked; the rest will be as it is read\n"
    assert on_ranks(check, replace(TINY, tokens=str(tmp_path / "ids.bin"), vocab_size=99)) == [says, ""]
