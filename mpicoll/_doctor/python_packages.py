"""The doctor's checks of packages above torch.distributed: which backend Accelerate and Lightning choose here. Imports neither.

Their rules are taken from their sources: accelerate 1.15 `PartialState._prepare_backend`, lightning 2.6
`_choose_and_init_cluster_environment` and `_get_default_process_group_backend_for_device`.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpicoll._discovery.detect import Launch
from mpicoll._doctor.report import Finding

TRUE = ("1", "true", "yes", "y", "t", "on")
PACKAGES = ("accelerate", "lightning", "pytorch-lightning")


def check(versions: Mapping[str, str], environ: Mapping[str, str], launch: Launch | None, gpus: bool) -> list[Finding]:
    """One finding for each package that is installed. gpus: torch sees a GPU here."""
    findings = []
    if "accelerate" in versions:
        findings.append(_accelerate(versions["accelerate"], environ, launch, gpus))
    lightning = next((name for name in PACKAGES[1:] if name in versions), None)
    if lightning is not None:
        findings.append(_lightning(versions[lightning], environ, launch, gpus))
    return findings


def _accelerate(version: str, environ: Mapping[str, str], launch: Launch | None, gpus: bool) -> Finding:
    name = f"Accelerate {version}"
    if launch is None:
        text = f"{name}: without an MPI launcher it takes Gloo or NCCL, as if mpicoll were not installed"
        return Finding("ok", "Accelerate", text)
    if environ.get("ACCELERATE_USE_CPU", "").lower() in TRUE:
        return Finding("ok", "Accelerate", f'{name}: takes the backend "mpi" in this job, for CPUs (ACCELERATE_USE_CPU)')
    if gpus:
        text = f'{name}: takes NCCL in this job, and "mpi" where a program says Accelerator(cpu=True)'
        return Finding("ok", "Accelerate", text)
    text = f'{name}: on CPUs it takes the backend "mpi" only if it is told to use CPUs; otherwise each rank trains alone'
    return Finding("note", "Accelerate", text, remedy="Accelerator(cpu=True), or ACCELERATE_USE_CPU=1 in the environment")


def lightning_environment(environ: Mapping[str, str], launch: Launch | None) -> str:
    """The class from which Lightning gets ranks: the first one that detects its environment."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return "TorchElasticEnvironment"
    if "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return "SLURMEnvironment"
    if {"LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_SIZE"} <= set(environ):
        return "LSFEnvironment"
    return "MPIEnvironment" if launch is not None and launch.size > 1 else "LightningEnvironment"


def _lightning(version: str, environ: Mapping[str, str], launch: Launch | None, gpus: bool) -> Finding:
    name, ours = f"Lightning {version}", 'strategy=DDPStrategy(process_group_backend="mpi")'
    environment, backend = lightning_environment(environ, launch), "NCCL" if gpus else "Gloo"
    if launch is None:
        text = f"{name}: takes {environment} for ranks and {backend} here; under an MPI launcher, {ours} takes mpicoll"
        return Finding("ok", "Lightning", text)
    text = f"{name}: takes {environment} for ranks and {backend} in this job, and mpicoll with {ours}"
    if environment == "SLURMEnvironment" and launch.launcher != "slurm":
        text += f"; Slurm's variables do not hold the ranks that {launch.launcher} has started"
        remedy = "Trainer(plugins=[MPIEnvironment()]), or SLURM_JOB_NAME=bash in the environment"
        return Finding("note", "Lightning", text, remedy=remedy)
    return Finding("ok", "Lightning", text)
