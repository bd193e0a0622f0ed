"""The table of MPICOLL_* variables: what is read, what is refused, and that the table is the only place."""

import re
from pathlib import Path

import pytest

from mpicoll._base import config

PACKAGE = Path(config.__file__).parent


def test_unset_and_empty_give_the_default() -> None:
    for variable in config.VARIABLES:
        assert config.get(variable.name, {}) == variable.default
        assert config.get(variable.name, {variable.name: " "}) == variable.default


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        *(("MPICOLL_OVERRIDE_MPI", text, True) for text in ("1", "yes", "ON")),
        *(("MPICOLL_OVERRIDE_MPI", text, False) for text in ("0", "false")),
        ("MPICOLL_PROBE_TIMEOUT", "2.5", 2.5),
        ("MPICOLL_TIMEOUT", "0.5", 0.5),
        ("MPICOLL_WINDOW_FROM", "12", 12),
        ("MPICOLL_LOG", "INFO", "info"),
    ],
)
def test_a_value(variable: str, text: str, value: object) -> None:
    found = config.get(variable, {variable: text})
    assert (type(found), found) == (type(value), value)


SECONDS = r"a number of at least {} \(seconds\)"


@pytest.mark.parametrize(
    ("variable", "texts", "allowed"),
    [
        ("MPICOLL_OVERRIDE_MPI", ["maybe"], "1 or 0"),
        ("MPICOLL_PROBE_TIMEOUT", ["soon", "-1", "0", "nan"], SECONDS.format(0.1)),
        ("MPICOLL_TIMEOUT", ["0", "-3", "inf", "nan", "1 min"], SECONDS.format(0.001)),
        ("MPICOLL_WINDOW_FROM", ["1.5", "-1"], "a whole number of at least 1"),
        ("MPICOLL_LOG", ["loud", "2"], "one of info, debug"),
    ],
)
def test_a_bad_value_names_variable_text_and_what_is_allowed(variable: str, texts: list[str], allowed: str) -> None:
    for text in texts:
        with pytest.raises(ValueError, match=rf"^{variable}='{text}' is not allowed; use {allowed}"):
            config.get(variable, {variable: text})


def test_problems_lists_misspelt_names_and_bad_values() -> None:
    environ = {"MPICOLL_CUDA_AWRAE": "1", "MPICOLL_CUDA_AWARE": "perhaps", "MPICOLL_OVERRIDE_MPI": "1", "OTHER": "x"}
    first, second = config.problems(environ)
    assert "MPICOLL_CUDA_AWARE='perhaps'" in first
    assert "MPICOLL_CUDA_AWRAE is set" in second
    assert "MPICOLL_CUDA_AWARE" in second  # the right spelling is in the message


def test_the_table_is_well_formed() -> None:
    assert len({variable.name for variable in config.VARIABLES}) == len(config.VARIABLES)
    for variable in config.VARIABLES:
        assert variable.name.startswith("MPICOLL_")
        assert variable.meaning
        assert variable.default is None or type(variable.default) is variable.kind


def test_nobody_else_reads_a_variable_of_ours() -> None:
    """config.get is the only reader: a name in any other file must be in the table."""
    known = {variable.name for variable in config.VARIABLES}
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        assert not re.search(r"(environ|getenv)(\.get)?[\[(]\s*[\"']MPICOLL_", text), f"{file} bypasses config.get"
        for name in re.findall(r"config\.get\(\s*[\"'](MPICOLL_\w+)", text):
            assert name in known, f"{file} asks for {name}, which is not in config.VARIABLES"


def test_described_says_what_holds_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit stands at numbers only. (It said "unset bytes".)"""
    monkeypatch.setenv("MPICOLL_LOG", "info")
    monkeypatch.setenv("MPICOLL_CUDA_IPC", "maybe")
    lines = list(config.described(60))
    heads = {"MPICOLL_LOG=info", "MPICOLL_CUDA_IPC=maybe", "MPICOLL_WINDOW_FROM  unset", "MPICOLL_CHECK  unset"}
    assert {*heads, "MPICOLL_PROBE_TIMEOUT  unset: 60.0 seconds", "MPICOLL_REPLACE_GLOO  unset: 0"} <= set(lines)
    assert lines[-1] == "MPICOLL_CUDA_IPC='maybe' is not allowed; use 1 or 0"
    assert all(len(line) <= 60 for line in lines)
