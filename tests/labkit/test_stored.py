"""An optimizer's states are made before they are loaded. (What is stored is tested in test_checkpoint.py.)"""

import torch

from labkit.stored import make_states


def test_loading_makes_states_without_a_step():
    """The zero step that makes the optimizer's states changes no weight, whatever the weight decay."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5)
    make_states(optimizer)
    assert torch.equal(parameter, torch.ones(3))
    assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.param_groups[0]["lr"] == 0.1
