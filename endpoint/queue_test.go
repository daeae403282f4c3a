package endpoint

import (
	"slices"
	"testing"

	"pgregory.net/rapid"
)

func TestQueue(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var q queue[*int]
		var want []*int
		for range rapid.IntRange(1, 300).Draw(t, "steps") {
			switch step := rapid.IntRange(0, 20).Draw(t, "step"); {
			case step == 0:
				odd := func(x *int) bool { return *x%2 == 1 }
				q.drop(odd)
				want = slices.DeleteFunc(want, odd)
			case step <= 10 && len(want) > 0:
				if q.first() != want[0] || q.pop() != want[0] {
					t.Fatal("another element comes first")
				}
				want = want[1:]
			default:
				x := rapid.IntRange(0, 9).Draw(t, "element")
				q.push(&x)
				want = append(want, &x)
			}
			if q.len() != len(want) || !slices.Equal(q.all(), want) {
				t.Fatalf("%d elements, want %d", q.len(), len(want))
			}
			for i, x := range q.elements[:cap(q.elements)] {
				if x != nil && (i < q.taken || i >= len(q.elements)) {
					t.Fatal("an element that is not there any more is kept")
				}
			}
		}
	})
	var q queue[int]
	for i := range 5 {
		q.push(i)
	}
	room := cap(q.elements)
	for i := range 1000 {
		if x := q.pop(); x != i {
			t.Fatalf("%d, want %d", x, i)
		}
		q.push(i + 5)
	}
	if cap(q.elements) > 4*room {
		t.Errorf("a queue of 5 elements has grown to room for %d", cap(q.elements))
	}
}
