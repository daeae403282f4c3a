// Command report runs `go test` with -json and prints a summary: a line for each package, the
// output of tests that failed, and at the end the names of tests that were skipped or failed, each
// with a reason, and totals.
//
//	go run ./tests/report -- go test -count=1 ./...
//
// With CI=true in the environment a skipped test fails the run, unless needsDevice names it.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
)

// needsDevice names the tests that may be skipped without a device, each by the path of its
// package, a space, and its whole name. Those of RDMA devices are run by `make test-rdma`, in a
// virtual machine where none of them is skipped, those of GPUs by tests/gpu/run.sh.
var needsDevice = map[string]bool{
	"tutti/cmd/tutti TestDeviceTransport":                                true,
	"tutti/cmd/tutti/internal/pair TestDeviceRDMA":                       true,
	"tutti/endpoint TestDeviceRDMA":                                      true,
	"tutti/endpoint TestDeviceTwoProcesses":                              true,
	"tutti/p2p/verbs TestDeviceConformance":                              true,
	"tutti/p2p/verbs TestDeviceData":                                     true,
	"tutti/p2p/verbs TestDeviceDataReturns":                              true,
	"tutti/p2p/verbs TestDeviceKilledPeer":                               true,
	"tutti/p2p/verbs TestDeviceKilledPeers":                              true,
	"tutti/p2p/verbs TestDeviceKilledPutter":                             true,
	"tutti/p2p/verbs TestDeviceLinkDownAndUp":                            true,
	"tutti/p2p/verbs TestDevicePrograms":                                 true,
	"tutti/p2p/verbs TestDeviceRails":                                    true,
	"tutti/p2p/verbs TestDeviceReturns":                                  true,
	"tutti/rdma/endpoint TestDeviceFailedQueuePairsAreReplacedUnderLoad": true,
	"tutti/rdma/endpoint TestDeviceKilledProcesses":                      true,
	"tutti/rdma/endpoint TestDeviceLinkDownAndUp":                        true,
	"tutti/rdma/endpoint TestDeviceRemovedUnderLoad":                     true,
	"tutti/rdma/endpoint TestDeviceRestarts":                             true,
	"tutti/rdma/endpoint TestDeviceSimultaneousOpens":                    true,
	"tutti/rdma/endpoint TestDeviceVanishedQueuePairs":                   true,
	"tutti/rdma/queue TestDeviceBatches":                                 true,
	"tutti/rdma/queue TestDeviceCallsPerMessage":                         true,
	"tutti/rdma/queue TestDeviceFailureAndReset":                         true,
	"tutti/rdma/queue TestDeviceReplacesWhatCannotBeReset":               true,
	"tutti/rdma/verbs TestDeviceAddressesAreThoseOfSysfs":                true,
	"tutti/rdma/verbs TestDeviceCallsPerMessage":                         true,
	"tutti/rdma/verbs TestDeviceFilesOfCompletionQueues":                 true,
	"tutti/rdma/verbs TestDeviceHoldsNoThreads":                          true,
	"tutti/rdma/verbs TestDeviceNeedsNoForkInit":                         true,
	"tutti/rdma/verbs TestDeviceRefusesMemory":                           true,
	"tutti/rdma/verbs TestDeviceRegistrationsAndFork":                    true,
	"tutti/rdma/verbs TestDeviceReportsChangedAddresses":                 true,
	"tutti/rdma/verbs TestDeviceSuite":                                   true,
	"tutti/rdma/verbs TestDeviceTrafficAllocatesNothing":                 true,
	"tutti/rdma/verbs TestDeviceTwoProcesses":                            true,
	"tutti/rdma/verbs TestDeviceWithoutReset":                            true,
	"tutti/tests/gpu TestAllReduceOfLocalRanks/GPU":                      true,
	"tutti/tests/gpu TestBandwidths/GPU":                                 true,
	"tutti/tests/gpu TestDeadProcess/GPU":                                true,
	"tutti/tests/gpu TestFirstCollective/GPU":                            true,
	"tutti/tests/gpu TestGraphKinds/GPU":                                 true,
	"tutti/tests/gpu TestGraphReplay/GPU":                                true,
	"tutti/tests/gpu TestHandles/GPU":                                    true,
	"tutti/tests/gpu TestNearFloat64/GPU":                                true,
	"tutti/tests/gpu TestProcesses/GPU":                                  true,
	"tutti/tests/gpu TestReductions/GPU":                                 true,
	"tutti/tests/gpu TestSanitizer/GPU":                                  true,
	"tutti/tests/gpu TestSanitizer/fake":                                 true,
	"tutti/tests/gpu TestShort/GPU":                                      true,
	"tutti/tests/gpu TestStaging/GPU":                                    true,
	"tutti/tests/gpu TestSuite/GPU":                                      true,
}

type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

type key struct{ pkg, test string }

// summary collects the events of one run.
type summary struct {
	out                     io.Writer
	text                    map[key]*strings.Builder
	skips, fails            []string
	passed, failed, skipped int
	mayskip                 map[string]bool // as needsDevice
	silent                  int             // skipped, but not in mayskip
}

func (s *summary) add(e event) {
	k := key{e.Package, e.Test}
	switch e.Action {
	case "output":
		if s.text[k] == nil {
			s.text[k] = &strings.Builder{}
		}
		s.text[k].WriteString(e.Output)
		return
	case "build-output":
		io.WriteString(s.out, e.Output)
		return
	case "pass", "fail", "skip":
	default:
		return
	}
	text := ""
	if b := s.text[k]; b != nil {
		text = b.String()
		delete(s.text, k)
	}
	if e.Test == "" { // the package
		switch {
		case e.Action == "skip" || strings.Contains(text, "[no test files]"):
		case e.Action == "fail":
			fmt.Fprintf(s.out, "FAIL  %s\n%s", e.Package, text)
			s.fails = append(s.fails, fmt.Sprintf("FAIL  %s: %.300s", e.Package, messages(text)[0]))
			s.unfinished(e.Package)
		default:
			fmt.Fprintf(s.out, "ok    %-32s %6.1fs\n", e.Package, e.Elapsed)
		}
		return
	}
	switch e.Action {
	case "pass":
		s.passed++
	case "fail":
		s.failed++
		fmt.Fprintf(s.out, "----- %s %s\n%s", e.Package, e.Test, text)
		s.fails = append(s.fails, fmt.Sprintf("FAIL  %s %s: %.300s", e.Package, e.Test, messages(text)[0]))
	case "skip":
		s.skipped++
		all := messages(text)
		last := all[len(all)-1]
		if !s.mayskip[e.Package+" "+e.Test] {
			s.silent++
		}
		s.skips = append(s.skips, fmt.Sprintf("skip  %s %s: %s", e.Package, e.Test, last))
	}
}

// unfinished prints the output of the tests that were running when the package's program ended.
func (s *summary) unfinished(pkg string) {
	var tests []string
	for k := range s.text {
		if k.pkg == pkg && k.test != "" {
			tests = append(tests, k.test)
		}
	}
	slices.Sort(tests)
	for _, test := range tests {
		fmt.Fprintf(s.out, "----- %s %s, which has not ended\n%s", pkg, test, s.text[key{pkg, test}])
		delete(s.text, key{pkg, test})
	}
}

// messages returns what a test, or a package's program, has printed: a line at least.
func messages(text string) []string {
	var lines []string
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "---") &&
			!strings.HasPrefix(line, "===") {
			lines = append(lines, line)
		}
	}
	if lines == nil {
		return []string{"no reason given"}
	}
	return lines
}

// finish prints the totals and returns the exit code.
func (s *summary) finish(ci bool, code int) int {
	for _, line := range s.skips {
		fmt.Fprintln(s.out, line)
	}
	for _, line := range s.fails {
		fmt.Fprintln(s.out, line)
	}
	fmt.Fprintf(s.out, "%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped)
	if ci && s.silent > 0 {
		fmt.Fprintf(s.out, "%d tests were skipped that may not be: see above\n", s.silent)
		code = max(code, 1)
	}
	if code == 0 && s.failed > 0 {
		code = 1
	}
	return code
}

func main() {
	args := os.Args[1:]
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) < 2 {
		fmt.Fprintln(os.Stderr, "report: want a go test command")
		os.Exit(2)
	}
	args = append([]string{args[0], args[1], "-json"}, args[2:]...)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stderr = os.Stderr
	pipe, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(2)
	}
	s := &summary{out: os.Stdout, mayskip: needsDevice, text: map[key]*strings.Builder{}}
	lines := bufio.NewReader(pipe)
	for {
		line, err := lines.ReadBytes('\n')
		var e event
		if json.Unmarshal(line, &e) == nil && e.Action != "" {
			s.add(e)
		} else {
			os.Stdout.Write(line)
		}
		if err != nil {
			break
		}
	}
	code := 0
	if cmd.Wait() != nil {
		code = 1
	}
	os.Exit(s.finish(os.Getenv("CI") == "true", code))
}
