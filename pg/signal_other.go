//go:build !unix

package pg

import "os"

var dumpSignal os.Signal // there is none
