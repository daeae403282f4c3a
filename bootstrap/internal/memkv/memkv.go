// Package memkv serves the part of etcd's API that package bootstrap's stores use, from memory:
// keys with revisions, transactions, leases and watches. Rank 0 of a job serves it if no store is
// configured, so that programs do not link etcd's server. Unsupported requests fail with code
// Unimplemented.
//
// The data ends with the process.
package memkv

import (
	"bytes"
	"context"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	maxBytes      = 64 << 20 // of all keys and values
	maxLog        = 4096     // events that a watch can begin with
	maxLogBytes   = 8 << 20  // of their keys and values
	maxQueue      = 1 << 16  // events waiting in a stream of watches
	maxQueueBytes = 64 << 20 // of their keys and values
	maxTTL        = 9e9      // seconds, as in etcd
	oneMember     = 1        // the number of the cluster, and of its member
)

// Server holds the data and implements the services. Use New.
type Server struct {
	pb.UnimplementedKVServer
	pb.UnimplementedLeaseServer
	pb.UnimplementedWatchServer

	mu        sync.Mutex
	revision  int64
	keys      map[string]*mvccpb.KeyValue // never changed in place
	bytes     int
	leases    map[int64]*lease
	log       []*mvccpb.Event // the latest events: up to twice maxLog and maxLogBytes
	logBytes  int             // of their keys and values
	compacted int64           // revision of the last event that is no longer in log
	watches   map[*watch]struct{}
	closed    bool
}

type lease struct {
	id, ttl int64
	end     *time.Timer
	keys    map[string]bool
}

// New returns an empty store.
func New() *Server {
	return &Server{revision: 1, keys: map[string]*mvccpb.KeyValue{}, leases: map[int64]*lease{},
		watches: map[*watch]struct{}{}}
}

// Register makes g serve the store.
func (s *Server) Register(g *grpc.Server) {
	pb.RegisterKVServer(g, s)
	pb.RegisterLeaseServer(g, s)
	pb.RegisterWatchServer(g, s)
}

// Close stops the timers of the leases. The gRPC server must be stopped before.
func (s *Server) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, l := range s.leases {
		l.end.Stop()
	}
}

func (s *Server) headerLocked() *pb.ResponseHeader {
	return &pb.ResponseHeader{ClusterId: oneMember, MemberId: oneMember, Revision: s.revision, RaftTerm: 1}
}

// within reports whether key is in the range from..end: from alone if end is empty, all keys from
// there on if end is one zero byte.
func within(key, from, end []byte) bool {
	switch {
	case len(end) == 0:
		return bytes.Equal(key, from)
	case len(end) == 1 && end[0] == 0:
		return bytes.Compare(key, from) >= 0
	}
	return bytes.Compare(key, from) >= 0 && bytes.Compare(key, end) < 0
}

// selectLocked returns the pairs of a range, by key.
func (s *Server) selectLocked(from, end []byte) (all []*mvccpb.KeyValue) {
	if len(end) == 0 {
		if kv := s.keys[string(from)]; kv != nil {
			all = append(all, kv)
		}
		return all
	}
	for _, kv := range s.keys {
		if within(kv.Key, from, end) {
			all = append(all, kv)
		}
	}
	slices.SortFunc(all, func(a, b *mvccpb.KeyValue) int { return bytes.Compare(a.Key, b.Key) })
	return all
}

func unknown(what string) error {
	return status.Errorf(codes.Unimplemented, "this store does not know %s", what)
}

func checkRange(r *pb.RangeRequest) error {
	switch {
	case len(r.Key) == 0:
		return rpctypes.ErrGRPCEmptyKey
	case r.Revision != 0 || r.Limit != 0 || r.SortOrder != pb.RangeRequest_NONE || r.KeysOnly || r.CountOnly ||
		r.MinModRevision|r.MaxModRevision|r.MinCreateRevision|r.MaxCreateRevision != 0:
		return unknown("ranges with options")
	}
	return nil
}

func checkPut(r *pb.PutRequest) error {
	switch {
	case len(r.Key) == 0:
		return rpctypes.ErrGRPCEmptyKey
	case r.PrevKv || r.IgnoreValue || r.IgnoreLease:
		return unknown("puts with options")
	}
	return nil
}

func checkDelete(r *pb.DeleteRangeRequest) error {
	switch {
	case len(r.Key) == 0:
		return rpctypes.ErrGRPCEmptyKey
	case r.PrevKv:
		return unknown("deletes with options")
	}
	return nil
}

// change is a write in progress: all of it gets one revision.
type change struct {
	s      *Server
	events []*mvccpb.Event
}

func (c *change) revision() int64 { return c.s.revision + 1 }

func (c *change) put(key, value []byte, id int64) error {
	s := c.s
	kv := &mvccpb.KeyValue{Key: key, Value: value, Lease: id, CreateRevision: c.revision(), ModRevision: c.revision(),
		Version: 1}
	old := s.keys[string(key)]
	size := s.bytes + len(key) + len(value)
	if old != nil {
		kv.CreateRevision, kv.Version = old.CreateRevision, old.Version+1
		size -= len(old.Key) + len(old.Value)
	}
	switch {
	case id != 0 && s.leases[id] == nil:
		return rpctypes.ErrGRPCLeaseNotFound
	case size > maxBytes:
		return rpctypes.ErrGRPCNoSpace
	}
	if old != nil && old.Lease != 0 {
		delete(s.leases[old.Lease].keys, string(key))
	}
	if id != 0 {
		s.leases[id].keys[string(key)] = true
	}
	s.keys[string(key)], s.bytes = kv, size
	c.events = append(c.events, &mvccpb.Event{Type: mvccpb.PUT, Kv: kv})
	return nil
}

func (c *change) remove(kv *mvccpb.KeyValue) {
	s := c.s
	if kv.Lease != 0 {
		delete(s.leases[kv.Lease].keys, string(kv.Key))
	}
	delete(s.keys, string(kv.Key))
	s.bytes -= len(kv.Key) + len(kv.Value)
	c.events = append(c.events, &mvccpb.Event{Type: mvccpb.DELETE,
		Kv: &mvccpb.KeyValue{Key: kv.Key, ModRevision: c.revision()}})
}

// commit notifies the watches. It is called even if the change failed, for the part that it did.
func (c *change) commit() {
	s := c.s
	if len(c.events) == 0 {
		return
	}
	s.revision++
	s.log = append(s.log, c.events...)
	s.logBytes += weight(c.events)
	for w := range s.watches {
		w.offerLocked(c.events, s.revision)
	}
	if len(s.log) > 2*maxLog || s.logBytes > 2*maxLogBytes {
		drop := 0
		for len(s.log)-drop > maxLog || s.logBytes > maxLogBytes {
			s.logBytes -= weight(s.log[drop : drop+1])
			drop++
		}
		s.compacted = s.log[drop-1].Kv.ModRevision
		s.log = slices.Clone(s.log[drop:])
	}
}

// weight returns the number of bytes of the events' keys and values.
func weight(events []*mvccpb.Event) (n int) {
	for _, e := range events {
		n += len(e.Kv.Key) + len(e.Kv.Value)
	}
	return n
}

// Range implements etcd's KV.
func (s *Server) Range(_ context.Context, r *pb.RangeRequest) (*pb.RangeResponse, error) {
	if err := checkRange(r); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rangeLocked(r), nil
}

func (s *Server) rangeLocked(r *pb.RangeRequest) *pb.RangeResponse {
	kvs := s.selectLocked(r.Key, r.RangeEnd)
	return &pb.RangeResponse{Header: s.headerLocked(), Kvs: kvs, Count: int64(len(kvs))}
}

// Put implements etcd's KV.
func (s *Server) Put(_ context.Context, r *pb.PutRequest) (*pb.PutResponse, error) {
	if err := checkPut(r); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &change{s: s}
	if err := c.put(r.Key, r.Value, r.Lease); err != nil {
		return nil, err
	}
	c.commit()
	return &pb.PutResponse{Header: s.headerLocked()}, nil
}

// DeleteRange implements etcd's KV.
func (s *Server) DeleteRange(_ context.Context, r *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
	if err := checkDelete(r); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &change{s: s}
	n := c.removeRange(r)
	c.commit()
	return &pb.DeleteRangeResponse{Header: s.headerLocked(), Deleted: n}, nil
}

func (c *change) removeRange(r *pb.DeleteRangeRequest) int64 {
	all := c.s.selectLocked(r.Key, r.RangeEnd)
	for _, kv := range all {
		c.remove(kv)
	}
	return int64(len(all))
}

// Txn implements etcd's KV. Everything in it is checked before anything is changed.
func (s *Server) Txn(_ context.Context, r *pb.TxnRequest) (*pb.TxnResponse, error) {
	for _, op := range slices.Concat(r.Success, r.Failure) {
		var err error
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			err = checkRange(o.RequestRange)
		case *pb.RequestOp_RequestPut:
			err = checkPut(o.RequestPut)
		case *pb.RequestOp_RequestDeleteRange:
			err = checkDelete(o.RequestDeleteRange)
		default:
			err = unknown("transactions in transactions")
		}
		if err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := &pb.TxnResponse{Succeeded: true}
	for _, c := range r.Compare {
		out.Succeeded = out.Succeeded && s.holdsLocked(c)
	}
	ops := r.Failure
	if out.Succeeded {
		ops = r.Success
	}
	for _, op := range ops {
		if p := op.GetRequestPut(); p != nil && p.Lease != 0 && s.leases[p.Lease] == nil {
			return nil, rpctypes.ErrGRPCLeaseNotFound
		}
	}
	c := &change{s: s}
	defer c.commit()
	for _, op := range ops {
		a := &pb.ResponseOp{}
		switch o := op.Request.(type) {
		case *pb.RequestOp_RequestRange:
			a.Response = &pb.ResponseOp_ResponseRange{ResponseRange: s.rangeLocked(o.RequestRange)}
		case *pb.RequestOp_RequestPut:
			if err := c.put(o.RequestPut.Key, o.RequestPut.Value, o.RequestPut.Lease); err != nil {
				return nil, err
			}
			a.Response = &pb.ResponseOp_ResponsePut{ResponsePut: &pb.PutResponse{Header: s.headerLocked()}}
		case *pb.RequestOp_RequestDeleteRange:
			n := c.removeRange(o.RequestDeleteRange)
			a.Response = &pb.ResponseOp_ResponseDeleteRange{
				ResponseDeleteRange: &pb.DeleteRangeResponse{Header: s.headerLocked(), Deleted: n}}
		}
		out.Responses = append(out.Responses, a)
	}
	out.Header = s.headerLocked()
	if len(c.events) > 0 {
		out.Header.Revision++
	}
	return out, nil
}

// holdsLocked evaluates a comparison: all pairs of its range have to satisfy it. Without pairs, a
// comparison of a value is false, and a number counts as 0.
func (s *Server) holdsLocked(c *pb.Compare) bool {
	kvs := s.selectLocked(c.Key, c.RangeEnd)
	if len(kvs) == 0 {
		if c.Target == pb.Compare_VALUE {
			return false
		}
		kvs = []*mvccpb.KeyValue{{}}
	}
	for _, kv := range kvs {
		var order int
		switch c.Target {
		case pb.Compare_VALUE:
			order = bytes.Compare(kv.Value, c.GetValue())
		case pb.Compare_CREATE:
			order = compare(kv.CreateRevision, c.GetCreateRevision())
		case pb.Compare_MOD:
			order = compare(kv.ModRevision, c.GetModRevision())
		case pb.Compare_VERSION:
			order = compare(kv.Version, c.GetVersion())
		case pb.Compare_LEASE:
			order = compare(kv.Lease, c.GetLease())
		default:
			return false
		}
		fits := false
		switch c.Result {
		case pb.Compare_EQUAL:
			fits = order == 0
		case pb.Compare_NOT_EQUAL:
			fits = order != 0
		case pb.Compare_GREATER:
			fits = order > 0
		case pb.Compare_LESS:
			fits = order < 0
		}
		if !fits {
			return false
		}
	}
	return true
}

func compare(a, b int64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// LeaseGrant implements etcd's Lease.
func (s *Server) LeaseGrant(_ context.Context, r *pb.LeaseGrantRequest) (*pb.LeaseGrantResponse, error) {
	if r.TTL < 1 || r.TTL > maxTTL {
		return nil, rpctypes.ErrGRPCLeaseTTLTooLarge
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l := &lease{id: r.ID, ttl: r.TTL, keys: map[string]bool{}}
	for l.id == 0 || r.ID == 0 && s.leases[l.id] != nil {
		l.id = rand.Int64()
	}
	if s.leases[l.id] != nil {
		return nil, rpctypes.ErrGRPCLeaseExist
	}
	if s.closed {
		return nil, rpctypes.ErrGRPCStopped
	}
	s.leases[l.id] = l
	l.end = time.AfterFunc(l.span(), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.endLocked(l)
	})
	return &pb.LeaseGrantResponse{Header: s.headerLocked(), ID: l.id, TTL: l.ttl}, nil
}

func (l *lease) span() time.Duration {
	return time.Duration(min(float64(l.ttl), float64(1<<62/time.Second))) * time.Second
}

// endLocked removes a lease and its keys, unless that was done.
func (s *Server) endLocked(l *lease) {
	if s.leases[l.id] != l || s.closed {
		return
	}
	l.end.Stop()
	c := &change{s: s}
	for _, key := range slices.Sorted(maps.Keys(l.keys)) {
		c.remove(s.keys[key])
	}
	delete(s.leases, l.id)
	c.commit()
}

// LeaseRevoke implements etcd's Lease.
func (s *Server) LeaseRevoke(_ context.Context, r *pb.LeaseRevokeRequest) (*pb.LeaseRevokeResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.leases[r.ID]
	if l == nil {
		return nil, rpctypes.ErrGRPCLeaseNotFound
	}
	s.endLocked(l)
	return &pb.LeaseRevokeResponse{Header: s.headerLocked()}, nil
}

// LeaseKeepAlive implements etcd's Lease.
func (s *Server) LeaseKeepAlive(stream pb.Lease_LeaseKeepAliveServer) error {
	for {
		r, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		s.mu.Lock()
		a := &pb.LeaseKeepAliveResponse{Header: s.headerLocked(), ID: r.ID} // TTL 0: there is no lease
		// If its timer has fired, the lease counts as ended.
		if l := s.leases[r.ID]; l != nil && l.end.Stop() {
			l.end.Reset(l.span())
			a.TTL = l.ttl
		}
		s.mu.Unlock()
		if err := stream.Send(a); err != nil {
			return err
		}
	}
}

// LeaseTimeToLive implements etcd's Lease. It returns the granted time, not the remaining one.
func (s *Server) LeaseTimeToLive(_ context.Context, r *pb.LeaseTimeToLiveRequest) (*pb.LeaseTimeToLiveResponse, error) {
	if r.Keys {
		return nil, unknown("the keys of a lease")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	a := &pb.LeaseTimeToLiveResponse{Header: s.headerLocked(), ID: r.ID, TTL: -1}
	if l := s.leases[r.ID]; l != nil {
		a.TTL, a.GrantedTTL = l.ttl, l.ttl
	}
	return a, nil
}

// watch is one watch of a stream.
type watch struct {
	id        int64
	from, end []byte
	to        *queue
}

// offerLocked queues the events of one revision that match the watch.
func (w *watch) offerLocked(events []*mvccpb.Event, revision int64) {
	var mine []*mvccpb.Event
	for _, e := range events {
		if within(e.Kv.Key, w.from, w.end) {
			mine = append(mine, e)
		}
	}
	if len(mine) > 0 {
		w.to.put(&pb.WatchResponse{Header: &pb.ResponseHeader{ClusterId: oneMember, MemberId: oneMember,
			Revision: revision, RaftTerm: 1}, WatchId: w.id, Events: mine})
	}
}

// queue holds what a stream has to send.
type queue struct {
	mu     sync.Mutex
	all    []*pb.WatchResponse
	events int
	bytes  int // of their keys and values
	full   bool
	more   chan struct{} // holds a token after put
}

func (q *queue) put(r *pb.WatchResponse) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.events += len(r.Events)
	q.bytes += weight(r.Events)
	if q.events > maxQueue || q.bytes > maxQueueBytes {
		q.full = true
	} else {
		q.all = append(q.all, r)
	}
	select {
	case q.more <- struct{}{}:
	default:
	}
}

func (q *queue) take() (all []*pb.WatchResponse, full bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	all, q.all, q.events, q.bytes = q.all, nil, 0, 0
	return all, q.full
}

// Watch implements etcd's Watch.
func (s *Server) Watch(stream pb.Watch_WatchServer) error {
	q := &queue{more: make(chan struct{}, 1)}
	own := map[int64]*watch{}
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, w := range own {
			delete(s.watches, w)
		}
	}()
	received := make(chan error, 1)
	requests := make(chan *pb.WatchRequest)
	go func() { // returns when the stream ends
		for {
			r, err := stream.Recv()
			if err != nil {
				received <- err
				return
			}
			select {
			case requests <- r:
			case <-stream.Context().Done():
				return
			}
		}
	}()
	for next := int64(0); ; {
		select {
		case err := <-received:
			if err == io.EOF {
				return nil
			}
			return err
		case <-stream.Context().Done():
			return stream.Context().Err()
		case r := <-requests:
			switch r := r.RequestUnion.(type) {
			case *pb.WatchRequest_CreateRequest:
				s.begin(r.CreateRequest, q, own, &next)
			case *pb.WatchRequest_CancelRequest:
				s.cancel(r.CancelRequest.WatchId, q, own)
			case *pb.WatchRequest_ProgressRequest:
				s.mu.Lock()
				q.put(&pb.WatchResponse{Header: s.headerLocked(), WatchId: -1})
				s.mu.Unlock()
			}
		case <-q.more:
			all, full := q.take()
			for _, r := range all {
				if err := stream.Send(r); err != nil {
					return err
				}
			}
			if full {
				return status.Error(codes.ResourceExhausted, "the watcher does not take its events")
			}
		}
	}
}

// begin makes a watch, with the events since its first revision.
func (s *Server) begin(r *pb.WatchCreateRequest, q *queue, own map[int64]*watch, next *int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := &watch{id: *next, from: r.Key, end: r.RangeEnd, to: q}
	*next++
	made := &pb.WatchResponse{Header: s.headerLocked(), WatchId: w.id, Created: true}
	switch {
	case r.PrevKv || len(r.Filters) > 0 || r.WatchId != 0:
		made.Canceled, made.CancelReason = true, "this store does not know watches with options"
	case len(r.Key) == 0:
		made.Canceled, made.CancelReason = true, "no key is given"
	}
	if q.put(made); made.Canceled {
		return
	}
	if r.StartRevision > 0 && r.StartRevision <= s.compacted {
		q.put(&pb.WatchResponse{Header: s.headerLocked(), WatchId: w.id, Canceled: true,
			CompactRevision: s.compacted + 1})
		return
	}
	if r.StartRevision > 0 {
		var events []*mvccpb.Event
		for _, e := range s.log {
			if e.Kv.ModRevision >= r.StartRevision {
				events = append(events, e)
			}
		}
		w.offerLocked(events, s.revision)
	}
	own[w.id] = w
	s.watches[w] = struct{}{}
}

func (s *Server) cancel(id int64, q *queue, own map[int64]*watch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := own[id]; w != nil {
		delete(own, id)
		delete(s.watches, w)
		q.put(&pb.WatchResponse{Header: s.headerLocked(), WatchId: id, Canceled: true})
	}
}
