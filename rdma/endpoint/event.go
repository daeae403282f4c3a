package endpoint

import "fmt"

// event is an argument of machine.step: one of the types of this file that implement it.
type event interface{ event() }

// open says that a caller waits for a connection.
type open struct{}

// cancel says that no caller waits any more.
type cancel struct{}

// prepared answers prepare: the offer of the new queue pairs, or why there are none. Final: there
// will never be any.
type prepared struct {
	offer offer
	err   error
	final bool
}

// joined answers join: nil, or why the queue pairs cannot be used. Final: others could not either.
type joined struct {
	err   error
	final bool
}

// ready says that the request of a call can be sent now.
type ready struct{ call uint64 }

// replied is the reply to a call.
type replied struct {
	call  uint64
	reply *message
}

// failed says that a call has no reply. What was sent may still arrive. Final: there will never be
// one.
type failed struct {
	call  uint64
	err   error
	final bool
}

// requested is a request of the peer. Exactly one answer follows.
type requested struct{ request *message }

// broken says that the queue pairs of a generation do not work any more.
type broken struct{ generation uint64 }

// shut ends the machine: requests are refused from then on.
type shut struct{}

func (open) event()      {}
func (cancel) event()    {}
func (prepared) event()  {}
func (joined) event()    {}
func (ready) event()     {}
func (replied) event()   {}
func (failed) event()    {}
func (requested) event() {}
func (broken) event()    {}
func (shut) event()      {}

// action is a task for the driver: one of the types below. The driver carries out the actions of a
// step in their order.
type action interface {
	action()
	String() string
}

// prepare asks for queue pairs that are ready to be connected. The event prepared answers it before
// any other event.
type prepare struct{ generation uint64 }

// join asks to connect the queue pairs with those of an offer. The event joined answers it before
// any other event.
type join struct {
	generation uint64
	with       end
	offer      offer
}

// retire takes queue pairs out of service. No later action concerns that generation.
type retire struct{ generation uint64 }

// ask begins a call, in place of an earlier one: after a pause that grows with the number of failed
// ones, the event ready, and the action send if there is still something to ask. The events replied
// or failed answer it.
type ask struct {
	call  uint64
	tries int
}

// send is the request of a call.
type send struct {
	call    uint64
	message *message
}

// answer is the reply to a request of the peer.
type answer struct{ message *message }

// up tells all waiters that the endpoint is connected.
type up struct{}

// fail tells all waiters why it is not, and will not be.
type fail struct{ err error }

func (prepare) action() {}
func (join) action()    {}
func (retire) action()  {}
func (ask) action()     {}
func (send) action()    {}
func (answer) action()  {}
func (up) action()      {}
func (fail) action()    {}

func (a prepare) String() string { return fmt.Sprintf("prepare generation %d", a.generation) }
func (a join) String() string    { return fmt.Sprintf("join generation %d with %v", a.generation, a.with) }
func (a retire) String() string  { return fmt.Sprintf("retire generation %d", a.generation) }
func (a ask) String() string     { return fmt.Sprintf("ask, %d failed", a.tries) }
func (a send) String() string    { return fmt.Sprintf("send %v", a.message) }
func (a answer) String() string  { return fmt.Sprintf("answer %v", a.message) }
func (a up) String() string      { return "up" }
func (a fail) String() string    { return fmt.Sprintf("fail: %v", a.err) }
