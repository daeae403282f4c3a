#!/bin/sh
# Makes a virtual environment with NIXL, which brings its own UCX: nixl.sh VERSION DIRECTORY. It
# does nothing if the directory is complete. Without its dependencies, which are for GPUs, but for
# numpy.
set -eu
. "$(dirname "$0")/../venv/venv.sh"

install_nixl() {
	venv_install numpy
	venv_install --no-deps "nixl-cu12==$1"
	"$env/bin/python" -c 'import nixl_cu12'
}

venv "$2" "$1" install_nixl "$1"
