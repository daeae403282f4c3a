#!/bin/sh
# Makes a virtual environment with a version of torch, and with a trainer for the tests: deps.sh
# VERSION DIRECTORY. It does nothing if the directory is complete.
set -eu

version=$1
env=$2
trainer=accelerate==1.15.0
here=$(dirname "$0")
. "$here/../../tests/venv/venv.sh"

install_torch() {
	venv_install --no-warn-conflicts wheel numpy expecttest packaging
	venv_install --no-warn-conflicts --no-deps "torch==$version"
	"$env/bin/python" "$here/requirements.py"
	"$env/bin/python" -c 'import torch.distributed; assert torch.distributed.is_available()'
}

install_trainer() {
	venv_install --no-warn-conflicts --no-deps "$trainer" # with torch as it is
	"$env/bin/python" "$here/requirements.py" "${trainer%%==*}"
	echo "$trainer" >"$env/trainer"
}

venv "$env" "$version" install_torch
if [ "$(cat "$env/trainer" 2>/dev/null)" != "$trainer" ]; then
	venv_locked "$env" install_trainer
fi
