"""Models of transformers in float64: what labkit's are held against. Nothing is downloaded, whatever is asked for."""

import os
from types import MethodType

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers
from transformers import AutoModelForCausalLM

from labtrain.model import normal

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def rotary_in_float64(self, x, position_ids):
    half = torch.arange(0, self.config.hidden_size // self.config.num_attention_heads, 2, dtype=torch.float64)
    speeds = self.config.rope_parameters["rope_theta"] ** -(half / (2 * len(half)))
    torch.testing.assert_close(speeds.float(), self.inv_freq.float())  # the same, but for rounding
    angles = position_ids[..., None].double() * speeds
    both = torch.cat([angles, angles], -1)
    return both.cos(), both.sin()


def rms_norm_in_float64(self, x):
    return x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt() * self.weight


def route_in_float64(self, x):
    logits = torch.nn.functional.linear(x, self.weight)
    values, experts = logits.softmax(-1).topk(self.top_k, -1)
    return logits, values / values.sum(-1, keepdim=True), experts


def in_float64(model):
    """The model without the places where transformers computes in float32, whatever the dtype."""
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(rms_norm_in_float64, module)
        if type(module).__name__ == "MixtralTopKRouter":
            module.forward = MethodType(route_in_float64, module)
    model.config._experts_implementation = "eager"  # the other one multiplies float32 only
    if hasattr(model.base_model, "rotary_emb"):
        rotary = model.base_model.rotary_emb
        rotary.forward = MethodType(rotary_in_float64, rotary)
    return model.double().eval()


def make_model(config, seed=0):
    """A model of large random weights, so that what is left out or misplaced shows in the logits."""
    model = in_float64(AutoModelForCausalLM.from_config(config))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            normal(key, seed=seed, std=0.3)(parameter)
            parameter.view(-1)[-1] = -0.0  # which sums of floats would make 0.0
    return model
