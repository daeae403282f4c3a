//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"
	"unsafe"

	"tutti/kernels"
	"tutti/tests/internal/command"
	"tutti/tests/internal/stats"
)

// job runs this program as the ranks of a job, and returns what rank 0 measured.
func job(ctx context.Context, o *options, which string, n int) ([]float64, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	out, err := command.Output(ctx, "", []string{rankVariable + "=" + which,
		receivesVariable + "=" + strconv.Itoa(o.receives), sendsVariable + "=" + strconv.Itoa(o.sends)},
		o.tutti, "run", "-n", strconv.Itoa(n), "--no-prefix", "--", self)
	if err != nil {
		return nil, err
	}
	var figures []float64
	if err := json.Unmarshal(out, &figures); err != nil {
		return nil, fmt.Errorf("the ranks printed %q: %w", out, err)
	}
	return figures, nil
}

func start(ctx context.Context, o *options) ([]float64, error) {
	return job(ctx, o, "start", o.ranks)
}

func messages(ctx context.Context, o *options) ([]float64, error) {
	return job(ctx, o, "messages", 2)
}

func loss(ctx context.Context, o *options) ([]float64, error) {
	out, err := command.Output(ctx, "", nil, o.tutti, "bench", "--faults", "-n", strconv.Itoa(o.ranks/2),
		"--rounds", "1", "--json")
	if err != nil {
		return nil, err
	}
	for line := range bytes.Lines(out) {
		var r struct {
			Leader bool       `json:"leader_killed"`
			Next   [2]float64 `json:"next_ms"`
		}
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("tutti bench --faults printed %q: %w", line, err)
		}
		if !r.Leader {
			return []float64{r.Next[0]}, nil
		}
	}
	return nil, fmt.Errorf("tutti bench --faults printed %q", out)
}

func floats(ctx context.Context, o *options) ([]float64, error) {
	const elements = 1 << 20
	took := map[string]float64{}
	for dtype, size := range map[string]int{"float32": 4, "bfloat16": 2, "float16": 2} {
		length := strconv.Itoa(size * elements)
		out, err := command.Output(ctx, "", nil, o.tutti, "bench", "--registered", "--touch", "--dtype", dtype,
			"--min", length, "--max", length, "--rounds", "3", "--no-check", "--json")
		if err != nil {
			return nil, err
		}
		var r struct {
			Time float64 `json:"time_us"`
		}
		if err := json.NewDecoder(bytes.NewReader(out)).Decode(&r); err != nil || !(r.Time > 0) {
			return nil, fmt.Errorf("tutti bench printed %q: %w", out, err)
		}
		took[dtype] = r.Time
	}
	sum, err := sumToCopy()
	return []float64{took["bfloat16"] / took["float32"], took["float16"] / took["float32"], sum}, err
}

// sumToCopy returns the bandwidth of a sum of two sources of bfloat16 in the first-level cache,
// divided by that of a copy that reads and writes as many bytes.
func sumToCopy() (float64, error) {
	const size, samples, batch = 16 << 10, 301, 64
	sum, err := kernels.Lookup(kernels.Sum, kernels.BFloat16)
	if err != nil {
		return 0, err
	}
	memory := func(n int) unsafe.Pointer {
		b := make([]byte, n+64)
		return unsafe.Pointer(&b[-uintptr(unsafe.Pointer(&b[0]))&63])
	}
	dst, srcs := memory(size), []unsafe.Pointer{memory(size), memory(size)}
	const half = 3 * size / 2
	to, from := memory(half), memory(half)
	var ratios []float64
	for range samples {
		t0 := time.Now()
		for range batch {
			sum(dst, srcs, size/2)
		}
		t1 := time.Now()
		for range batch {
			kernels.Copy(to, from, half)
		}
		ratios = append(ratios, float64(time.Since(t1))/float64(t1.Sub(t0)))
	}
	return stats.Median(ratios), nil
}

// median returns the median of the times of calls, in microseconds.
func median(calls int, call func() error) (float64, error) {
	took := make([]time.Duration, calls)
	for i := range took {
		t := time.Now()
		if err := call(); err != nil {
			return 0, err
		}
		took[i] = time.Since(t)
	}
	slices.Sort(took)
	return float64(took[calls/2]) / float64(time.Microsecond), nil
}
