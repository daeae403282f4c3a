#!/bin/sh
# torchrun: a program with N ranks on this host, or on each of several hosts, where this script is
# started on each of them.
#
#   ./torchrun.sh N ./train --epochs 3
#   HOSTS=node1,node2 ID=$JOB TUTTI_SECRET_FILE=~/job.secret ./torchrun.sh N ./train --epochs 3
#
# On one host the ranks find each other by the ID that torchrun gives them. On several they meet at
# the host of rank 0, at a port that follows from ID, which is another for every launch and the same
# on all hosts; torchrun itself meets there at port 29500, or PORT. The secret is a file that all
# hosts can read (tutti secret --file FILE).
set -eu
n=$1
shift
if [ -z "${HOSTS:-}" ]; then
	exec torchrun --standalone --nproc-per-node="$n" --no-python "$@"
fi
: "${ID:?give the launch a name, the same on all hosts}"
exec torchrun --nnodes="$(echo "$HOSTS" | tr , '\n' | wc -l)" --nproc-per-node="$n" --rdzv-id="$ID" \
	--rdzv-backend=c10d --rdzv-endpoint="${HOSTS%%,*}:${PORT:-29500}" --no-python "$@"
