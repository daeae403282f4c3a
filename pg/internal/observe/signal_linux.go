package observe

import (
	"os"
	"syscall"
)

// dumpSignal makes a rank write a flight record.
var dumpSignal os.Signal = syscall.SIGUSR1
