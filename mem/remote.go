package mem

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

// Rights say what a peer may do with exposed memory.
type Rights uint8

// The rights.
const (
	Read   Rights = 1 << iota // get from it
	Write                     // put to it
	Signal                    // write single words: signals
)

const allRights = Read | Write | Signal

// Has reports whether r contains all rights of o.
func (r Rights) Has(o Rights) bool { return r&o == o }

// Validate returns an error unless r has at least one right and no unknown ones.
func (r Rights) Validate() error {
	if r == 0 || r&^allRights != 0 {
		return fmt.Errorf("rights %#x: want one or more of read, write and signal", uint8(r))
	}
	return nil
}

// String returns "read+write", or "none".
func (r Rights) String() string {
	var s []string
	for i, name := range []string{"read", "write", "signal"} {
		if r&(1<<i) != 0 {
			s = append(s, name)
		}
	}
	if r&^allRights != 0 {
		s = append(s, fmt.Sprintf("%#x", uint8(r&^allRights)))
	}
	if len(s) == 0 {
		return "none"
	}
	return strings.Join(s, "+")
}

// Remote describes memory of another process that this one may use. Expose returns it, and the
// caller sends it to peers. It is valid until it is withdrawn: its generation is never reused.
type Remote struct {
	ID         uint64 // of the region, never 0
	Generation uint64 // of the exposure, never 0; unique within an incarnation
	Base       uint64 // offset of the exposed range in the region, in bytes
	Len        uint64 // bytes of the exposed range
	Rights     Rights
	Loc        Location // on the peer's machine
	Keys       []Key    // one for each path to it, at most MaxKeys
}

// Key is what one path needs to access the memory.
type Key struct {
	Path string // 1 to MaxPath bytes; unique
	Blob []byte // opaque except to the path, at most MaxBlob bytes
}

// Limits of a Remote.
const (
	MaxRemote = 512 // encoded bytes
	MaxKeys   = 8
	MaxPath   = 16
	MaxBlob   = 128
)

// Key returns the blob for path, and whether there is one.
func (r *Remote) Key(path string) ([]byte, bool) {
	for i := range r.Keys {
		if r.Keys[i].Path == path {
			return r.Keys[i].Blob, true
		}
	}
	return nil, false
}

// Has reports whether there is a key for path.
func (r *Remote) Has(path string) bool {
	_, ok := r.Key(path)
	return ok
}

// ErrRemote says that an encoding or a value is not a valid Remote.
var ErrRemote = errors.New("malformed description of remote memory")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrRemote, fmt.Sprintf(format, args...))
}

// Validate checks r; the error wraps ErrRemote.
func (r *Remote) Validate() error {
	switch {
	case r.ID == 0 || r.Generation == 0:
		return malformed("region %#x, generation %d: want neither to be 0", r.ID, r.Generation)
	case r.Base+r.Len < r.Base || r.Base+r.Len > 1<<62:
		return malformed("%d bytes at %d of a region", r.Len, r.Base)
	case len(r.Keys) > MaxKeys:
		return malformed("%d keys, at most %d are allowed", len(r.Keys), MaxKeys)
	}
	if err := r.Rights.Validate(); err != nil {
		return malformed("%v", err)
	}
	if err := r.Loc.Validate(); err != nil || len(r.Loc) > MaxPath {
		return malformed("location %.20q", string(r.Loc))
	}
	size := remoteFixed + len(r.Loc)
	for i, k := range r.Keys {
		if len(k.Path) < 1 || len(k.Path) > MaxPath || len(k.Blob) > MaxBlob {
			return malformed("key %d has a path of %d bytes and a blob of %d; want 1 to %d and at most %d", i,
				len(k.Path), len(k.Blob), MaxPath, MaxBlob)
		}
		for _, o := range r.Keys[:i] {
			if o.Path == k.Path {
				return malformed("two keys for path %q", k.Path)
			}
		}
		size += 2 + len(k.Path) + len(k.Blob)
	}
	if size > MaxRemote {
		return malformed("%d bytes, at most %d are allowed", size, MaxRemote)
	}
	return nil
}

// The encoding, little-endian:
//
//	0 version | 1 rights | 2 number of keys | 3 length of the location | 4 length of the whole (4)
//	8 id | 16 generation | 24 base | 32 length | 40 location
//	then the keys: length of the path (1), of the blob (1), path, blob
const (
	remoteVersion = 1
	remoteFixed   = 40
)

// AppendBinary appends the encoding of r, at most MaxRemote bytes, to b. It implements
// encoding.BinaryAppender. The error is that of Validate.
func (r *Remote) AppendBinary(b []byte) ([]byte, error) {
	if err := r.Validate(); err != nil {
		return b, err
	}
	at := len(b)
	b = append(b, remoteVersion, byte(r.Rights), byte(len(r.Keys)), byte(len(r.Loc)), 0, 0, 0, 0)
	for _, v := range []uint64{r.ID, r.Generation, r.Base, r.Len} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	b = append(b, r.Loc...)
	for _, k := range r.Keys {
		b = append(b, byte(len(k.Path)), byte(len(k.Blob)))
		b = append(append(b, k.Path...), k.Blob...)
	}
	binary.LittleEndian.PutUint32(b[at+4:], uint32(len(b)-at))
	return b, nil
}

// MarshalBinary implements encoding.BinaryMarshaler.
func (r *Remote) MarshalBinary() ([]byte, error) { return r.AppendBinary(nil) }

// UnmarshalBinary reads the result of AppendBinary, all of b: every value has one encoding. It
// keeps nothing of b. It implements encoding.BinaryUnmarshaler. An error wraps ErrRemote, and r is
// then unchanged.
func (r *Remote) UnmarshalBinary(b []byte) error {
	le := binary.LittleEndian
	if len(b) < remoteFixed || len(b) > MaxRemote {
		return malformed("%d bytes, want %d to %d", len(b), remoteFixed, MaxRemote)
	}
	if b[0] != remoteVersion || int64(le.Uint32(b[4:])) != int64(len(b)) {
		return malformed("version %d, length %d of %d bytes", b[0], le.Uint32(b[4:]), len(b))
	}
	n, loc := int(b[2]), int(b[3])
	if n > MaxKeys || loc > len(b)-remoteFixed {
		return malformed("%d keys and a location of %d bytes in %d bytes", n, loc, len(b))
	}
	in := Remote{Rights: Rights(b[1]), ID: le.Uint64(b[8:]), Generation: le.Uint64(b[16:]), Base: le.Uint64(b[24:]),
		Len: le.Uint64(b[32:]), Loc: Location(b[remoteFixed : remoteFixed+loc])}
	rest := b[remoteFixed+loc:]
	for range n {
		if len(rest) < 2 {
			return malformed("it ends in a key")
		}
		path, blob := int(rest[0]), int(rest[1])
		rest = rest[2:]
		if len(rest) < path+blob {
			return malformed("it ends in a key")
		}
		in.Keys = append(in.Keys, Key{Path: string(rest[:path]), Blob: append([]byte{}, rest[path:path+blob]...)})
		rest = rest[path+blob:]
	}
	if len(rest) != 0 {
		return malformed("%d bytes behind the keys", len(rest))
	}
	if err := in.Validate(); err != nil {
		return err
	}
	*r = in
	return nil
}
