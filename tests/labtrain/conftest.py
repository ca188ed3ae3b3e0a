"""What tests of the command line share."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

import pytest

from labtrain.__main__ import main
from tests.labkit.conftest import by_nccls_rules, on_ranks  # noqa: F401 - the same ranks, for tests here
from tests.labtrain.processes import SIX


@pytest.fixture(scope="session")
def alone():
    """Exit code, stdout and stderr of a run of one process, which is this one."""
    out, error = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", ["labtrain", *SIX.split()]), redirect_stdout(out), redirect_stderr(error):
        return main(), out.getvalue(), error.getvalue()
