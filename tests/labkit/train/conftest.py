"""What tests of the command line share."""

import pytest

from tests.labkit.train.processes import TINY, TRAIN, finish, start


@pytest.fixture(scope="session")
def alone():
    """Exit code, stdout and stderr of a run of one process."""
    return finish(start([*TRAIN, *TINY.split()]))[0]
