"""An example as a module, for scripts that prove what it shows."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def imported(name: str, folder: str = ".") -> ModuleType:
    """The example of this name. Its classes and functions can be pickled, as remote calls need it."""
    sys.path.append(str(EXAMPLES / folder))
    return importlib.import_module(name)
