#!/bin/sh
# Makes a virtual environment with a version of torch, and with a trainer for the tests: deps.sh
# VERSION DIRECTORY. It does nothing if the directory is complete.
set -eu

version=$1
env=$2
trainer=accelerate==1.15.0
here=$(dirname "$0")

install() { "$env/bin/python" -m pip --disable-pip-version-check install --quiet --no-warn-conflicts "$@"; }

if [ "$(cat "$env/complete" 2>/dev/null)" != "$version" ]; then
	mkdir -p "$(dirname "$env")"
	[ -x "$env/bin/python" ] || "${PYTHON:-python3}" -m venv "$env"
	install wheel numpy expecttest packaging
	install --no-deps "torch==$version"
	"$env/bin/python" "$here/requirements.py"
	"$env/bin/python" -c 'import torch.distributed; assert torch.distributed.is_available()'
	echo "$version" >"$env/complete"
fi
if [ "$(cat "$env/trainer" 2>/dev/null)" != "$trainer" ]; then
	install --no-deps "$trainer" # with torch as it is
	"$env/bin/python" "$here/requirements.py" "${trainer%%==*}"
	echo "$trainer" >"$env/trainer"
fi
