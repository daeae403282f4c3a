// Package endpoint connects the queue pairs of two processes.
package endpoint
