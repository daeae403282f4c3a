//go:build !unix

package observe

import "os"

var dumpSignal os.Signal // there is none
