package bootstrap

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tutti/internal/ident"
	"tutti/internal/trust"
)

const (
	statusMethod = "/tutti.Handshake/Status"

	// MaxStatus bounds the compressed answer of Status in bytes. A rank with more to report leaves
	// operations out.
	MaxStatus = 1 << 20
	// MaxStatusText bounds the same answer uncompressed.
	MaxStatusText = 8 << 20
)

// Request and reply, little-endian:
//
//	request  nonce u64, operations u32
//	reply    nonce u64, incarnation u64, the rank's answer, compressed by gzip
type (
	statusRequest struct {
		nonce uint64
		ops   uint32
	}
	statusReply struct {
		nonce, incarnation uint64
		body               []byte
	}
)

func (m *statusRequest) encode() ([]byte, error) {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint64(nil, m.nonce), m.ops), nil
}

func (m *statusRequest) decode(b []byte) error {
	if len(b) != 12 {
		return fmt.Errorf("handshake: request for the status of %d bytes, expected 12", len(b))
	}
	m.nonce, m.ops = binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[8:])
	return nil
}

func (m *statusReply) encode() ([]byte, error) {
	b := binary.LittleEndian.AppendUint64(nil, m.nonce)
	return append(binary.LittleEndian.AppendUint64(b, m.incarnation), m.body...), nil
}

func (m *statusReply) decode(b []byte) error {
	if len(b) < 16 || len(b) > 16+MaxStatus {
		return fmt.Errorf("handshake: status of %d bytes, expected 16 to %d", len(b), 16+MaxStatus)
	}
	m.nonce, m.incarnation, m.body = binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint64(b[8:]),
		bytes.Clone(b[16:])
	return nil
}

func serveStatus(srv any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	s := srv.(*Server)
	var req statusRequest
	if err := decode(&req); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if s.cfg.Status == nil {
		return nil, status.Error(codes.Unimplemented, "this rank keeps no status")
	}
	select { // one at a time: answers are large
	case s.answering <- struct{}{}:
		defer func() { <-s.answering }()
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	for ops := int(min(req.ops, math.MaxInt32)); ; ops /= 2 {
		text, err := s.cfg.Status(ctx, ops)
		if err != nil {
			return nil, status.Error(codes.Aborted, err.Error())
		}
		if len(text) <= MaxStatusText {
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			z.Write(text)
			z.Close()
			if b.Len() <= MaxStatus {
				return &statusReply{nonce: req.nonce, incarnation: s.cfg.Incarnation, body: b.Bytes()}, nil
			}
		}
		if ops == 0 {
			return nil, status.Errorf(codes.ResourceExhausted, "the status has %d bytes, which is too much", len(text))
		}
	}
}

// Status asks the rank that published to for its state, with at most ops of its last operations. It
// asks once: a rank that cannot be reached, or has not answered when ctx ends, is an error, as with
// Describe. Any client that knows the job's secret may ask; its Self needs only an Incarnation and
// its location. The answer is that of ServerConfig.Status, at most MaxStatusText bytes.
func (c *Client) Status(ctx context.Context, to Record, ops int) ([]byte, error) {
	addrs := c.order(to)
	if len(addrs) == 0 {
		return nil, fmt.Errorf("%s: no address of %q can be reached from here", to.name(), to.Addrs)
	}
	req, reply := &statusRequest{ident.New(), uint32(min(max(ops, 0), math.MaxInt32))}, &statusReply{}
	hello := trust.Hello{FromRank: uint32(c.cfg.Self.Rank), FromIncarnation: c.cfg.Self.Incarnation,
		ToRank: uint32(to.Rank), ToIncarnation: to.Incarnation}
	conn, err := c.reach(ctx, addrs, hello)
	if err == nil {
		err = call(ctx, conn, statusMethod, req, reply, 16+MaxStatus)
	}
	if err == nil && (reply.nonce != req.nonce || reply.incarnation != to.Incarnation) {
		err = fmt.Errorf("%w (the answer comes from incarnation %016x)", ErrStale, reply.incarnation)
	}
	var text []byte
	if err == nil {
		text, err = inflate(reply.body)
	}
	if err != nil {
		return nil, fmt.Errorf("%s at %v: %w", to.name(), addrs, err)
	}
	return text, nil
}

// inflate undoes gzip, within bounds.
func inflate(b []byte) ([]byte, error) {
	z, err := gzip.NewReader(bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("handshake: malformed status: %w", err)
	}
	text, err := io.ReadAll(io.LimitReader(z, MaxStatusText+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("handshake: malformed status: %w", err)
	case len(text) > MaxStatusText:
		return nil, errors.New("handshake: the status is too long")
	}
	return text, nil
}
