"""``python -m tests.docs.pictures`` draws the pictures of docs/examples.md anew, or only those that are named; needs matplotlib.

The examples draw them, most by their option ``--plot``. All but profile_step, which measures, draw the same each time.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.support import ROOT, run

FOLDER = ROOT / "docs" / "img" / "examples"
DATE = re.compile(rb" *<dc:date>.*?</dc:date>\n")
COORDINATE = re.compile(rb"(?<=[ML ])(\d+\.\d\d)\d+(?= |\n)")  # of a path; two decimals are enough
TIME_LIMIT_S = 120

# The name of the example: ranks, program, option.
PICTURES = {
    "halo_convolution": (4, "examples/halo_convolution.py", "--plot"),
    "insitu_mpi4py": (4, "examples/insitu_mpi4py.py", "--plot"),
    "profile_step": (2, "examples/profile_step.py", "--plot"),
    "transformer_fsdp2": (2, "tests/docs/scripts/draw_transformer.py", "--plot"),
}


def draw(name: str, folder: Path) -> Path:
    """Runs the example of this name, and returns the file that it has drawn."""
    ranks, program, option = PICTURES[name]
    settings, picture = folder / "matplotlibrc", folder / f"{name}.svg"
    settings.write_text("svg.hashsalt: mpicoll\n")  # names in the file that are the same each time
    words = ["-m", "mpicoll.run", "-n", str(ranks), program, option, str(picture)]
    done = run([sys.executable, *words], TIME_LIMIT_S, env={"MATPLOTLIBRC": str(settings)})
    settings.unlink()
    assert done.returncode == 0, done.stdout + done.stderr
    picture.write_bytes(COORDINATE.sub(rb"\1", DATE.sub(b"", picture.read_bytes())))
    return picture


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for asked in sys.argv[1:] or PICTURES:
        print(draw(asked, FOLDER))
