"""``python -m tests.docs.pictures`` draws the pictures of docs/examples anew, or only those that are named; needs matplotlib.

The examples draw them, most by their option ``--plot``; all but profile_step, which measures, draw the same each time. curves.py
draws the numbers that a page shows.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.docs import curves
from tests.support import ROOT, run

FOLDER = ROOT / "docs" / "img" / "examples"
DATE = re.compile(rb" *<dc:date>.*?</dc:date>\n")
COORDINATE = re.compile(rb"(?<=[ML ])(\d+\.\d\d)\d+(?= |\n)")  # of a path; two decimals are enough
TIME_LIMIT_S = 120

# The name of the example: ranks, program, option.
RUN = {
    "digits_by_hand": (2, "examples/digits_by_hand.py", "--plot"),
    "digits_ddp": (2, "examples/digits_ddp.py", "--plot"),
    "digits_torch_ddp": (2, "examples/digits_torch_ddp.py", "--plot"),
    "halo_convolution": (4, "examples/halo_convolution.py", "--plot"),
    "insitu_mpi4py": (4, "examples/insitu_mpi4py.py", "--plot"),
    "profile_step": (2, "examples/profile_step.py", "--plot"),
    "transformer_fsdp2": (2, "tests/docs/scripts/draw_transformer.py", "--plot"),
}
PICTURES = sorted({*RUN, *curves.DRAWN})


def draw(name: str, folder: Path) -> Path:
    """Draws the picture of the example of this name, and returns its file."""
    picture = folder / f"{name}.svg"
    if name in RUN:
        run_to_draw(name, picture)
    else:
        curves.draw(name, picture)
    picture.write_bytes(COORDINATE.sub(rb"\1", DATE.sub(b"", picture.read_bytes())))
    return picture


def run_to_draw(name: str, picture: Path) -> None:
    ranks, program, option = RUN[name]
    settings = picture.with_name("matplotlibrc")
    settings.write_text("".join(f"{key}: {value}\n" for key, value in curves.SETTINGS.items()))
    words = ["-m", "mpicoll.run", "-n", str(ranks), program, option, str(picture)]
    done = run([sys.executable, *words], TIME_LIMIT_S, env={"MATPLOTLIBRC": str(settings)})
    settings.unlink()
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for asked in sys.argv[1:] or PICTURES:
        print(draw(asked, FOLDER))
