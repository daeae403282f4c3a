package pg

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
	"unsafe"

	"tutti/collectives"
	"tutti/device"
	"tutti/mem"
	"tutti/pg/internal/exec"
)

// A lazy visit whose device is a device.Sharer begins as a direct one: it has no staging buffer,
// and the operation's buffers are the device's. The ranks decide in the operation whether their
// streams load from each other's devices (exec.Direct). If they do not, the visit gets a staging
// buffer, and the source is copied: see visit.stage.
//
// A started operation on a stream of the caller is a lazy visit, too, if the device is a
// device.Reserver: the stream gets places for the operation's work at once, and the work when the
// operation has the turn.

// direct is what a visit has until it is staged.
type direct struct {
	stay    stay
	device  device.Sharer
	come    device.Event // the stream has come to the operation
	number  byte         // of the device
	room    int          // the most ranks of a view for whose plan the stream has places
	pointer func(unsafe.Pointer) unsafe.Pointer
}

// stagedPlaces is how many places a visit takes at most when it is staged: for a copy of the
// destination, which it may have to keep in part, one of the source, and one of the result.
const stagedPlaces = 3

// directly reports whether c may be a direct visit. With the proxy's lock.
func (g *Group) directly(c *exec.Call, d device.Device) bool {
	_, shares := d.(device.Sharer)
	return shares && g.job.settings.PeerDevices != "off" && g.v.Asks && len(g.v.Active) > 1 &&
		c.Bytes(g.v.Size) >= collectives.LoadStoreMin(c.Kind)
}

// places returns what a stream of the caller reserves for c, a direct visit. It reports false if
// the visit should copy from the beginning instead, in pieces. With the proxy's lock.
func (g *Group) places(c *exec.Call, d device.Device) (p device.Places, spare int, ok bool) {
	n := len(g.v.Active)
	if r, able := d.(device.Reserver); !able || !r.Reserves() || n > device.MaxPlaceSources || g.run.Refuses() {
		return p, 0, false
	}
	// A plan that loads has a reduction, and then a copy from each rank at most. The stream waits
	// in a last place until the operation has ended: then no peer loads from its buffers any more.
	copies := (n + device.MaxPlaceCopies - 1) / device.MaxPlaceCopies
	p = device.Places{N: max(1+copies+1, stagedPlaces), Bytes: c.Bytes(g.v.Size)}
	if c.Kind.Reduces() {
		p.Op, p.DType = c.Op, c.DType
	}
	if g.job.settings.OnFailure == Retry || g.job.settings.Uniform || c.Uniform { // it may run again
		p.N, spare = p.N+stagedPlaces, stagedPlaces
	}
	return p, spare, true
}

// shared reports whether the memory of o can be shared at all.
func (o *stay) shared() bool {
	d := o.device.(device.Sharer)
	for _, s := range []span{o.src, o.dst} {
		if s.n == 0 {
			continue
		}
		if _, _, err := d.Share(s.at(o.device.Location())); err != nil {
			return false
		}
	}
	return true
}

// directLocked returns what a direct visit has.
func (x *devices) directLocked(o *stay) (*direct, error) {
	number := byte(0)
	for i, d := range x.direct {
		if d == o.device {
			number = byte(i + 1)
		}
	}
	if number == 0 && len(x.direct) < 255 {
		x.direct = append(x.direct, o.device)
		number = byte(len(x.direct))
	}
	shares, ok := o.device.(device.Sharer)
	if !ok || number == 0 {
		return nil, o.failure(errors.ErrUnsupported)
	}
	return &direct{stay: *o, device: shares, number: number, room: math.MaxInt}, nil
}

// approach begins a direct visit: the operation may begin when the stream has done what it had.
func (v *visit) approach() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if o := &v.direct.stay; o.places.N > 0 {
		s, err := o.device.(device.Reserver).Reserve(o.stream, o.places)
		if err != nil {
			return o.failure(err)
		}
		v.stream, v.reserved, v.lazy = s, true, true
		v.direct.room = (o.places.N - o.spare - 2) * device.MaxPlaceCopies
	}
	v.give(v.record)
	if v.err != nil {
		if v.reserved {
			v.stream.Close()
		}
		return v.direct.stay.failure(v.err)
	}
	v.direct.come = v.event
	return nil
}

// stage makes a direct visit one that copies. Without the proxy's lock. Later operations may have
// all staging buffers, and wait for this one.
func (x *devices) stage(v *visit) error {
	if err := x.board(v, &v.direct.stay, true); err != nil {
		return err
	}
	o := &v.direct.stay
	src, dst := o.src, o.dst
	from, to := pointer(v.from), pointer(v.to)
	v.direct.pointer = func(p unsafe.Pointer) unsafe.Pointer {
		switch at := uintptr(p); {
		case src.n > 0 && at >= src.addr && at-src.addr < uintptr(src.n):
			return unsafe.Add(from, at-src.addr)
		case dst.n > 0 && at >= dst.addr && at-dst.addr < uintptr(dst.n):
			return unsafe.Add(to, at-dst.addr)
		}
		return nil
	}
	v.staged = true
	return nil
}

// apart reports whether the visit has no staging buffer, or not yet.
func (v *visit) apart() bool {
	return v.launch != nil || v.unfit != nil || v.direct != nil && !v.staged
}

// The feed of a direct visit is an exec.Direct.

func (f *feed) OnDevice() bool { return f.v.apart() }

func (f *feed) Device() byte { return f.v.direct.number }

func (f *feed) Share(ptr unsafe.Pointer, n int) (key []byte, offset uint64, err error) {
	at := uint64(uintptr(ptr))
	return f.v.direct.device.Share(mem.Device(at, n, f.v.direct.stay.device.Location()))
}

func (f *feed) Import(slot int, key []byte) (device.Shared, error) {
	j := f.g.job
	owner := j.places[f.g.v.ranks[slot]].Incarnation
	j.proxy.Leave()
	defer j.proxy.Return()
	d := f.v.direct.device
	s, err := j.imports(d, owner, key)
	if err != nil {
		return nil, err
	}
	return &loaded{s, d}, nil
}

func (f *feed) Lasts(key []byte) bool { return f.v.direct.device.Lasts(key) }

func (f *feed) Room() int { return f.v.direct.room }

func (f *feed) Give(work func(s device.Stream, loc mem.Location) error) error {
	v := f.v
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.reserved { // another run of the operation is staged
		v.direct.room = 0
	}
	loc := v.direct.stay.device.Location()
	v.give(func(s device.Stream) error { return work(s, loc) })
	return f.broken(v.err)
}

// broken returns the error of an operation whose stream has failed.
func (f *feed) broken(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("its stream has failed: %w", err)
}

// Settle waits as exec.Direct says. The stream waits for no peer, so that it needs only its own
// time.
func (f *feed) Settle(last bool) error {
	g, v := f.g, f.v
	v.mu.Lock()
	v.give(v.record)
	e, err := v.event, v.err
	v.mu.Unlock()
	if err != nil {
		if last {
			g.job.doubt(v.direct.device, v.taken())
		}
		return f.broken(err)
	}
	until := time.Now().Add(grace)
	err = g.holdLocked(func() (bool, error) {
		switch {
		case e.Done():
			return true, nil
		case !last:
			g.job.proxy.Look() // a peer may have failed the operation
			return false, g.stopped()
		case time.Now().After(until):
			return false, context.DeadlineExceeded
		}
		return false, nil
	})
	if err == nil {
		err = f.broken(e.Wait(context.Background()))
	}
	if err != nil && last {
		if e.Done() { // it does not tell
			e = v.taken()
		}
		g.job.doubt(v.direct.device, e)
	}
	return err
}

// taken returns the event of a stream that has refused something, when it has done what it has
// taken.
func (v *visit) taken() device.Event {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.own != nil {
		v.own.Lock()
		defer v.own.Unlock()
	}
	e, err := v.stream.Record()
	switch {
	case err == nil:
		return e
	case v.own != nil:
		return closing{v.own}
	}
	return unknown{err}
}

// A closing is the event that a stream of the group was closed, with which all its work has ended.
type closing struct{ s *ownStream }

func (c closing) Done() bool {
	select {
	case <-c.s.over:
		return true
	default:
		return false
	}
}

func (c closing) Wait(ctx context.Context) error {
	select {
	case <-c.s.over:
		return c.s.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (f *feed) Stage() error {
	f.g.job.proxy.Leave()
	defer f.g.job.proxy.Return()
	return f.g.devices.stage(f.v)
}

func (f *feed) Host(ptr unsafe.Pointer) unsafe.Pointer { return f.v.direct.pointer(ptr) }

// imports maps an allocation of another rank. Without the proxy's lock.
func (j *job) imports(d device.Sharer, owner uint64, key []byte) (device.Shared, error) {
	j.mu.Lock()
	if j.imported == nil {
		j.imported = map[importer]struct{}{}
	}
	j.imported[importer{d, owner}] = struct{}{}
	j.mu.Unlock()
	return d.Import(owner, key)
}

// An importer is a device that has mapped memory of a rank's incarnation.
type importer struct {
	device device.Sharer
	owner  uint64
}

// forget has devices forget the memory of all incarnations that are gone. It does not wait: a
// device may be mapping memory.
func (j *job) forget(gone func(incarnation uint64) bool) {
	j.mu.Lock()
	var all []importer
	for i := range j.imported {
		if gone(i.owner) {
			all = append(all, i)
			delete(j.imported, i)
		}
	}
	j.mu.Unlock()
	if len(all) > 0 {
		j.unmapping.Go(func() {
			for _, i := range all {
				i.device.Forget(i.owner)
			}
		})
	}
}

// A loaded is memory of another rank that streams of a device load from.
type loaded struct {
	device.Shared
	device device.Sharer
}

// A doubt is that a stream of a device may use other ranks' memory until it has reached an event.
type doubt struct {
	device device.Sharer
	until  device.Event
}

// An unknown is the event of a stream of the caller that has failed, and does not tell when its
// work ends.
type unknown struct{ why error }

func (unknown) Done() bool { return false }

func (u unknown) Wait(context.Context) error {
	return fmt.Errorf("a stream that may use it has failed: %v", u.why) // is not ErrClosed: see drop
}

// doubt says that a stream of d may use other ranks' memory until it has reached an event.
func (j *job) doubt(d device.Sharer, e device.Event) {
	j.mu.Lock()
	defer j.mu.Unlock()
	over := func(o doubt) bool { return o.until.Done() && quiet(j.retiring, o.until) == nil }
	j.doubtful = append(slices.DeleteFunc(j.doubtful, over), doubt{d, e})
}

// quiet waits until the stream of an event has done what is before it. Nothing of a stream that was
// closed goes on.
func quiet(ctx context.Context, e device.Event) error {
	if err := e.Wait(ctx); !errors.Is(err, device.ErrClosed) {
		return err
	}
	return nil
}

// drop ends uses of other ranks' memory, each a *loaded: see exec.Config.Drop. It does not wait: a
// stream of the device may have to do work of operations that were given up before, and a driver
// may wait for the work on the device.
func (j *job) drop(shared []device.Shared, gone bool) {
	j.mu.Lock()
	before := slices.Clone(j.doubtful)
	j.mu.Unlock()
	j.unmapping.Go(func() {
		failed := map[device.Sharer]bool{}
		for _, o := range before {
			uses := func(s device.Shared) bool { return s.(*loaded).device == o.device }
			if failed[o.device] || !slices.ContainsFunc(shared, uses) {
				continue
			}
			if err := quiet(j.retiring, o.until); err != nil {
				j.log.Warn("memory of another rank's device stays mapped until the device is closed", "err", err)
				failed[o.device] = true
			}
		}
		kept := func(s device.Shared) bool { return failed[s.(*loaded).device] }
		j.unmap(slices.DeleteFunc(slices.Clone(shared), kept), gone)
	})
}

// unmap ends uses of other ranks' memory that no work has any more. It may wait.
func (j *job) unmap(shared []device.Shared, gone bool) {
	for _, s := range shared {
		if err := s.Release(gone); err != nil {
			j.log.Warn("memory of another rank's device stays mapped", "err", err)
		}
	}
}

// unmapAll waits until all use of other ranks' memory has ended, as long as for a stream. No
// exchange waits for its work then.
func (j *job) unmapAll() {
	j.forget(func(uint64) bool { return true })
	done := make(chan struct{})
	go func() {
		j.unmapping.Wait()
		close(done)
	}()
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
	j.unretire()
}

// forgetGone is forget for the incarnations that are not in the group's view. With the proxy's
// lock.
func (g *Group) forgetGone() {
	slots := g.v.job.Slots
	if len(slots) == 0 {
		return
	}
	here := map[uint64]bool{}
	for _, s := range slots {
		here[s.Incarnation] = true
	}
	g.job.forget(func(incarnation uint64) bool { return !here[incarnation] })
}

// loads describes how the group's latest operations got at the memory of devices, "" if none has
// asked, and why short ones do not although its ranks should. With the proxy's lock.
func (g *Group) loads() string {
	var all []string
	switch path, err := g.run.Direct(); {
	case path != "":
		all = append(all, "memory of GPUs loaded in place ("+path+")")
	case err != nil:
		all = append(all, "memory of GPUs copied through the host: "+err.Error())
	}
	if why := g.packets.refused; why != nil && !errors.Is(why, errNoExchange) {
		all = append(all, "short vectors through the hosts: "+why.Error())
	}
	return strings.Join(all, "; ")
}

// say publishes what loads describes. With the proxy's lock.
func (g *Group) say() {
	now := g.loads()
	if was := g.devices.says.Load(); was == nil && now != "" || was != nil && *was != now {
		g.devices.says.Store(&now)
		g.job.log.Info(now, "group", g.id())
	}
}
