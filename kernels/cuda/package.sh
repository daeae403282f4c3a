#!/bin/sh
# Makes a virtual environment with a program for CUDA devices from a Python package of NVIDIA's:
# package.sh PACKAGE VERSION PROGRAM DIRECTORY. It does nothing if the directory is complete.
set -eu
. "$(dirname "$0")/../../tests/venv/venv.sh"

install_program() {
	venv_install --no-deps "$1==$2"
	"$env"/lib/python*/site-packages/nvidia/*/bin/"$3" --version >/dev/null
}

venv "$4" "$2" install_program "$1" "$2" "$3"
