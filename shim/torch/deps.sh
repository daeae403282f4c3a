#!/bin/sh
# Makes a virtual environment with a version of torch: deps.sh VERSION DIRECTORY. It does nothing if
# the directory is complete.
set -eu

version=$1
env=$2

if [ "$(cat "$env/complete" 2>/dev/null)" = "$version" ]; then
	exit 0
fi
mkdir -p "$(dirname "$env")"
[ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
install() { "$env/bin/python" -m pip --disable-pip-version-check install --quiet --no-warn-conflicts "$@"; }
install wheel numpy expecttest packaging
install --no-deps "torch==$version"
"$env/bin/python" "$(dirname "$0")/requirements.py"
"$env/bin/python" -c 'import torch.distributed; assert torch.distributed.is_available()'
echo "$version" >"$env/complete"
