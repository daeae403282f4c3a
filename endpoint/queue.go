package endpoint

import "slices"

// queue is a list of which the first element is taken. It uses its memory again.
type queue[T any] struct {
	elements []T
	taken    int // the first ones, which are zero
}

func (q *queue[T]) len() int { return len(q.elements) - q.taken }

// all returns the elements, until the queue is changed.
func (q *queue[T]) all() []T { return q.elements[q.taken:] }

func (q *queue[T]) first() T { return q.elements[q.taken] }

func (q *queue[T]) push(x T) {
	if len(q.elements) == cap(q.elements) && q.taken > q.len() { // few have to be moved
		q.elements = slices.Delete(q.elements, 0, q.taken)
		q.taken = 0
	}
	q.elements = append(q.elements, x)
}

func (q *queue[T]) pop() T {
	x := q.first()
	q.elements[q.taken] = *new(T)
	if q.taken++; q.len() == 0 {
		q.elements, q.taken = emptied(q.elements), 0
	}
	return x
}

// drop removes the elements for which f is true.
func (q *queue[T]) drop(f func(T) bool) {
	q.elements = slices.DeleteFunc(slices.Delete(q.elements, 0, q.taken), f)
	q.taken = 0
}
