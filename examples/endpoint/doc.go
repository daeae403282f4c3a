// Package endpoint has a client of endpoints that is not written in Go: client.py. docs/wire.md
// describes the protocol.
package endpoint
