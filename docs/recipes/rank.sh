#!/bin/sh
# One container for each rank; the mpiexec of the host starts the containers:
#
#   mpiexec -n 2 docs/recipes/rank.sh python train.py             Open MPI
#   mpiexec -pmi-port -n 2 docs/recipes/rank.sh python train.py   MPICH: a container gets no open file of mpiexec
#
# The MPI in the container must fit the one outside (docs/sites.md). ENGINE: docker or podman. IMAGE: made with docs/recipes/Dockerfile.
# OPTIONS: --ipc=host --pid=host lets the ranks of a host share memory; without them they talk over the network, which is slower.
variables=$(mktemp)
trap 'rm -f "$variables"' EXIT
env | grep -E '^(OMPI|PMIX|PRTE|OPAL|PMI|MPI|MPIR|UCX|HYDI|SLURM|PALS|FLUX|MPICOLL|OMP|MASTER)_' | grep -v '^OPAL_PREFIX=' > "$variables"
# /tmp: the launcher's sockets and files. The network of the host: the launcher and the other ranks.
${ENGINE:-docker} run --rm --network=host ${OPTIONS-"--ipc=host --pid=host"} -v /tmp:/tmp -v "$PWD:$PWD" -w "$PWD" \
    --env-file "$variables" --entrypoint "" "${IMAGE:-mpicoll}" "$@"
