// Package pair measures the operations of an endpoint beside the same bytes over a plain TCP
// connection of package net, between two processes on one machine.
//
// One process calls Run, the other Serve. They have three connections: one for commands, one for
// the bytes of the plain TCP contestant, and one of their endpoints. For each row the contestants
// take turns, and medians over the rounds are compared. Both use their defaults, but the endpoint
// has one connection, as its contestant does.
//
// A turn is a number of calls that follow each other: one at a time (depth 1), or with so many
// under way as the depth says. Every call of a turn uses the same buffer at each end, which was
// written before the turn and is read and compared after it. A turn ends when the last call is
// acknowledged. What the plain connection does instead:
//
//	sendrecv, depth 1  a ping-pong: the bytes go there and back
//	sendrecv, write    a stream to the other end, which answers when it has all of it;
//	                   with depth 1 a write is answered each time
//	read               a stream from the other end, after one request;
//	                   with depth 1 each read has a request
//	batch, depth 1     a request for each piece, and the piece
//	batch              all requests at once, and all pieces at once
//
// Requests and answers there are as long as those of an endpoint.
//
// With RDMA the endpoints have a device each, and large reads, writes and messages go from memory
// to memory.
// The contestant is the plain connection as before.
package pair
