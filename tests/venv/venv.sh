# Virtual environments of Python that are kept between runs, for the scripts that source this file.
#
#	venv DIRECTORY WHAT COMMAND [ARGUMENT...]
#
# runs COMMAND, which installs into the environment in DIRECTORY, and then notes WHAT in
# DIRECTORY/complete. It does nothing if WHAT is noted there and the environment is of the version
# of Python that there is now. An environment of another version, or without a pip that works, is
# emptied and made again first. PYTHON is the interpreter to make it with, python3 without one.
#
# COMMAND may be a function of the script, for which $env is DIRECTORY. Names that begin with venv_
# are of this file.

# venv_install installs packages into $env: it has the arguments of pip install.
venv_install() { "$env/bin/python" -m pip --disable-pip-version-check install --quiet "$@"; }

# venv_locked runs a command that changes the environment, one at a time: venv_locked DIRECTORY
# COMMAND [ARGUMENT...].
venv_locked() (
	env=$1
	shift
	mkdir -p "$(dirname "$env")"
	exec 9>"$env.lock"
	flock 9
	"$@"
)

venv() (
	env=$1 venv_what=$2
	shift 2
	venv_version=$("${PYTHON:-python3}" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
	if ! venv_has; then
		venv_locked "$env" venv_fill "$@"
	fi
)

# venv_current tells whether $env is of the version of Python, which venv notes in pyvenv.cfg.
venv_current() { [ -x "$env/bin/python" ] && grep -qs "^version = $venv_version\." "$env/pyvenv.cfg"; }

venv_has() { [ "$(cat "$env/complete" 2>/dev/null)" = "$venv_what" ] && venv_current; }

# venv_fill is venv under the lock: venv_fill COMMAND [ARGUMENT...].
venv_fill() {
	! venv_has || return 0 # another one has made it meanwhile
	rm -f "$env/complete"
	if ! venv_current || ! "$env/bin/python" -m pip --version >/dev/null 2>&1; then
		"${PYTHON:-python3}" -m venv --clear "$env"
	fi
	"$@"
	echo "$venv_what" >"$env/complete"
}
