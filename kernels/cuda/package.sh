#!/bin/sh
# Makes a virtual environment with a program for CUDA devices from a Python package of NVIDIA's:
# package.sh PACKAGE VERSION PROGRAM DIRECTORY. It does nothing if the directory is complete.
set -eu

package=$1
version=$2
program=$3
env=$4

if [ "$(cat "$env/complete" 2>/dev/null)" != "$version" ]; then
	mkdir -p "$(dirname "$env")"
	[ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
	"$env/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps "$package==$version"
	"$env"/lib/python*/site-packages/nvidia/*/bin/"$program" --version >/dev/null
	echo "$version" >"$env/complete"
fi
