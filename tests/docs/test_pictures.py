"""The pictures of docs/examples are those that pictures.py draws."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.docs import pictures, programs

LARGEST = 60_000  # bytes
SVG = "{http://www.w3.org/2000/svg}"


def panels(picture: Path) -> list[str]:
    """The names of the axes that a figure of matplotlib has."""
    groups = ElementTree.parse(picture).iter(f"{SVG}g")
    return [name for group in groups if (name := group.get("id", "")).startswith("axes_")]


def places(picture: Path) -> list[float]:
    """Where the ticks and the markers of the lines are, in points."""
    uses = [use for use in ElementTree.parse(picture).iter(f"{SVG}use") if use.get("y")]
    return [float(use.get(axis, "nan")) for use in uses for axis in "xy"]


def test_each_is_on_the_page_and_small() -> None:
    text = "".join(page.read_text() for page in programs.PAGES)
    assert {path.stem for path in pictures.FOLDER.iterdir()} == set(pictures.PICTURES)
    for path in pictures.FOLDER.iterdir():
        assert f"](../img/examples/{path.name})" in text
        assert path.stat().st_size < LARGEST, path
        assert b"<dc:date>" not in path.read_bytes(), path
        assert panels(path), path


@pytest.mark.parametrize("name", pictures.DRAWN)
def test_a_curve_has_the_numbers_of_the_page(name: str, tmp_path: Path) -> None:
    new, committed = pictures.draw(name, tmp_path), pictures.FOLDER / f"{name}.svg"
    assert panels(new) == panels(committed) == ["axes_1"]
    assert places(new) == pytest.approx(places(committed), abs=1)


@pytest.mark.launch
@pytest.mark.timeout(pictures.TIME_LIMIT_S + 30)
def test_a_picture_can_be_drawn_anew(tmp_path: Path) -> None:
    """Its text and lines are paths, whose last digits may differ between machines; the panels are the same."""
    name = "insitu_mpi4py"
    new, committed = pictures.draw(name, tmp_path), pictures.FOLDER / f"{name}.svg"
    assert panels(new) == panels(committed) == ["axes_1", "axes_2"]
    assert new.stat().st_size == pytest.approx(committed.stat().st_size, rel=0.1)
    assert [path.name for path in tmp_path.iterdir()] == [new.name]
