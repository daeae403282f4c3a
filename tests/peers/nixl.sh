#!/bin/sh
# Makes a virtual environment with NIXL, which brings its own UCX: nixl.sh VERSION DIRECTORY. It
# does nothing if the directory is complete. Without its dependencies, which are for GPUs, but for
# numpy.
set -eu

version=$1
env=$2

if [ "$(cat "$env/complete" 2>/dev/null)" != "$version" ]; then
	mkdir -p "$(dirname "$env")"
	[ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
	"$env/bin/python" -m pip --disable-pip-version-check install --quiet numpy
	"$env/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps "nixl-cu12==$version"
	"$env/bin/python" -c 'import nixl_cu12'
	echo "$version" >"$env/complete"
fi
