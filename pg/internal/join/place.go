package join

import "encoding/binary"

// A Place is what all ranks must know of a rank to choose the same algorithms.
type Place struct {
	Machine     uint64 // equal for ranks that share memory and loopback
	CPUs        uint64 // hash of the numbers of the processors that the rank may run on
	Cores       int    // their number
	Maps        bool   // its memory can be mapped by ranks of its machine, see User
	User        uint32 // effective user id, which decides who may map: see ident.MayTalk
	Exchanges   bool   // its devices combine short vectors with those of other ranks
	Table       uint64 // hash of the table of algorithms
	Incarnation uint64
}

// PlaceSize is the size of an encoded Place in bytes.
const PlaceSize = 48

// Encode writes p to b, which has at least PlaceSize bytes, little-endian.
func (p Place) Encode(b []byte) {
	binary.LittleEndian.PutUint64(b, p.Machine)
	binary.LittleEndian.PutUint64(b[8:], p.CPUs)
	binary.LittleEndian.PutUint32(b[16:], uint32(p.Cores))
	if p.Maps {
		b[20] = 1
	}
	if p.Exchanges {
		b[21] = 1
	}
	binary.LittleEndian.PutUint64(b[24:], p.Table)
	binary.LittleEndian.PutUint64(b[32:], p.Incarnation)
	binary.LittleEndian.PutUint32(b[40:], p.User)
}

// DecodePlace decodes the result of Encode. Every content is a Place.
func DecodePlace(b []byte) Place {
	return Place{Machine: binary.LittleEndian.Uint64(b), CPUs: binary.LittleEndian.Uint64(b[8:]),
		Cores: max(1, int(binary.LittleEndian.Uint32(b[16:]))),
		Maps:  b[20] == 1, Exchanges: b[21] == 1, Table: binary.LittleEndian.Uint64(b[24:]),
		Incarnation: binary.LittleEndian.Uint64(b[32:]), User: binary.LittleEndian.Uint32(b[40:])}
}

// A CPUSet is a set of processors of a machine. Launchers give each rank processors of its own, or
// several ranks the same, so that different sets are taken to be disjoint.
type CPUSet struct {
	Machine, CPUs uint64
}

// CPUSet returns the processors that the rank may run on.
func (p Place) CPUSet() CPUSet { return CPUSet{p.Machine, p.CPUs} }
