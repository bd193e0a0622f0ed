"""Lists the tests to run for a changed file: ``python -m tests.which mpicoll/_host/thresholds.py``.

First the test files that import the module (for a script: the folder that starts it), then the tests of its room, then scenarios
that cover the room. Each line is a path for pytest.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

from tests.support import ROOT

# For each room, or module directly below mpicoll/, whose tests are not (only) in the folder or file of that name.
COVERED_BY = {
    "__init__": ["api/test_mirror.py"],
    "__main__": ["test_cli.py"],
    "run": ["launch"],
    "_stdout": ["test_cli.py"],
    "_cpus": ["discovery/test_binding.py"],
    "_errors": ["test_errors.py"],
    "_torch_errors": ["test_errors.py"],
    "_algorithms": ["algorithms", "tensors", "behaviour/test_large.py"],
    "_c10d": ["c10d", "stack"],
    "_cuda": ["gpu"],
    "_device": ["gpu"],
    "_discovery": ["discovery", "launch", "gpu/test_cuda_support.py"],
    "_engine": ["engine", "api", "behaviour/test_order.py", "behaviour/test_layouts.py"],
    "_host": ["host", "tensors", "api/test_gathers.py", "behaviour/test_movement.py", "algorithms/test_hierarchical.py"],
    "_mpi": ["mpi", "behaviour/test_exit.py", "behaviour/test_failures.py", "behaviour/test_too_long.py"],
    "_progress": ["progress", "behaviour/test_order.py", "behaviour/test_failures.py"],
    "_tensors": ["tensors", "behaviour/test_layouts.py", "behaviour/test_movement.py"],
    "autograd": ["rpc"],
    "optim": ["rpc"],
}


def which(module: Path) -> list[str]:
    """The tests of a file below mpicoll/, most specific first, relative to the root of the repository."""
    parts = module.resolve().relative_to(ROOT / "mpicoll").with_suffix("").parts
    found = importing(".".join(["mpicoll", *parts]).removesuffix(".__init__")) if parts != ("__init__",) else []
    own = parts[0].removeprefix("_") if len(parts) > 1 or parts[0] == "doctor" else f"test_{parts[0].removeprefix('_')}.py"
    found += [f"tests/{path}" for path in COVERED_BY.get(parts[0], [own])]
    return list(dict.fromkeys(found))


def importing(module: str) -> list[str]:
    """The test files that import a module, and the folders whose scripts do."""
    parent, _, name = map(re.escape, module.rpartition("."))
    whole = re.escape(module)
    pattern = re.compile(rf"\bimport {whole}\b|\bfrom {whole} import|\bfrom {parent} import [^\n]*\b{name}\b")
    found = []
    for path, text in sources().items():
        if pattern.search(text):
            test = path if path.name.startswith("test_") else path.parent.parent if path.parent.name == "scripts" else None
            if test is not None and test != ROOT / "tests":
                found.append(str(test.relative_to(ROOT)))
    return found


@cache
def sources() -> dict[Path, str]:
    """The lines of each file of the tests that import something of mpicoll, in programs kept as text too."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}
    return {path: "\n".join(re.findall(r"^.*\b(?:import|from) mpicoll.*$", text, re.MULTILINE)) for path, text in texts.items()}


if __name__ == "__main__":
    print("\n".join(dict.fromkeys(test for argument in sys.argv[1:] for test in which(Path(argument)))))
