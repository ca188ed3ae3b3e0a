"""What `generate` takes, and what it refuses before anything is sent. (What it writes: test_pretrained.py.)"""

import numpy as np
import pytest
import torch

from labkit.groups import groups_of_one
from labkit.shape import GPT
from labtrain.generation import generate
from labtrain.model import ParallelGPT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(seed=1.5), "seed=1.5 must be a whole number from 0 up, of at most 31 bits"),
        (dict(seed=1 << 31), "seed=2147483648 must be a whole number from 0 up"),  # it would draw as 0 does
        (dict(temperature=True), "temperature=True must be a number from 0 to 1000"),
        (
            dict(tokens=torch.ones(1, 2)),
            "tokens have dtype torch.float32, but words are whole numbers: use",
        ),
        (dict(tokens=torch.ones(1, 2, dtype=torch.bool)), "tokens have dtype torch.bool"),
        (dict(tokens=[[1], [2, 3]]), "tokens=[[1], [2, 3]] must be rows of equally many whole numbers"),
        (dict(tokens=[1, 2]), "tokens of shape [2]: give rows of at least one token"),
        (dict(tokens=[[1, 7]]), "tokens contain 7, which is outside the vocabulary: use words from 0 to 6"),
        (dict(tokens=[[-1]]), "tokens contain -1, which is outside"),
        (dict(model=torch.nn.Linear(1, 1)), "model is a Linear: give this rank's ParallelGPT"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(options, message):
    model, groups = ParallelGPT(GPT(1, 8, 4, 7, num_attention_heads=2), groups_of_one().tp), groups_of_one()
    good = dict(model=model, tokens=[[1, 2]], groups=groups, num_tokens=1, temperature=1.0, seed=0)
    assert generate(**good).shape == (1, 3)
    with pytest.raises(ValueError) as caught:
        generate(**good | options)
    assert message in str(caught.value)


@pytest.mark.parametrize("given", [torch.uint8, torch.int16, torch.uint16, torch.int32, list, np.array], ids=str)
def test_words_do_not_depend_on_the_type_of_the_tokens(given):
    """Also those above 255, which a byte cannot hold."""
    model, start = ParallelGPT(GPT(1, 8, 24, 300, num_attention_heads=2), groups_of_one().tp), torch.tensor([[7, 250]])
    tokens = start.to(given) if isinstance(given, torch.dtype) else given(start.tolist())
    options = dict(groups=groups_of_one(), num_tokens=20, temperature=1.0)
    text, expected = generate(model, tokens, **options, seed=np.int32(3)), generate(model, start, **options, seed=3)
    assert expected.max() > 255
    assert text.dtype == torch.int64 and torch.equal(text, expected)
