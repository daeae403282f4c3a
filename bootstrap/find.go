package bootstrap

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	findMethod = "/tutti.Handshake/Find"

	maxReason      = 1024 // bytes of a text
	maxIDs         = 4 + 8*MaxMembers
	maxFindRequest = 1 + MaxUUID + maxIDs
	goneHeader     = 1 + 4
	maxFindReply   = 1 + max(maxRecord, goneHeader+maxReason, maxIDs)
)

// Request and reply, little-endian. Their version is that of the Terms, which handles contain:
// members of another build are not asked.
//
//	request  length u8, uuid, rank u32, ids: u64 for each member, by rank
//	reply    code u8, then the record, a text, or the rank and ids of a member as in the request
type (
	findRequest struct {
		uuid string
		rank int
		ids  []uint64
	}
	findReply struct {
		code byte
		body []byte
	}
)

// Codes of a findReply.
const (
	findRecord  = iota // body: the record
	findWait           // this member has not begun the Formation yet: ask again
	findUsed           // the uuid was used for another Formation; body: a text about that
	findGone           // body: a goneBody
	findDiffers        // body: a list that is not that of the request: this member's, or one that this member knows of
)

// goneBody says why a member has no part in a Formation: fault u8, rank u32, a text.
type goneBody struct {
	fault fault
	rank  int // of the member at fault; 0 with ownFault
	text  []byte
}

// fault is what kept a member from its Formation.
type fault uint8

const (
	ownFault     fault = iota // nothing that another member has done
	usedFault                 // another member has used the uuid
	goneFault                 // another member is gone
	versionFault              // another member is of another build
)

// faultOf returns the fault of the member that a PeerError with err names.
func faultOf(err error) fault {
	switch {
	case errors.Is(err, ErrUsed):
		return usedFault
	case errors.Is(err, ErrVersion):
		return versionFault
	}
	return goneFault
}

// err returns what a PeerError about the fault wraps.
func (f fault) err() error {
	switch f {
	case usedFault:
		return ErrUsed
	case versionFault:
		return ErrVersion
	}
	return ErrGone
}

func (g goneBody) encode() []byte {
	b := binary.LittleEndian.AppendUint32([]byte{byte(g.fault)}, uint32(g.rank))
	return append(b, g.text...)
}

func decodeGone(b []byte) (goneBody, error) {
	if len(b) < goneHeader || len(b) > goneHeader+maxReason {
		return goneBody{}, fmt.Errorf("handshake: reason of %d bytes of a member", len(b))
	}
	rank := binary.LittleEndian.Uint32(b[1:])
	if f := fault(b[0]); f > versionFault || rank >= MaxMembers || f == ownFault && rank != 0 {
		return goneBody{}, fmt.Errorf("handshake: a member reports fault %d of rank %d", f, rank)
	}
	return goneBody{fault(b[0]), int(rank), b[goneHeader:]}, nil
}

func encodeIDs(rank int, ids []uint64) []byte {
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, 4+8*len(ids)), uint32(rank))
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint64(b, id)
	}
	return b
}

func decodeIDs(b []byte) (rank int, ids []uint64, err error) {
	if len(b) < 12 || len(b) > maxIDs || len(b)%8 != 4 {
		return 0, nil, fmt.Errorf("handshake: list of members of %d bytes", len(b))
	}
	rank = int(binary.LittleEndian.Uint32(b))
	ids = make([]uint64, 0, len(b)/8)
	for b = b[4:]; len(b) > 0; b = b[8:] {
		ids = append(ids, binary.LittleEndian.Uint64(b))
	}
	if rank < 0 || rank >= len(ids) {
		return 0, nil, fmt.Errorf("handshake: rank %d of a list of %d members", rank, len(ids))
	}
	return rank, ids, nil
}

func (m *findRequest) encode() ([]byte, error) {
	if len(m.uuid) < 1 || len(m.uuid) > MaxUUID || len(m.ids) > MaxMembers {
		return nil, errors.New("handshake: uuid or list of members is too long")
	}
	b := append([]byte{byte(len(m.uuid))}, m.uuid...)
	return append(b, encodeIDs(m.rank, m.ids)...), nil
}

func (m *findRequest) decode(b []byte) error {
	if len(b) < 1 || len(b) > maxFindRequest || b[0] == 0 || b[0] > MaxUUID || len(b) < 1+int(b[0]) {
		return fmt.Errorf("handshake: malformed request of %d bytes for a member", len(b))
	}
	m.uuid = string(b[1 : 1+b[0]])
	var err error
	m.rank, m.ids, err = decodeIDs(b[1+b[0]:])
	return err
}

func (m *findReply) encode() ([]byte, error) { return append([]byte{m.code}, m.body...), nil }

func (m *findReply) decode(b []byte) error {
	if len(b) < 1 || len(b) > maxFindReply || b[0] > findDiffers {
		return fmt.Errorf("handshake: malformed answer of %d bytes of a member", len(b))
	}
	m.code, m.body = b[0], bytes.Clone(b[1:])
	return nil
}

func serveFind(srv any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	s := srv.(*Server)
	q := &findRequest{}
	if err := decode(q); err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if s.cfg.find == nil {
		return nil, status.Error(codes.Unimplemented, "this is a rank, no member")
	}
	return s.cfg.find(ctx, q), nil
}
