# Spack 1.0 or newer. From the top of the repository:
#
#   spack repo add docs/recipes/spack
#   spack install py-mpicoll ^openmpi ^py-torch~mpi
#
# py-mpi4py is built with the MPI of the spec: mpicoll finds it, and MPI4PY_LIBMPI is not needed. A py-torch+mpi (the default) has
# an MPI backend of its own, which keeps the name "mpi"; mpicoll's is then "mpicoll", unless MPICOLL_OVERRIDE_MPI=1.
import os

from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpicoll(PythonPackage):
    """MPI for stock PyTorch wheels: a drop-in for torch.distributed, and a backend for it."""

    git = "file://" + os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 5))  # the clone with this file

    license("BSD-3-Clause")

    version("0.1.0", branch="main")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-torch@2.11: +distributed", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-numpy", type=("build", "run"))
    depends_on("mpi", type="run")  # its mpiexec

    import_modules = ("mpicoll",)
