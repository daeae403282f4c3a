package queue

// The identifier of a request, from its highest bits on: 2 of its kind, 14 of the queue pair's
// place in its poller, 16 of the queue pair's life, 32 of the request's number in that life. No two
// requests that can have a completion at the same time are equal in all of them.

// kind is what a request is for.
type kind uint8

const (
	data kind = iota + 1
	notification
	receive
)

const maxPlaces = 1 << 14

// name is the part of an identifier that the requests of one life of a queue pair have in common.
type name struct {
	place uint16
	life  uint16
}

func (n name) id(k kind, number uint32) uint64 {
	return uint64(k)<<62 | uint64(n.place)<<48 | uint64(n.life)<<32 | uint64(number)
}

func parseID(id uint64) (k kind, n name, number uint32) {
	return kind(id >> 62), name{uint16(id >> 48 & (maxPlaces - 1)), uint16(id >> 32)}, uint32(id)
}
