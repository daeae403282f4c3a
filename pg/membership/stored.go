package membership

import (
	"encoding/binary"
	"fmt"
)

// StoreKeys begins all keys of the membership in a job's store.
const StoreKeys = "membership/"

// ViewKey is the key of a job's view in its store. The value is EncodeStored's.
const ViewKey = StoreKeys + "view"

// EncodeStored returns a view as stored: first, the incarnation of the lowest slot of the job's
// first view, which separates jobs of one name, and the encoded view.
func EncodeStored(first uint64, v View) []byte {
	return append(binary.BigEndian.AppendUint64(nil, first), v.Encode()...)
}

// DecodeStored is the inverse of EncodeStored. It is as strict as DecodeView.
func DecodeStored(b []byte) (first uint64, v View, err error) {
	if len(b) < 8 {
		return 0, v, fmt.Errorf("key %s: %d bytes, want at least 8", ViewKey, len(b))
	}
	v, err = DecodeView(b[8:])
	return binary.BigEndian.Uint64(b), v, err
}
