package devicetest_test

import (
	"testing"
	"time"

	"tutti/device"
	"tutti/device/devicetest"
	"tutti/internal/leaktest"
	"tutti/mem"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

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
