"""Run by IPython before a notebook's first cell, in `make sweep`: what it launches follows NCCL's rules."""

from tests.support.nccl import put_under_nccls_rules

put_under_nccls_rules()
