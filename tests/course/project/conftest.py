"""What tests of the project share."""

import pytest


@pytest.fixture
def pids(tmp_path):
    folder = tmp_path / "pids"
    folder.mkdir()
    return folder
