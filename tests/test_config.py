"""The table of MPICOLL_* variables: what is read, what is refused, and that the table is the only place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpicoll import _config

PACKAGE = Path(_config.__file__).parent


def test_unset_and_empty_give_the_default() -> None:
    for variable in _config.VARIABLES:
        assert _config.get(variable.name, {}) == variable.default
        assert _config.get(variable.name, {variable.name: " "}) == variable.default


@pytest.mark.parametrize(("text", "value"), [("1", True), ("yes", True), ("ON", True), ("0", False), ("false", False)])
def test_a_bool(text: str, value: bool) -> None:
    assert _config.get("MPICOLL_OVERRIDE_MPI", {"MPICOLL_OVERRIDE_MPI": text}) is value


def test_a_number() -> None:
    assert _config.get("MPICOLL_PROBE_TIMEOUT", {"MPICOLL_PROBE_TIMEOUT": "2.5"}) == 2.5


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan"])
def test_a_bad_number_names_variable_text_and_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=rf"MPICOLL_PROBE_TIMEOUT='{text}'.*at least 0.1 \(seconds\)"):
        _config.get("MPICOLL_PROBE_TIMEOUT", {"MPICOLL_PROBE_TIMEOUT": text})


@pytest.mark.parametrize("text", ["0", "-3", "inf", "nan", "1 min"])
def test_a_timeout_is_a_positive_number(text: str) -> None:
    assert _config.get("MPICOLL_TIMEOUT", {"MPICOLL_TIMEOUT": "0.5"}) == 0.5
    with pytest.raises(ValueError, match=rf"MPICOLL_TIMEOUT='{text}' is not allowed; use a number of at least 0.001 \(seconds\)"):
        _config.get("MPICOLL_TIMEOUT", {"MPICOLL_TIMEOUT": text})


def test_a_bad_bool_and_a_bad_word() -> None:
    with pytest.raises(ValueError, match="MPICOLL_OVERRIDE_MPI='maybe' is not allowed; use 1 or 0"):
        _config.get("MPICOLL_OVERRIDE_MPI", {"MPICOLL_OVERRIDE_MPI": "maybe"})
    word = _config.Variable("MPICOLL_X", str, "a test", "a", choices=("a", "b"))
    assert word.parse("b") == "b"
    with pytest.raises(ValueError, match="use one of a, b"):
        word.parse("c")
    whole = _config.Variable("MPICOLL_Y", int, "a test", 1, "bytes", minimum=0)
    assert whole.parse("12") == 12
    with pytest.raises(ValueError, match="a whole number of at least 0"):
        whole.parse("1.5")


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="MPICOLL_NO_SUCH_THING"):
        _config.get("MPICOLL_NO_SUCH_THING", {})


def test_problems_lists_misspelt_names_and_bad_values() -> None:
    environ = {"MPICOLL_CUDA_AWRAE": "1", "MPICOLL_CUDA_AWARE": "perhaps", "MPICOLL_OVERRIDE_MPI": "1", "OTHER": "x"}
    first, second = _config.problems(environ)
    assert "MPICOLL_CUDA_AWARE='perhaps'" in first
    assert "MPICOLL_CUDA_AWRAE is set" in second
    assert "MPICOLL_CUDA_AWARE" in second  # the right spelling is in the message


def test_the_table_is_well_formed() -> None:
    assert len({variable.name for variable in _config.VARIABLES}) == len(_config.VARIABLES)
    for variable in _config.VARIABLES:
        assert variable.name.startswith("MPICOLL_")
        assert variable.meaning
        assert variable.default is None or type(variable.default) is variable.kind
        assert f"`{variable.name}`" in _config.table()


def test_nobody_else_reads_a_variable_of_ours() -> None:
    """config.get is the only reader: a name in any other file must be in the table."""
    known = {variable.name for variable in _config.VARIABLES}
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        assert not re.search(r"(environ|getenv)(\.get)?[\[(]\s*[\"']MPICOLL_", text), f"{file} bypasses config.get"
        for name in re.findall(r"config\.get\(\s*[\"'](MPICOLL_\w+)", text):
            assert name in known, f"{file} asks for {name}, which is not in config.VARIABLES"


def test_the_table_gives_a_unit_to_numbers_only() -> None:
    """It said "unset bytes"."""
    rows = dict(row.split(" | ")[0::2][:2] for row in _config.table().splitlines()[2:])
    assert rows["| `MPICOLL_WINDOW_FROM`"] == "unset"
    assert rows["| `MPICOLL_PROBE_TIMEOUT`"] == "60.0 seconds"
