package tcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"tutti/p2p"
)

// rank is a rank of a job whose sockets are small.
type rank struct {
	*p2p.Proxy
	channel *p2p.Channel
}

// job returns n ranks, each linked with rank 0.
func job(n int) []*rank {
	all := make([]*rank, n)
	id := func(r int) p2p.Identity { return p2p.Identity{Rank: r, Incarnation: uint64(r) + 1} }
	var members []int
	for r := range all {
		members = append(members, r)
		all[r] = &rank{Proxy: p2p.New(p2p.Config{Self: id(r), Size: n, Secret: secret,
			Transports: []p2p.Transport{tight(64<<10, Config{})},
			Resolve: func(_ context.Context, r int) (p2p.Peer, error) {
				return p2p.Peer{Identity: id(r), Endpoints: all[r].Endpoints()}, nil
			}})}
		must(all[r].Listen(context.Background()))
	}
	for _, r := range all {
		r.channel = must(r.Open(p2p.Name{Number: 1}, p2p.Epoch{}, members, nil, false))
	}
	for r := 1; r < n; r++ {
		if err := all[0].send(r, 0); err != nil {
			panic(err)
		}
		must(all[r].receive(0, 0))
	}
	return all
}

// text is message seq. Each is sent in an operation of its own.
func text(seq int) []byte { return pattern(50_000, byte(seq)) }

func token(seq int) p2p.Token { return p2p.Token{Seq: uint64(seq + 1)} }

func (r *rank) send(to, seq int) error {
	var w p2p.Wait
	w.Reset(context.Background(), patience, true)
	r.Lock()
	defer r.Unlock()
	return r.channel.Send(&w, to, token(seq), text(seq))
}

// fill sends messages to a rank from number 1 on, at most most, until the link takes nothing more.
// It returns how many the link has taken.
func (r *rank) fill(to, most int) (taken int) {
	r.Lock()
	defer r.Unlock()
	for taken < most && must(r.channel.SendSome(to, token(taken+1), text(taken+1))) {
		taken++
	}
	return taken
}

func (r *rank) receive(from, seq int) ([]byte, error) {
	var w p2p.Wait
	w.Reset(context.Background(), patience, true)
	r.Lock()
	defer r.Unlock()
	var in p2p.Recv
	r.channel.PostRecv(&in, from, token(seq), make([]byte, len(text(seq))), false)
	err := r.channel.WaitRecv(&w, &in)
	return in.View(), err
}

// What a rank has sent arrives although the receiver reads nothing until long after the rank has
// called Close, and sends something itself before it reads.
func TestCloseDeliversToASlowReader(t *testing.T) {
	full := job(2)
	all := full[0].fill(1, 1000) // about as many as fit below
	full[1].Close()              // first, or the other one waits for it
	full[0].Close()
	for taken := all - 2; taken <= all; taken++ { // of the last one the link keeps a part
		t.Run(fmt.Sprintf("%d messages", taken), func(t *testing.T) {
			t.Parallel()
			var err error
			for range 5 { // a stall of the machine is not of every time
				var late bool
				if late, err = readSlowly(taken); err == nil {
					return
				}
				if !late {
					break
				}
			}
			t.Error(err)
		})
	}
}

// readSlowly has a rank send up to so many messages and close, and another one read them long after
// that. Late: the reader has taken so long that Close need not have waited for it.
func readSlowly(most int) (late bool, err error) {
	const patient = 3 * time.Second // as p2p.Proxy's Close says
	ranks := job(2)
	defer ranks[1].Close()
	taken := ranks[0].fill(1, most)
	closed := make(chan struct{})
	began := time.Now()
	go func() { defer close(closed); ranks[0].Close() }()
	defer func() { <-closed }()
	select {
	case <-closed:
	case <-time.After(2 * lingerTime):
	}
	if err := ranks[1].send(0, 1); err != nil {
		return time.Since(began) > patient, err
	}
	for seq := 1; seq <= taken; seq++ {
		if got, err := ranks[1].receive(0, seq); err != nil || !bytes.Equal(got, text(seq)) {
			return time.Since(began) > patient, fmt.Errorf("message %d: %d bytes, %v", seq, len(got), err)
		}
	}
	return false, nil
}

// After an abort Close waits only briefly for a peer that reads nothing.
func TestCloseAfterAbort(t *testing.T) {
	var took time.Duration
	for range 5 { // a stall of the machine is not of every time
		ranks := job(2)
		ranks[0].fill(1, 1000)
		ranks[0].Lock()
		ranks[0].channel.Abort(errors.New("enough"), []byte("enough"))
		ranks[0].Unlock()
		ranks[0].channel.Close()
		start := time.Now()
		err := ranks[0].Close()
		took = time.Since(start)
		ranks[1].Close()
		if err != nil {
			t.Fatal(err)
		}
		if took <= 3*time.Second {
			return
		}
	}
	t.Errorf("it took %v", took)
}

const lostPeers = 16

func childLostPeers() {
	loopback(true)
	ranks := job(lostPeers + 1)
	loopback(false)
	for r := 1; r <= lostPeers; r++ {
		ranks[0].fill(r, 1000)
	}
	start := time.Now()
	err := ranks[0].Close()
	fmt.Println(time.Since(start).Milliseconds(), err)
}

// Close waits for peers whose hosts have vanished at the same time, not for one after the other.
func TestCloseLeavesLostPeers(t *testing.T) {
	const bound = lostPeers * lingerTime
	var ms int64
	for range 5 { // a stall of the machine is not of every time
		line := child(t, "lost peers", apart).Hear()
		if _, err := fmt.Sscanf(line, "%d <nil>", &ms); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		if ms < bound.Milliseconds() {
			return
		}
	}
	t.Errorf("%d ms, want less than %v", ms, bound)
}
