"""The notebooks in examples/ have the outputs that they print when they run.

The outputs are committed, since GitHub shows a notebook as it is: whoever reads it there sees what the ranks print, and the
plot. The texts are compared, ranks' lines in any order. Of a plot it is only compared that there is one: matplotlib and the fonts
of a machine decide about its bytes.
"""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, run

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
TIME_LIMIT_S = 240  # seconds; four jobs, each of which imports torch in up to three ranks

notebooks = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)


def shown(path: Path) -> list[list[str]]:
    """For each cell of code, what is shown below it: lines of text in any order, and a word for each picture."""
    cells = json.loads(path.read_text())["cells"]
    return [sorted(line for output in cell["outputs"] for line in texts(output)) for cell in cells if cell["cell_type"] == "code"]


def texts(output: dict[str, Any]) -> list[str]:
    if output["output_type"] == "stream":
        return [f"{output['name']}: {line}" for line in "".join(output["text"]).splitlines()]
    data = output["data"]
    if "image/png" in data:
        assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG\r\n\x1a\n")
        return ["a picture"]
    return "".join(data["text/plain"]).splitlines()


@pytest.mark.companion
@pytest.mark.launch
@pytest.mark.timeout(TIME_LIMIT_S + 30)
@notebooks
def test_it_prints_what_it_shows(notebook: Path, tmp_path: Path) -> None:
    new = tmp_path / notebook.name
    # matplotlib prints a warning if its list of fonts was made in an environment with other fonts, or takes long to make.
    environment = {"MPLCONFIGDIR": str(tmp_path)}
    run([sys.executable, "-c", "import matplotlib.font_manager"], TIME_LIMIT_S, env=environment)
    done = run([sys.executable, "-m", "tests.companions.notebook", str(notebook), str(new)], TIME_LIMIT_S, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert shown(new) == shown(notebook)
