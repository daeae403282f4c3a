#!/bin/sh
# MPICH, and others with the launcher Hydra: a program with N ranks on this host, or on each of
# several hosts.
#
#   ./mpich.sh N ./train --epochs 3
#   HOSTS=node1,node2 ./mpich.sh N ./train --epochs 3
#
# Hydra carries the address where the ranks meet and, unless TUTTI_SECRET or TUTTI_SECRET_FILE is
# set, a secret. It does not encrypt what it carries between hosts: set one of them where others can
# listen on the network.
#
# Hydra's launcher is MPIEXEC. Without it, mpiexec.mpich is used where there is one: Debian and its
# kin call it that, and their mpiexec may be Open MPI's. Elsewhere it is mpiexec.
set -eu
mpiexec=${MPIEXEC:-$(command -v mpiexec.mpich || echo mpiexec)}
n=$1
shift
if [ -z "${HOSTS:-}" ]; then
	exec "$mpiexec" -n "$n" "$@"
fi
exec "$mpiexec" -hosts "$HOSTS" -ppn 1 -n "$(echo "$HOSTS" | tr , '\n' | wc -l)" tutti run -n "$n" -- "$@"
