package pg

import (
	"bytes"
	"context"
	"testing"
	"time"

	"tutti/p2p"
)

// Config.Progress has a rank take in what comes while it is in no call of the package.
func TestProgressWhileCallerComputes(t *testing.T) {
	gs, err := Local(2, Config{Progress: true, Timeout: 20 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range gs {
		defer g.Close()
	}
	data := bytes.Repeat([]byte{42}, 1<<20)
	got := make([]byte, len(data))
	var in p2p.RecvReq
	p := gs[1].job.proxy
	p.Lock()
	gs[1].msgs.PostMsg(&in, 0, p2p.AnyTag, uint64(Uint8), got)
	p.Unlock()
	if err := Send(context.Background(), gs[0], data, 1, 3); err != nil {
		t.Fatal(err)
	}
	p.Lock()
	defer p.Unlock()
	if !bytes.Equal(got, data) {
		t.Error("the message is not there")
	}
}
