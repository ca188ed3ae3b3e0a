"""What every test gets."""

import pytest


def pytest_collection_modifyitems(items):
    """Notebooks say in their outputs when a rank has to wait for long: nothing should run beside them."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.alone)


@pytest.fixture(autouse=True)
def own_progress(tmp_path_factory, monkeypatch):
    """Exercises that tests solve are not noted as solved by whoever runs the tests."""
    monkeypatch.setenv("LABKIT_PROGRESS", str(tmp_path_factory.mktemp("progress") / "progress.json"))
