package wire

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
)

// Mode says what guards the bytes of a connection: each one against more than the one before.
type Mode uint8

// Modes.
const (
	Plain   Mode = iota // nothing: frames follow each other
	Checked             // against damage: frames are in records with checksums
	Sealed              // against third parties, too: the records are encrypted and authenticated
	modes
)

// String returns "plain", "checked" or "sealed".
func (m Mode) String() string {
	if m < modes {
		return [...]string{"plain", "checked", "sealed"}[m]
	}
	return fmt.Sprintf("mode %d", uint8(m))
}

// A record is a header, a body and a trailer. The header has the length of the body (u32, 1 to
// MaxRecord) and a check (u32): the CRC32C of the record's number (u64) and the length. The numbers
// of each direction are 0, 1, 2, …, and are not sent.
//
// A checked record has the bytes of frames as its body. Its trailer (u32) is the CRC32C of number,
// length and body.
//
// The body of a sealed record is encrypted with AES-128-GCM, the header is the additional data, and
// the trailer is the tag of 16 bytes. The first keyLife records of a direction have a key and an IV
// that are made of its secret, the next ones those of the next secret:
//
//	key, IV     HKDF-Expand-SHA256(secret, "key", 16 + 12)
//	next secret HKDF-Expand-SHA256(secret, "next", 32)
//
// The nonce is the IV, whose last 8 bytes are XORed with the number.
const (
	RecordHeader = 8
	MaxRecord    = 64 << 10 // bytes of a body
	MaxTrailer   = tagSize
	SecretSize   = 32 // of a direction

	// Labels of the secrets of what the two ends send: see trust.Session.
	DiallerSecret  = "seal dialler"
	AcceptorSecret = "seal acceptor"

	sumSize   = 4
	keySize   = 16
	nonceSize = 12
	tagSize   = 16
	keyLife   = 1 << 20 // at most 64 GiB, far below what AES-GCM allows for a key
)

// ErrRecord says that a record is not the next one that the other end made.
var ErrRecord = errors.New("damaged record")

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Guard has the records of both directions of a connection, or none: then its mode is Plain.
type Guard struct{ Out, In *Records }

// Mode returns what the guard is one of.
func (g Guard) Mode() Mode {
	switch {
	case g.Out == nil:
		return Plain
	case g.Out.aead == nil:
		return Checked
	}
	return Sealed
}

// NewGuard returns the guard of a connection. Each direction of a Sealed one has its own secret of
// SecretSize bytes, which must never be used again.
func NewGuard(m Mode, out, in []byte) (g Guard, err error) {
	switch m {
	case Plain:
	case Checked:
		g = Guard{&Records{}, &Records{}}
	case Sealed:
		var err2 error
		g.Out, err = newSealed(out)
		g.In, err2 = newSealed(in)
		if err = errors.Join(err, err2); err != nil {
			return Guard{}, fmt.Errorf("seal a connection: %w", err)
		}
	default:
		return g, fmt.Errorf("unknown %v", m)
	}
	return g, nil
}

// Records makes the records of one direction, or opens them. It is not safe for concurrent use.
type Records struct {
	n      uint64      // number of the next record
	aead   cipher.AEAD // nil: records are only checked
	secret []byte
	iv     [nonceSize]byte
	nonce  [nonceSize]byte
	sum    [12]byte // what check is made of: a variable would be allocated
}

func newSealed(secret []byte) (*Records, error) {
	if len(secret) != SecretSize {
		return nil, fmt.Errorf("a secret of %d bytes, want %d", len(secret), SecretSize)
	}
	r := &Records{secret: slices.Clone(secret)}
	return r, r.renew()
}

// renew makes key and IV of the secret, and replaces the secret.
func (r *Records) renew() error {
	b, err := hkdf.Expand(sha256.New, r.secret, "key", keySize+nonceSize)
	if err != nil {
		return err
	}
	next, err := hkdf.Expand(sha256.New, r.secret, "next", SecretSize)
	if err != nil {
		return err
	}
	block, err := aes.NewCipher(b[:keySize])
	if err != nil {
		return err
	}
	if r.aead, err = cipher.NewGCM(block); err != nil {
		return err
	}
	r.iv, r.secret = [nonceSize]byte(b[keySize:]), next
	return nil
}

// begin returns the nonce of the next record, for which there may have to be another key.
func (r *Records) begin() []byte {
	if r.n > 0 && r.n%keyLife == 0 {
		if err := r.renew(); err != nil {
			panic("wire: " + err.Error()) // it worked for the first key
		}
	}
	r.nonce = r.iv
	tail := r.nonce[nonceSize-8:]
	binary.LittleEndian.PutUint64(tail, binary.LittleEndian.Uint64(tail)^r.n)
	return r.nonce[:]
}

// check is the CRC32C of the next record's number and its length, which is the beginning of b.
func (r *Records) check(b []byte) uint32 {
	binary.LittleEndian.PutUint64(r.sum[:], r.n)
	copy(r.sum[8:], b[:4])
	return crc32.Update(0, castagnoli, r.sum[:])
}

func (r *Records) trailer() int {
	if r.aead == nil {
		return sumSize
	}
	return tagSize
}

// Append appends the next record, with a body of 1 to MaxRecord bytes. The body may lie where that
// of the record comes to lie. It is read once: if it is written meanwhile the record is
// valid, and has old or new bytes.
func (r *Records) Append(b, body []byte) []byte {
	at := len(b)
	b = slices.Grow(b, RecordHeader+len(body)+MaxTrailer)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(body)))
	sum := r.check(b[at:])
	b = binary.LittleEndian.AppendUint32(b, sum)
	if r.aead == nil {
		b = append(b, body...)
		b = binary.LittleEndian.AppendUint32(b, crc32.Update(sum, castagnoli, b[at+RecordHeader:]))
	} else {
		b = r.aead.Seal(b, r.begin(), body, b[at:at+RecordHeader])
	}
	r.n++
	return b
}

// Size returns the size of the next record, of which b has RecordHeader bytes or more.
func (r *Records) Size(b []byte) (int, error) {
	n := binary.LittleEndian.Uint32(b)
	if binary.LittleEndian.Uint32(b[4:]) != r.check(b) {
		return 0, fmt.Errorf("%w: the header of record %d is wrong: it was changed on the way, or is not in its place",
			ErrRecord, r.n)
	}
	if n == 0 || n > MaxRecord {
		return 0, fmt.Errorf("%w: record %d has %d bytes, want 1 to %d", ErrRecord, r.n, n, MaxRecord)
	}
	return RecordHeader + int(n) + r.trailer(), nil
}

// Open returns the body of the next record, which is as long as Size said. The body replaces the
// record's. After an error its bytes mean nothing, and the connection cannot be used any more.
func (r *Records) Open(record []byte) ([]byte, error) {
	body := record[RecordHeader:]
	if r.aead == nil {
		var sum []byte
		body, sum = body[:len(body)-sumSize], body[len(body)-sumSize:]
		if crc32.Update(r.check(record), castagnoli, body) != binary.LittleEndian.Uint32(sum) {
			return nil, fmt.Errorf("%w: the checksum of record %d is wrong: it was damaged on the way", ErrRecord, r.n)
		}
	} else {
		var err error
		if body, err = r.aead.Open(body[:0], r.begin(), body, record[:RecordHeader]); err != nil {
			return nil, fmt.Errorf("%w: the tag of record %d is wrong: it was changed on the way", ErrRecord, r.n)
		}
	}
	r.n++
	return body, nil
}
