#!/bin/sh
# Tests the machine's GPU and prints a table of bandwidths and times last. It fails if a test does,
# or if there is no GPU. It takes less than 10 minutes.
#
#   tests/gpu/run.sh --build          only compiles the tests, to .build/gpu.test
#   tests/gpu/run.sh [--device N]     runs them; without Go, those that were compiled before
#   tests/gpu/run.sh --fake           runs them on the fake of the driver
#   tests/gpu/run.sh --table          runs those that make the table
#   tests/gpu/run.sh --binary PATH    runs tests that were compiled before to another place
set -eu
cd "$(dirname "$0")"
root=$(cd ../.. && pwd)
binary=$root/.build/gpu.test
kind=GPU device=0 compile=yes run=yes
tests='Suite|Reductions|NearFloat64|Short|Processes|Handles|DeadProcess|'
while [ $# -gt 0 ]; do
	case $1 in
	--build) run=no ;;
	--device) device=$2 && shift ;;
	--fake) kind=fake ;;
	--table) tests='' ;;
	--binary) binary=$2 compile=no && shift ;;
	*) sed -n 's/^#   //p' run.sh >&2; exit 2 ;;
	esac
	shift
done
if [ $compile = yes ] && command -v go >/dev/null; then
	go test -c -o "$binary" .
fi
[ $run = yes ] || exit 0
times='Bandwidths|AllReduceOfLocalRanks|GraphKinds|GraphReplay|FirstCollective|Sanitizer|Staging'
exec timeout 570 "$binary" -test.count 1 \
	-test.run "^Test($tests$times)\$/^$kind\$" \
	-test.timeout 9m -gpu.required -gpu.device "$device"
