package pg

import (
	"encoding/binary"
	"errors"

	"tutti/p2p"
	"tutti/pg/internal/exec"
)

// Kinds of the payload of Channel.Abort, which carries a failure to the other ranks. The kind is
// the first byte. Calls in graphs have no tokens: text has the call that timed out, or both calls
// with betweenCalls.
const (
	abortRank     = 1 // reporter, failed rank, text
	abortTimeout  = 2 // reporter, after (ns), token of the call, missing ranks with their last tokens, text
	abortMismatch = 3 // rank a, rank b, their tokens, text
	abortOther    = 4 // reporter, text
	abortCall     = 5 // reporter, text: Group.Abort
	abortDeserted = 6 // reporter, rank that has closed its group: Group.deserted
	maxMissing    = 16
)

type wireAbort struct {
	Kind     byte
	A, B     int // reporter and failed rank, or the two ranks that disagree
	Call     p2p.Token
	Other    p2p.Token
	After    int64
	Missing  []exec.Seen
	Text     string
	Canceled bool
}

// betweenCalls separates the calls in a text.
const betweenCalls = "\x00"

// seen describes the last operation that a rank was seen in.
func seen(m exec.Seen) Seen {
	if !m.Has {
		return Seen{Rank: m.Rank, What: "nothing yet"}
	}
	return Seen{Rank: m.Rank, What: exec.Spell(m.Last)}
}

func putToken(b []byte, t p2p.Token) []byte {
	b = binary.LittleEndian.AppendUint64(b, t.Seq)
	b = binary.LittleEndian.AppendUint64(b, t.Call)
	return binary.LittleEndian.AppendUint64(b, t.Count)
}

func (a *wireAbort) encode() []byte {
	b := []byte{a.Kind, 0}
	if a.Canceled {
		b[1] = 1
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(a.A))
	b = binary.LittleEndian.AppendUint32(b, uint32(a.B))
	b = putToken(putToken(b, a.Call), a.Other)
	b = binary.LittleEndian.AppendUint64(b, uint64(a.After))
	missing := a.Missing[:min(len(a.Missing), maxMissing)]
	b = append(b, byte(len(missing)))
	for _, m := range missing {
		b = binary.LittleEndian.AppendUint32(b, uint32(m.Rank))
		has := byte(0)
		if m.Has {
			has = 1
		}
		b = putToken(append(b, has), m.Last)
	}
	return append(b, a.Text[:min(len(a.Text), p2p.MaxAbort-len(b))]...)
}

const abortFixed = 2 + 8 + 48 + 8 + 1

var errBadAbort = errors.New("malformed abort message")

// decodeAbort decodes a peer's payload. size bounds the rank numbers.
func decodeAbort(b []byte, size int) (*wireAbort, error) {
	if len(b) < abortFixed || b[0] < abortRank || b[0] > abortDeserted {
		return nil, errBadAbort
	}
	u32 := func(at int) int { return int(int32(binary.LittleEndian.Uint32(b[at:]))) }
	tok := func(at int) p2p.Token {
		return p2p.Token{Seq: binary.LittleEndian.Uint64(b[at:]),
			Call: binary.LittleEndian.Uint64(b[at+8:]), Count: binary.LittleEndian.Uint64(b[at+16:])}
	}
	a := &wireAbort{Kind: b[0], Canceled: b[1] == 1, A: u32(2), B: u32(6), Call: tok(10), Other: tok(34),
		After: int64(binary.LittleEndian.Uint64(b[58:]))}
	if a.A < 0 || a.A >= size || a.B < 0 || a.B >= size || a.After < 0 {
		return nil, errBadAbort
	}
	n, at := int(b[66]), abortFixed
	if n > maxMissing || len(b) < at+n*29 {
		return nil, errBadAbort
	}
	for ; n > 0; n-- {
		m := exec.Seen{Rank: u32(at), Has: b[at+4] == 1, Last: tok(at + 5)}
		if m.Rank < 0 || m.Rank >= size {
			return nil, errBadAbort
		}
		a.Missing = append(a.Missing, m)
		at += 29
	}
	a.Text = string(b[at:])
	return a, nil
}
