#!/bin/sh
# Tests the machine's GPU, each test in a process of its own, which is killed when it takes too
# long. The files of a test's output, and of the table of bandwidths and times, are in $OUT/gpu
# (.build/gpu if OUT is not set); every row is there as soon as it was measured. The table and what
# has failed are printed last. The script fails if a test does, or if there is no GPU. It takes less
# than 10 minutes: a test that might end later is not begun.
#
#   tests/gpu/run.sh --build          only compiles the tests, to .build/gpu.test
#   tests/gpu/run.sh [--device N]     runs them; without Go, those that were compiled before
#   tests/gpu/run.sh --fake           runs them on the fake of the driver
#   tests/gpu/run.sh --table          runs those that make the table
#   tests/gpu/run.sh --sanitizer      runs the kernels under compute-sanitizer, too
#   tests/gpu/run.sh --limit SECONDS  ends a test after another time than 80 s
#   tests/gpu/run.sh --binary PATH    runs tests that were compiled before to another place
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "${OUT:-$root/.build}/gpu"
out=$(cd "${OUT:-$root/.build}/gpu" && pwd)
cd "$root/tests/gpu"
binary=$root/.build/gpu.test
kind=GPU device=0 compile=yes run=yes limit=80 sanitizer=

# The tests in their order: first a short one, then those that measure. Those after a + may have
# more streams than a GPU has queues: they run again at the end with as many as the driver has, 8.
first=Reductions
times='Bandwidths +GraphReplay +AllReduceOfLocalRanks +FirstCollective Staging'
rest='Short +GraphKinds NearFloat64 Suite Processes Handles DeadProcess'

while [ $# -gt 0 ]; do
	case $1 in
	--build) run=no ;;
	--device) device=$2 && shift ;;
	--fake) kind=fake ;;
	--table) first='' rest='' ;;
	--sanitizer) sanitizer=Sanitizer ;;
	--limit) limit=$2 && shift ;;
	--binary) binary=$2 compile=no && shift ;;
	*) sed -n 's/^#   //p' run.sh >&2; exit 2 ;;
	esac
	shift
done
if [ $compile = yes ] && command -v go >/dev/null && command -v cc >/dev/null; then
	CGO_ENABLED=1 go test -c -o "$binary" .
elif [ $compile = yes ] && { [ $run = no ] || [ ! -x "$binary" ]; }; then
	echo "run.sh: the tests cannot be compiled here, for want of go or cc: run 'tests/gpu/run.sh --build'" \
		"where both are, and bring .build/gpu.test here" >&2
	exit 1
fi
[ $run = yes ] || exit 0
if [ ! -x "$binary" ]; then
	echo "run.sh: there are no tests in $binary" >&2
	exit 1
fi
if ! command -v timeout >/dev/null; then
	echo "run.sh: there is no timeout here (coreutils), which ends tests that hang" >&2
	exit 1
fi

began=$(date +%s)
table=$out/table.txt
failed=''
: >"$table"

# check NAME QUEUES SECONDS runs a test. The output goes to a file, not through a pipe, which
# processes that hang would keep open.
check() {
	name=$1-$2
	if [ $(($(date +%s) - began + $3)) -gt 590 ]; then
		failed="$failed
$name: not begun, because there is no time left"
		return 0
	fi
	echo "--- $1, $2 queues" >>"$table"
	code=0
	CUDA_DEVICE_MAX_CONNECTIONS=$2 timeout -k 5 "$3" "$binary" -test.count 1 -test.run "^Test$1\$/^$kind\$" \
		-test.timeout $(($3 * 9 / 10))s -gpu.required -gpu.device "$device" -gpu.table "$table" \
		${sanitizer:+-gpu.sanitizer} >"$out/$name.txt" 2>&1 </dev/null || code=$?
	echo "--- $1, $2 queues: status $code"
	tail -n 60 "$out/$name.txt"
	case $code in
	0) ;;
	124 | 137) failed="$failed
$name: no end within $3 s, see $out/$name.txt" ;;
	*) failed="$failed
$name: failed, see $out/$name.txt" ;;
	esac
}

for test in $first $times $rest; do
	check "${test#+}" 32 "$limit"
done
for test in $times $rest; do
	case $test in +*) check "${test#+}" 8 "$limit" ;; esac
done
[ -z "$sanitizer" ] || check Sanitizer 32 270

echo
cat "$table"
[ -z "$failed" ] || { echo "FAIL$failed"; exit 1; }
