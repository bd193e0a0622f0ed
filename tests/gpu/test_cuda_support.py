"""Whether an MPI may be handed GPU memory (trap 65): what each library says, and the trial, which survives a wrong yes.

No GPU is needed: the trial's memory is a pretended GPU's here, which MPI can read, cannot read, or reads wrongly.
"""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from mpicoll._launch.find import cuda_support, probe_cuda
from mpicoll._launch.find.cuda_support import Proof

ALL = ("send 8 bytes", "send 4 MiB", "isend and irecv", "broadcast", "all_gather", "all_gather of uneven sizes")


def decide(proof: Proof, answer: int = 1, **environ: str) -> cuda_support.Verdict:
    started: dict[str, Any] = {"cuda_query": {"MPIX_GPU_query_support": answer}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_support, "prove", lambda _: proof)
        return cuda_support.decide(started, environ, True)


@pytest.mark.parametrize(("answers", "tried"), [({"query": 1}, True), ({"query": 0}, False), ({}, True)])
def test_an_mpi_that_does_not_say_no_is_tried_where_a_driver_is(answers: dict[str, int], tried: bool) -> None:
    """Version 4 of Open MPI answers 1 whatever is there, and Intel MPI has no function that answers."""
    assert cuda_support.claims({"cuda_query": answers}, True).moves is tried
    assert not cuda_support.claims({"cuda_query": answers}, False).moves


def test_a_claim_counts_as_far_as_it_is_proven() -> None:
    assert decide(Proof(ALL)).moves
    partly = decide(Proof(ALL[:2], "the trial ended with status 139 (a segmentation fault) in isend and irecv"))
    assert not partly.moves
    assert "segmentation fault" in partly.evidence[-1]
    assert not decide(Proof((), "the trial could not be started")).moves


def test_who_claims_nothing_is_not_tried_and_the_user_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(environ: object) -> Proof:
        raise AssertionError("tried")

    monkeypatch.setattr(cuda_support, "prove", never)
    started = {"cuda_query": {"MPIX_GPU_query_support": 0}}
    assert not cuda_support.decide(started, {}, True).moves
    assert cuda_support.decide(started, {"MPICOLL_CUDA_AWARE": "1"}, False).moves
    said = decide(Proof(ALL), MPICOLL_CUDA_AWARE="0")
    assert not said.moves
    assert said.evidence[0] == "MPICOLL_CUDA_AWARE=0 decides"


def test_the_words_are_the_same_on_both_sides() -> None:
    """The trial is a script that imports nothing of ours."""
    for word in ("BEGUN", "PASSED", "WRONG"):
        assert getattr(cuda_support, word) == getattr(probe_cuda, word)


# -- the trial itself ----------------------------------------------------------------------------------------------------

GPU = f"""
import ctypes, importlib.util, mmap, sys, time
spec = importlib.util.spec_from_file_location("probe_cuda", {str(cuda_support.PROBE)!r})
probe = importlib.util.module_from_spec(spec)
spec.loader.exec_module(probe)

class Memory:
    "The host's, in the place of a GPU's."
    kept = []
    def allocate(self, nbytes):
        memory = mmap.mmap(-1, nbytes)
        self.kept.append(memory)
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))
    def put(self, address, data):
        ctypes.memmove(address, data, len(data))
    def get(self, address, nbytes):
        return ctypes.string_at(address, nbytes)
"""
KINDS = {
    "readable": "",
    # MPI, which is handed the address, may not touch it; who asks the GPU may
    "forbidden": """
    def allocate(self, nbytes):
        address = super().allocate(nbytes)
        self.open(address, nbytes, 0)
        return address
    def open(self, address, nbytes, how):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), how) == 0
    def put(self, address, data):
        pass
""",
    "wrong": """
    def get(self, address, nbytes):
        return bytes(nbytes)
""",
    "silent": """
    def put(self, address, data):
        time.sleep(600)
""",
}


def trial(folder: Path, kind: str, limit_s: float = 40) -> Proof:
    script = folder / "trial.py"
    body = KINDS[kind] or "    pass\n"
    script.write_text(f"{GPU}\nclass Kind(Memory):\n{body}\nfrom mpi4py import MPI\nprobe.run(MPI.COMM_WORLD, Kind())\n")
    return cuda_support.prove({**os.environ, "MPICOLL_PROBE_TIMEOUT": str(limit_s)}, script)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("kind", "passed", "failed"),
    [
        ("readable", ALL, ""),
        ("forbidden", (), r"the trial ended with status .* in send 8 bytes.*"),  # only the trial crashes
        ("wrong", None, r"what arrived was wrong: send 8 bytes, send 4 MiB.*"),
    ],
)
def test_a_trial(kind: str, passed: tuple[str, ...] | None, failed: str, tmp_path: Path) -> None:
    proof = trial(tmp_path, kind)
    assert passed is None or proof.passed == passed
    assert re.fullmatch(failed, proof.failed, re.DOTALL), proof
    assert decide(proof).moves == (kind == "readable")


@pytest.mark.launch
def test_a_trial_that_does_not_end_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    proof = trial(tmp_path, "silent", limit_s=5)
    assert proof == Proof((), "the trial had not ended after 5 s, in send 8 bytes (MPICOLL_PROBE_TIMEOUT)")
    assert time.monotonic() - began < 20


@pytest.mark.launch
def test_without_a_gpu_the_trial_says_why() -> None:
    if cuda_support.driver_loads():
        pytest.skip("a CUDA driver is here")
    proof = cuda_support.prove(os.environ)
    assert proof.passed == ()
    assert "libcuda.so.1" in proof.failed
