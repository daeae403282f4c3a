package devicetest_test

import (
	"testing"
	"time"

	"go.uber.org/goleak"

	"tutti/device"
	"tutti/device/devicetest"
	"tutti/mem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestHostPassesSuite(t *testing.T) {
	devicetest.Suite(t, func(*testing.T) devicetest.Harness {
		return devicetest.Harness{Device: device.NewHost(), Bytes: mem.Memory.Bytes}
	})
}

func TestLateDevice(t *testing.T) {
	devicetest.Suite(t, func(*testing.T) devicetest.Harness {
		d := devicetest.NewLate("cuda:0", 1, 50*time.Microsecond)
		return devicetest.Harness{Device: d, Bytes: d.Bytes}
	})
}
