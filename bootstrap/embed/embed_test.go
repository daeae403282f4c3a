package embed

import (
	"context"
	"testing"
	"time"

	"tutti/bootstrap"
)

func TestQuick(t *testing.T) {
	for range 5 {
		t0 := time.Now()
		s, err := Start(context.Background(), Config{Secret: []byte("0123456789abcdef0123"), Dir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		t.Log("start", time.Since(t0))
		t0 = time.Now()
		st, err := bootstrap.DialStore(context.Background(), bootstrap.StoreConfig{Address: s.Address(), Job: "j", Secret: []byte("0123456789abcdef0123")})
		if err != nil {
			t.Fatal(err)
		}
		t.Log("dial", time.Since(t0), st.TTL())
		t0 = time.Now()
		if err := st.Put(context.Background(), "k", nil, true); err != nil {
			t.Fatal(err)
		}
		t.Log("put", time.Since(t0))
		t0 = time.Now()
		t.Log(st.Close(), time.Since(t0))
		t0 = time.Now()
		t.Log(s.Close(), time.Since(t0))
	}
}
