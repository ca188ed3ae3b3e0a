"""What every test gets."""

import pytest


@pytest.fixture(autouse=True)
def own_progress(tmp_path_factory, monkeypatch):
    """Exercises that tests solve are not noted as solved by whoever runs the tests."""
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path_factory.mktemp("progress") / "progress.json"))
