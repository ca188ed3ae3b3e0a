"""What `generate` takes. (What it writes: test_pretrained.py; what it refuses: test_refusals.py.)"""

import numpy as np
import pytest
import torch

from labkit.groups import groups_of_one
from labkit.shape import GPT
from labtrain.generation import generate
from labtrain.model import ParallelGPT


@pytest.mark.parametrize("given", [torch.uint8, torch.int16, torch.uint16, torch.int32, list, np.array], ids=str)
def test_words_do_not_depend_on_the_type_of_the_tokens(given):
    """Also those above 255, which a byte cannot hold."""
    model, start = ParallelGPT(GPT(1, 8, 24, 300, num_attention_heads=2), groups_of_one().tp), torch.tensor([[7, 250]])
    tokens = start.to(given) if isinstance(given, torch.dtype) else given(start.tolist())
    options = dict(groups=groups_of_one(), num_tokens=20, temperature=1.0)
    text, expected = generate(model, tokens, **options, seed=np.int32(3)), generate(model, start, **options, seed=3)
    assert expected.max() > 255
    assert text.dtype == torch.int64 and torch.equal(text, expected)
