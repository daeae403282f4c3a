#!/bin/sh
# Makes a virtual environment with NVIDIA's assembler for CUDA devices, 200 MB: ptxas.sh VERSION
# DIRECTORY. It does nothing if the directory is complete.
set -eu

version=$1
env=$2

if [ "$(cat "$env/complete" 2>/dev/null)" != "$version" ]; then
	mkdir -p "$(dirname "$env")"
	[ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
	"$env/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps "nvidia-cuda-nvcc==$version"
	"$env"/lib/python*/site-packages/nvidia/*/bin/ptxas --version >/dev/null
	echo "$version" >"$env/complete"
fi
