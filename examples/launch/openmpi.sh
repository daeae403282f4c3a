#!/bin/sh
# Open MPI: a program with N ranks on this host, or on each of several hosts.
#
#   ./openmpi.sh N ./train --epochs 3
#   HOSTS=node1,node2 TUTTI_SECRET_FILE=~/job.secret ./openmpi.sh N ./train --epochs 3
#
# On one host the ranks find each other by the name that mpirun gives the launch. On several mpirun
# starts one tutti run on each, and would bind it to one core, with all its ranks. It does not tell
# them where to meet: they do at the first host, at port 29400, or PORT, which must be free there.
# The secret is a file that all hosts can read (tutti secret --file FILE).
#
# Open MPI's launcher is MPIRUN. Without it, mpirun.openmpi is used where there is one: Debian and
# its kin call it that, and their mpirun may be MPICH's. Elsewhere it is mpirun.
set -eu
mpirun=${MPIRUN:-$(command -v mpirun.openmpi || echo mpirun)}
n=$1
shift
if [ -z "${HOSTS:-}" ]; then
	exec "$mpirun" -n "$n" "$@"
fi
exec "$mpirun" --host "$HOSTS" --bind-to none --map-by ppr:1:node -x TUTTI_SECRET_FILE \
	tutti run -n "$n" --rdzv "${HOSTS%%,*}:${PORT:-29400}" -- "$@"
