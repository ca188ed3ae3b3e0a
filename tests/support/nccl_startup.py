"""Run by IPython before a notebook's first cell, in `make sweep`: what it launches follows NCCL's rules."""

import os

from tests.support.nccl import put_under_nccls_rules

if "NCCL_RULES" in os.environ:  # pytest imports this file, too, in search of doctests
    put_under_nccls_rules()
