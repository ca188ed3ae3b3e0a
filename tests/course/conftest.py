"""What tests of course share with those of labkit."""

from tests.labkit.conftest import on_ranks  # noqa: F401
