"""Tests a GPU's tensors under every MPI at hand and writes one report: ``python tests/gpu/run.py``; see README.md here.

What did not run stands in the report as not run, with the reason. Exit status 0: all that ran passed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

from mpicoll._base import cpus  # noqa: E402
from mpicoll._launch.find import ask  # noqa: E402

ARCHIVES = ROOT.parent / "shared" / "gpu"
FACTS = """
import json, torch
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
print(json.dumps(dict(gpu=gpu, gpus=torch.cuda.device_count(), torch=torch.__version__, cuda=torch.version.cuda)))
"""
BENCHES = ("latency", "all_reduce", "all_gather_into_tensor", "broadcast")
SIZES = ("8", "64KiB", "1MiB", "16MiB", "256MiB")
# On the host's cores, beside Gloo and MPI: ranks x threads, and sizes.
SHAPES = ("16x1", "8x2", "4x4", "2x8")
HOST_SIZES = ("64", "64KiB", "4MiB", "64MiB")
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected)")
# What rank 0 is told, so that all go one way.
PATHS = {
    "staged": {"MPICOLL_CUDA_AWARE": "0", "MPICOLL_CUDA_IPC": "0"},
    "ipc": {"MPICOLL_CUDA_AWARE": "0", "MPICOLL_CUDA_IPC": "1"},
    "direct": {"MPICOLL_CUDA_AWARE": "1"},
}


def main() -> int:
    options = arguments()
    facts = json.loads(subprocess.run([sys.executable, "-c", FACTS], capture_output=True, text=True, check=True).stdout)
    if facts["gpu"] is None and options.device == "cuda":
        print("torch sees no GPU here; --device cpu tries the tests themselves", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"machine": facts, "device": options.device, "when": time.strftime("%Y-%m-%d"), "mpis": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, environ in mpis(options.mpi, Path(folder)).items():
            report["mpis"][name] = one(options, environ)
    out = Path(
        options.out or HERE / f"report-{re.sub(r'[^A-Za-z0-9]+', '-', facts['gpu'] if options.device == 'cuda' else 'cpu')}.json"
    )
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {out}")
    runs = [run for mpi in report["mpis"].values() for path in mpi["paths"].values() for run in path.get("tests", {}).values()]
    return 0 if runs and all(run["status"] == 0 for run in runs) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", nargs="+", default=None, metavar="WHERE", help="site, a folder with bin and lib, or its archive")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], metavar="N", help="default 2 4")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS), help="default all")
    parser.add_argument("--bench", nargs="*", choices=BENCHES, default=list(BENCHES), help="default all")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), metavar="RxT", help="ranks x threads, on the host")
    parser.add_argument("--device", default="cuda", help="cpu tries the tests themselves")
    parser.add_argument("--limit", type=float, default=280, metavar="S", help="seconds for each run; default 280")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), metavar="S", help="of the benchmarks")
    parser.add_argument("--out", metavar="FILE", help="default report-<gpu>.json beside this file")
    parser.add_argument("words", nargs="*", metavar="-- PYTEST", help="for pytest: -k all_reduce")
    return parser.parse_args()


def mpis(asked: list[str] | None, folder: Path) -> dict[str, dict[str, str]]:
    """What must be set for each. Without a wish: the site's own, and the archives that lie beside the checkout."""
    found: dict[str, dict[str, str]] = {}
    for where in asked or ["site", *(str(path) for path in sorted(ARCHIVES.glob("*.tar.*")))]:
        if where == "site":
            found["site"] = {}
            continue
        path = Path(where).resolve()
        base = unpacked(path, folder) if path.is_file() else path
        library = next(iter(sorted(base.glob("lib/libmpi.so.*"))), None)
        if library is None:
            raise SystemExit(f"--mpi {where}: no lib/libmpi.so.* there")
        # Open MPI that was moved finds its own files by OPAL_PREFIX; others do not read it.
        found[path.name] = {"OPAL_PREFIX": str(base), "MPI4PY_LIBMPI": str(library)}
    return found


def unpacked(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    return next(path.parent.parent for path in folder.glob("*/lib/libmpi.so*"))


def one(options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    """What the doctor says, and by each path the tests, on each number of ranks, and the benchmarks."""
    said = start(["-m", "mpicoll.doctor", "--json"], environ, options.limit)[1]
    try:
        facts = json.loads(said)["facts"]
        verdict, version = facts["gpu_memory"], facts["mpi"]["library_version"].split(",")[0]
    except (ValueError, KeyError):
        reason = {"not run": f"the doctor has no word on this MPI: {said[-500:]}"}
        return {"paths": dict.fromkeys(PATHS, reason)}
    print(json.dumps(verdict), flush=True)
    found: dict[str, Any] = {"version": version, "verdict": verdict, "paths": {}}
    for path in PATHS:
        if path not in options.paths:
            found["paths"][path] = {"not run": "not asked for"}
        elif path == "direct" and not verdict["moves"]:
            found["paths"][path] = {"not run": "this MPI does not take GPU memory"}
        else:
            found["paths"][path] = by(path, options, {**environ, **PATHS[path]})
    found["host"] = {shape: on_host(options, shape, environ) for shape in options.shapes}
    return found


def on_host(options: argparse.Namespace, shape: str, environ: Mapping[str, str]) -> Any:
    """An all_reduce of the host's memory: microseconds by size and way."""
    ranks, threads = map(int, shape.split("x"))
    if ranks * threads > cpus.usable_cores():
        return {"not run": f"{cpus.usable_cores()} cores"}
    words = ["--sizes", *HOST_SIZES, "--threads", str(threads)]
    return bench(options, "all_reduce", environ, ranks, words)


def by(path: str, options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"tests": {}, "bench": {}}
    for ranks in options.ranks:
        found["tests"][str(ranks)] = run = tests(options, ranks, path, environ)
        print(path, ranks, json.dumps(run)[:1000], flush=True)
    for what in options.bench:  # on 2 ranks; the copy is the device's
        found["bench"][what] = bench(options, what, environ, 2, ["--device", options.device, "--sizes", *options.sizes])
    return found


def bench(options: argparse.Namespace, what: str, environ: Mapping[str, str], ranks: int, words: list[str]) -> Any:
    """Microseconds by size and way."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        run = ["-m", "mpicoll.run", "--quiet", "-n", str(ranks), "-m", "mpicoll.bench"]
        status, said = start([*run, what, *words, "--repeat", "5", "--json", str(file)], environ, options.limit)
        if status != 0 or not file.exists():
            return {"not run": f"status {status}: {said[-3000:]}"}
        rows = json.loads(file.read_text())["rows"]
    print(what, "measured", flush=True)
    return {row["bytes"]: {**{way: round(it["us"], 2) for way, it in row["ways"].items()}, **row["missing"]} for row in rows}


def tests(options: argparse.Namespace, ranks: int, path: str, environ: Mapping[str, str]) -> dict[str, Any]:
    command = ["-m", "mpicoll.run", "--quiet", "-n", str(ranks), "-m", "pytest", "-q", "--no-header", "--tb=short", "-rf"]
    began = time.monotonic()
    status, words = start(
        [*command, "--device", options.device, "--way", path, str(HERE / "real"), *options.words], environ, options.limit
    )
    counts = {kind: int(number) for line in words.splitlines() if " in " in line for number, kind in COUNTS.findall(line)}
    failed = [line.removeprefix("FAILED ") for line in words.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    found = {"status": status, "seconds": round(time.monotonic() - began, 1), **counts, "failures": failed}
    return found if status == 0 else {**found, "output": words[-6000:]}


def start(words: list[str], environ: Mapping[str, str], limit_s: float) -> tuple[int, str]:
    """Status, and what was printed to either side; 124: it had to be ended, by SIGTERM first, for mpiexec to end its ranks."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, **environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = 124
            ask.end(process)
        output.seek(0)
        return status, output.read()


if __name__ == "__main__":
    sys.exit(main())
