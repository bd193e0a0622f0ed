"""The times of fault reports and supervision: what tests may shorten, and how far."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

from mpicoll import _waits

SCALE = "_MPICOLL_TIME_SCALE"


def waits(scale: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The table as a process with this scale sees it."""
    monkeypatch.setenv(SCALE, scale)
    rows = runpy.run_path(_waits.__file__)
    return {name: seconds for name, seconds in rows.items() if name.endswith("_S")}


def test_the_scale_shortens_patience_and_never_what_others_need(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, short = waits("1", monkeypatch), waits("0.2", monkeypatch)
    assert {name: short[name] for name in ("PATIENCE_S", "LOOK_S", "ASK_AFTER_S")} == pytest.approx(
        {"PATIENCE_S": 0.6, "LOOK_S": 0.2, "ASK_AFTER_S": 0.2}
    )
    assert {name: short[name] for name in ("ANSWER_S", "ABORT_S", "STOP_S")} == {"ANSWER_S": 0.6, "ABORT_S": 5, "STOP_S": 5}
    assert short["SILENT_S"] > 2 * short["LOOK_S"], "a rank that runs answers within two looks"
    assert all(short[name] <= seconds for name, seconds in usual.items())


@pytest.mark.parametrize("scale", ["0", "-1", "soon", "nan", "inf"])
def test_a_scale_that_is_no_positive_number_is_refused(scale: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"{SCALE}='{scale}' is not allowed; use a positive number"):
        waits(scale, monkeypatch)
