package observe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"tutti/bootstrap"
	"tutti/endpoint/prom"
	"tutti/endpoint/stats"
	"tutti/internal/files"
	"tutti/internal/metrics"
	"tutti/p2p"
	"tutti/pg/flight"
)

// Config describes what an Observer reports, and where.
type Config struct {
	Self      flight.Identity
	Dir       string // of flight records; "": none are kept
	NoSignal  bool   // none is written on a signal
	Metrics   string // address HOST:PORTS at which they are served; "": nowhere
	LocalRank int    // the port of a range to try first
	Proxy     *p2p.Proxy
	// Groups describes the groups. It is called with the proxy's lock.
	Groups func() []Glance
	// Joined reports whether the rank has met the others.
	Joined func() bool
	Alone  bool // the Observers of the process's other jobs are not told of this one, nor it of them
	Logger *slog.Logger
}

// An Observer reports the state of a rank: to status requests, to files, and as metrics. Its
// methods are safe for concurrent use.
type Observer struct {
	cfg     Config
	rec     *flight.Recorder
	dir     string // of dumps; "": none are made
	metrics *metrics.Exporter

	dumping  sync.Mutex
	failures int           // for which a dump was made
	last     time.Time     // when the last one was
	files    flight.Kept   // of them
	pause    time.Duration // failurePause
	signals  chan os.Signal
	done     chan struct{} // closed by Stop
	mu       sync.Mutex    // of ended
	ended    bool
	wg       sync.WaitGroup
}

const (
	maxFailures  = flight.MaxKept         // of which an incarnation of a rank keeps files
	failurePause = 10 * time.Second       // between two dumps of later failures
	dumpAwait    = 200 * time.Millisecond // how long a failing operation waits for its dump
)

// Reasons of a dump.
const (
	onFailure = "failure"
	onTimeout = "timeout"
	onSignal  = "signal"
)

// ErrStopped says that an Observer has been stopped.
var ErrStopped = errors.New("the observer has been stopped")

// Start starts the flight recorder, and reports until Stop. A directory that cannot be used is a
// warning; metrics that cannot be served are an error.
func Start(cfg Config) (*Observer, error) {
	o := &Observer{cfg: cfg, dir: cfg.Dir, pause: failurePause, done: make(chan struct{})}
	var err error
	if o.dir != "" {
		if err = files.Directory(o.dir); err == nil {
			o.rec, err = flight.Open(o.dir, cfg.Self)
		}
		switch {
		case errors.Is(err, flight.ErrCopies):
			cfg.Logger.Warn("this rank leaves no flight record if it is killed: give a directory of another file "+
				"system", "dir", o.dir, "err", err)
		case err != nil:
			cfg.Logger.Warn("no flight records are kept", "dir", o.dir, "err", err)
			o.dir = ""
		}
	}
	if o.rec == nil {
		if o.rec, err = flight.Open("", cfg.Self); err != nil {
			return nil, err
		}
	}
	if cfg.Metrics != "" {
		o.metrics, err = metrics.Serve(cfg.Metrics, cfg.LocalRank, o.collector(), prom.Endpoints())
		if err != nil {
			o.rec.Close(false)
			return nil, fmt.Errorf("metrics at %s: %w", cfg.Metrics, err)
		}
		cfg.Logger.Info("metrics are served", "url", "http://"+o.metrics.Addr()+"/metrics")
	}
	if o.dir != "" && dumpSignal != nil && !cfg.NoSignal {
		o.signals = make(chan os.Signal, 1)
		signal.Notify(o.signals, dumpSignal)
		o.aside(func() {
			for {
				select {
				case <-o.signals:
					o.dump(onSignal)
				case <-o.done:
					return
				}
			}
		})
	}
	o.enlist()
	return o, nil
}

// Stop stops what Start has started, in bounded time. Idempotent.
func (o *Observer) Stop() {
	o.mu.Lock()
	again := o.ended
	o.ended = true
	o.mu.Unlock()
	if again {
		return
	}
	if o.signals != nil {
		signal.Stop(o.signals)
	}
	o.leave()
	close(o.done)
	if o.metrics != nil {
		o.metrics.Close()
	}
	o.wg.Wait()
	if err := o.rec.Close(false); err != nil {
		o.cfg.Logger.Warn("the flight recorder's file could not be removed", "err", err)
	}
}

// Recorder returns the rank's flight recorder.
func (o *Observer) Recorder() *flight.Recorder { return o.rec }

// aside runs f on a goroutine that Stop waits for. It returns false after Stop.
func (o *Observer) aside(f func()) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if !o.ended {
		o.wg.Go(f)
	}
	return !o.ended
}

// FailureLocked writes a snapshot of a failed operation to a file, unless the failure was requested
// (a cancellation, an Abort). The snapshot is written on a goroutine. If wait is set, as for
// failures after which a program is likely to exit, the caller waits for it for at most dumpAwait.
// The proxy's lock is released meanwhile.
func (o *Observer) FailureLocked(why flight.Outcome, wait bool) {
	if o.dir == "" || why == flight.Cancelled || why == flight.Aborted || why == flight.Closed {
		return
	}
	reason := onFailure
	if why == flight.TimedOut {
		reason = onTimeout
	}
	written := make(chan struct{})
	if !o.aside(func() {
		defer close(written)
		o.dump(reason)
	}) || !wait {
		return
	}
	o.cfg.Proxy.Unlock()
	late := time.NewTimer(dumpAwait)
	select {
	case <-written:
	case <-late.C:
	}
	late.Stop()
	o.cfg.Proxy.Lock()
}

// dump writes a snapshot with all records into the directory, under an unused name. After
// maxFailures, a failure replaces the oldest one's file, at most once in failurePause: a program
// may poll with deadlines.
func (o *Observer) dump(reason string) {
	o.dumping.Lock()
	defer o.dumping.Unlock()
	if reason != onSignal {
		if o.failures >= maxFailures && time.Since(o.last) < o.pause {
			return
		}
		o.failures++
		o.last = time.Now()
	}
	s := o.snapshot(flight.Records, reason)
	s.Others = o.others()
	path, err := s.Write(filepath.Join(o.dir, fmt.Sprintf("flight-rank%d-%s", o.cfg.Self.Rank, reason)))
	if err != nil {
		o.cfg.Logger.Warn("a flight record could not be written", "err", err)
		return
	}
	o.cfg.Logger.Info("flight record", "file", path)
	if reason != onSignal {
		o.files.Add(path)
	}
}

// Blank returns the snapshot of a rank without groups.
func Blank(id flight.Identity) *flight.Snapshot {
	now := time.Now().Round(time.Millisecond).UTC()
	return &flight.Snapshot{Version: flight.Version, Job: id.Job, Rank: id.Rank, Size: id.Size,
		Incarnation: fmt.Sprintf("%016x", id.Incarnation), PID: os.Getpid(), Host: id.Host,
		Time: now, Since: now, Groups: []flight.Group{}}
}

// Status answers a status request, with at most ops of the operations that have ended, as JSON. It
// returns when ctx ends, even if the proxy's lock is not available. After Stop it returns
// ErrStopped.
func (o *Observer) Status(ctx context.Context, ops int) ([]byte, error) {
	type answer struct {
		text []byte
		err  error
	}
	got := make(chan answer, 1)
	if !o.aside(func() { // it returns after it had the lock, which Close needs too
		s := o.snapshot(ops, "")
		s.Others = o.others()
		text, err := s.JSON(false)
		if err == nil && len(text) > bootstrap.MaxStatusText/4 { // the rank's own state must fit
			for i, other := range s.Others {
				s.Others[i] = flight.Other{Job: other.Job, Rank: other.Rank, Silent: true}
			}
			text, err = s.JSON(false)
		}
		got <- answer{text, err}
	}) {
		return nil, ErrStopped
	}
	select {
	case a := <-got:
		return a.text, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// snapshot describes the rank in its own job, with at most ops of the operations that have ended.
// It briefly takes the proxy's lock.
func (o *Observer) snapshot(ops int, reason string) *flight.Snapshot {
	p := o.cfg.Proxy
	p.Lock()
	im := o.rec.Copy(ops)
	counts := p.Counts()
	seen := o.cfg.Groups()
	p.Unlock()

	slices.SortFunc(seen, func(a, b Glance) int { return int(a.id) - int(b.id) })
	s := Blank(o.cfg.Self)
	s.Reason, s.Joined = reason, len(seen) > 0 && o.cfg.Joined()
	if o.metrics != nil {
		s.Metrics = o.metrics.Addr()
	}
	im.Fill(s)
	for i := range seen {
		v := &seen[i]
		if i == 0 { // the group of all ranks, unless it is closed
			s.View = flight.View{Epoch: v.Epoch, Active: v.toRanks(v.Active)}
			if v.id == 1 {
				s.Size = max(s.Size, len(v.Ranks))
			}
		}
		s.Groups = append(s.Groups, v.describe(s.Time))
	}
	for _, c := range counts {
		l := flight.Link{Rank: c.Rank, Up: c.Up, Transport: c.Transport, BytesSent: c.BytesSent,
			BytesReceived: c.BytesReceived, FramesSent: c.FramesSent,
			FramesReceived: c.FramesReceived, Puts: c.Puts, BytesPut: c.BytesPut, Gets: c.Gets, BytesGot: c.BytesGot,
			Waited: c.Waited.Seconds()}
		if c.Err != nil {
			l.Error = c.Err.Error()
		}
		s.Links = append(s.Links, l)
	}
	s.Endpoints = stats.All()
	return s
}
