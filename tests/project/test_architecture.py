"""The layers: what may import what, read from the source. Each failure says what to do."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

import mpicoll
from mpicoll._c10d import patches
from tests.project.sources import MODULES, PACKAGE, changes, graph, imports, name, only_for_types, package_of, tree
from tests.support import ROOT

SOURCES = sorted({*MODULES, *(path for folder in ("benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py"))})
# A file imports its own package, packages of lower layers, and no other. Packages of one layer do not know each other.
LAYERS = (
    ("__main__", "_overloads"),
    ("bench", "nn"),
    ("_api",),
    ("_c10d", "testing"),
    ("_engine", "optim"),
    ("_host", "_device", "rpc"),
    ("_algorithms", "_faults", "doctor", "run"),
    ("_tensors", "_mpi", "_launch", "autograd", "errors"),
    ("__init__", "_base"),
)
LINES = 34587
LAYER = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}


def test_every_package_has_a_layer() -> None:
    missing = {package_of(path) for path in MODULES} - set(LAYER)
    assert not missing, f"add {missing} to LAYERS, in the lowest layer that its imports allow"
    gone = set(LAYER) - {package_of(path) for path in MODULES}
    assert not gone, f"remove {gone} from LAYERS: there is no such file or folder"


def test_imports_point_downward() -> None:
    wrong = []
    for path in MODULES:
        for module, line in imports(path):
            first, other, *_ = [*module.split("."), "__init__"]
            own = package_of(path)
            if first == "mpicoll" and other != own and LAYER.get(other, LAYER["__init__"]) <= LAYER[own]:
                wrong.append(f"{name(path)}:{line} imports {module}")
    assert not wrong, (
        "these imports point upward or sideways. Hand the object in as an argument or a callback, or move what is needed "
        "to a lower layer:\n" + "\n".join(wrong)
    )


def test_the_package_knows_nothing_that_is_not_in_the_wheel() -> None:
    outside = ("benchmarks", "examples", "tests")
    wrong = [f"{name(path)}:{line}" for path in MODULES for module, line in imports(path) if module.split(".")[0] in outside]
    assert not wrong, f"these imports fail where the wheel is installed: {wrong}"


def test_the_package_grows_no_more() -> None:
    """One idea is one file, however long, and a package is as large as what it does: so one number for all."""
    lines = sum(path.read_text().count("\n") for path in MODULES)
    assert lines <= LINES, f"the package has {lines} lines, {lines - LINES} too many: remove as many as you add"


def test_no_circles() -> None:
    """Imports in functions and for type checkers count: they only hide that two files cannot be understood apart."""
    try:
        graphlib.TopologicalSorter(graph()).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(
            f"{', '.join(error.args[1])} import each other. Move the names that both need into a file below them, "
            "or hand in a callback instead of importing the caller"
        ) from None


# -- libraries -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("library", "home"), [("mpi4py", "_mpi"), ("torch.cuda", "_device")])
def test_one_package_for_each_library(library: str, home: str) -> None:
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for path in MODULES
        if package_of(path) != home and not path.name.startswith("probe")  # scripts that run in a process of their own
        for module, line in imports(path)
        if (module == library or module.startswith(library + ".")) and line not in only_for_types(path)
    ]
    assert not wrong, f"only {home} uses {library}; add there what is needed:\n" + "\n".join(wrong)


def test_torch_cuda_is_used_in_its_package_only() -> None:
    wrong = [
        f"{name(path)}:{node.lineno}"
        for path in MODULES
        if str(path.relative_to(PACKAGE)) not in ("_device/streams.py", "_device/ipc.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"
    ]
    assert not wrong, "only streams.py and ipc.py of _device use torch.cuda; add there what is needed:\n" + "\n".join(wrong)


def test_algorithms_and_mpi_know_nothing_of_torch_distributed() -> None:
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for path in MODULES
        if package_of(path) in ("_mpi", "_algorithms") and path.name != "plans.py"  # a plan is of one of torch's ReduceOps
        for module, line in imports(path)
        if module.startswith("torch.distributed")
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_and_python_are_changed_in_the_table_only() -> None:
    """Beside attributes of torch: hooks and finders of the interpreter. A script's own arguments and search path are its own."""
    homes = {patch.home for patch in patches.TABLE} | {"_c10d/patches.py"}
    wrong = [
        f"{name(path)}:{line}: {text}"
        for path in MODULES
        if str(path.relative_to(PACKAGE)) not in homes
        for line, text in changes(path, ("torch", "sys", "threading", "builtins", "mpicoll._c10d.torch_world"))
        if not re.match(r"(del )?(sys\.(argv|path)\b|namespace\b)", text)
    ]
    assert not wrong, (
        "these lines change objects of torch or of the interpreter. Add an entry to TABLE in mpicoll/_c10d/patches.py and use "
        "patches.wrap, assign or replaced:\n" + "\n".join(wrong)
    )


def test_frames_are_skipped_below_all_functions_of_a_module() -> None:
    """`skip_frames` marks the functions that the module has when it is called. (Two stood below it, and dynamo compiled them.)"""
    call, wrong = "dynamo.skip_frames(__name__)", []
    called = [path for path in MODULES if call in path.read_text()]
    for path in called:
        statements = tree(path).body
        at = next(place for place, statement in enumerate(statements) if ast.unparse(statement) == call)
        wrong += [f"{name(path)}: {each.name}" for each in statements[at:] if isinstance(each, (ast.FunctionDef, ast.ClassDef))]
    assert called
    assert not wrong, f"these stand below `{call}`: {wrong}"


# -- GPUs ----------------------------------------------------------------------------------------------------------------

GPU_WORDS = re.compile(r"(?i)\b(cuda|gpus?|streams|is_cuda|is_cpu)\b")
CPU_PACKAGES = {"_algorithms", "_api", "_c10d", "_engine", "_faults", "_host", "_tensors", "_mpi"}
KNOW_GPUS = {  # file: reason
    "_api/groups.py": "a mixed group takes tensors of one kind of device only",
    "_api/information.py": "names the facts about torch that it returns",
    "_engine/collectives.py": "picks the backend by the tensor's device",
    "_engine/requests.py": "an exception is of a device, or of a signal's handler",
    "_tensors/buffers.py": "the check for a tensor that needs no other check",
    "_tensors/checks.py": "a plain tensor on the CPU needs no other check",
    "_c10d/names.py": "torch asks which kinds of device the backend takes",
    "_c10d/torch213/mixed.py": "cpu:mpi,cuda:nccl",
}


def test_files_of_the_cpu_do_not_know_that_gpus_exist() -> None:
    found = {
        str(path.relative_to(PACKAGE)): match
        for path in MODULES
        if package_of(path) in CPU_PACKAGES and not re.search("device|cuda", name(path))
        if (match := GPU_WORDS.search(path.read_text()))
    }
    wrong = {file: match.group() for file, match in found.items() if file not in KNOW_GPUS}
    assert not wrong, f"{wrong}: move what concerns GPUs to _device, or name the file with a reason in KNOW_GPUS"
    gone = set(KNOW_GPUS) - set(found)
    assert not gone, f"well done; now delete {gone} from KNOW_GPUS"


# -- public and private ----------------------------------------------------------------------------------------------------


def test_the_mirror_shows_no_private_package() -> None:
    """A private package called `config` would hide torch.distributed.config from programs that import mpicoll.config."""
    private = {package_of(path) for path in MODULES if package_of(path).startswith("_") and not package_of(path).startswith("__")}
    shown = set(dir(mpicoll))
    assert not private & shown, f"dir(mpicoll) shows {private & shown}: names that start with an underscore are private"
    assert not {word for word in shown if word.startswith("_")}
    for word in private:
        public = getattr(mpicoll, word.removeprefix("_"), None)  # torch's, if torch has one
        assert getattr(public, "__name__", "") != f"mpicoll.{word}", word


# -- files -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_one_file(path: Path) -> None:
    text = path.read_text()
    if text.strip():
        assert ast.get_docstring(tree(path)), "a module says what it is for"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except"
            silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
            broad = ast.unparse(node.type) in ("Exception", "BaseException")
            assert not (silent and broad), f"line {node.lineno}: an error of any kind is passed over in silence"
    home = re.search(r"/(home|Users)/[a-z]\w+|/root/", text)
    assert home is None or path == Path(__file__), f"a path of one machine: {home and home.group()}"
