package launch

import (
	"context"
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"

	"tutti/bootstrap"
	"tutti/bootstrap/storetest"
)

// While nodes wait for each other, a launcher that was stopped, or could not reach the store, goes
// on when it has another lease.
func TestNodesLoseLeasesBeforeTheyMeet(t *testing.T) {
	put := func(t *testing.T, s bootstrap.Store, n int, r nodeRecord) {
		t.Helper()
		b, err := json.Marshal(r)
		if err == nil {
			err = s.Put(t.Context(), nodeKeys+strconv.Itoa(n), b, true)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	me := nodeRecord{N: 1, Nodes: 2, Incarnation: 5, Host: "a", Failure: "end", Master: "a:1"}
	other := nodeRecord{N: 1, Nodes: 2, Incarnation: 6, Host: "b", Failure: "end"}
	stranger := nodeRecord{N: 1, Nodes: 2, Incarnation: 7, Host: "c", Failure: "end"}
	for _, c := range []struct {
		name   string
		before *nodeRecord // there is such a record of this node when it comes,
		after  *nodeRecord // and this one after its lease was lost
		ended  bool        // the store has ended
		want   string      // in the error; "": the nodes meet
	}{
		{"it waits for the other", nil, nil, false, ""},
		{"it waits for the end of its predecessor", &stranger, nil, false, ""},
		{"its record is still there", nil, &me, false, ""},
		{"another launcher has its place", nil, &stranger, false, "there is a node 0 of job j already, host c"},
		{"the store has ended with its node", nil, nil, true, "wait for the other nodes: lease lost"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := storetest.NewMemory()
				defer m.Close()
				far, handle := m.Open(), m.Open() // far: of the other launchers
				s := &store{handle: handle, nodes: 2, me: me.Incarnation, failc: make(chan broken, 1),
					alone: make(chan struct{}), wake: make(chan struct{}, 1), say: func(string) {}}
				former := m.Open()
				s.open = func(context.Context) (bootstrap.Store, error) {
					if c.after != nil {
						put(t, former, 0, *c.after)
					}
					return m.Open(), nil
				}
				if c.before != nil {
					put(t, former, 0, *c.before)
				}
				s.refused.Store(c.ended)
				l := &launcher{Options: Options{N: 1, Nodes: 2, Job: "j", Quiet: true}}
				type result struct {
					master string
					err    error
				}
				met := make(chan result, 1)
				ctx, cancel := context.WithTimeout(t.Context(), meetTime)
				defer cancel()
				go func() {
					master, err := s.gather(ctx, l, "", me)
					met <- result{master, err}
				}()
				synctest.Wait()
				m.Expire(handle)
				synctest.Wait()
				if c.before != nil {
					former.Close()
				}
				if !c.ended && c.want == "" {
					if _, err := far.Wait(ctx, nodeKeys+"0"); err != nil {
						t.Error(err)
					}
					put(t, far, 1, other)
				}
				r := <-met
				switch {
				case c.want != "":
					if r.err == nil || !strings.Contains(r.err.Error(), c.want) {
						t.Errorf("%v, want %q", r.err, c.want)
					}
				case r.err != nil || r.master != me.Master:
					t.Errorf("master %q, %v", r.master, r.err)
				default:
					former.Close() // its lease ends
					if _, err := far.Get(t.Context(), nodeKeys+"0"); err != nil {
						t.Errorf("this node's record: %v", err)
					}
				}
				s.finish(0, "", false)
			})
		})
	}
}
