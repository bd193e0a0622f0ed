"""These tests are collected only with ``--shipped``: their modules are large, and torch changes them with each release."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if config.getoption("--shipped") else True
