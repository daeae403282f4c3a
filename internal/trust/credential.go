package trust

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// clientForm begins the textual form of a client's credential.
const clientForm = "client:"

// Credential is what a program proves to endpoints: the job's secret, or the key of a client.
type Credential struct {
	Client string // name of the client; "": Key is the job's secret
	Key    []byte
}

// ParseCredential reads a credential from its textual form. That of a client is client:NAME:KEY, as
// NewCredential writes it, with the key in hex digits. Everything else is a job's secret: see
// ParseSecret. The error contains nothing of the text.
func ParseCredential(text string) (Credential, error) {
	rest, is := strings.CutPrefix(text, clientForm)
	if !is {
		secret, err := ParseSecret(text)
		if err != nil {
			return Credential{}, err
		}
		return Credential{Key: secret}, nil
	}
	name, digits, _ := strings.Cut(rest, ":")
	key, err := hex.DecodeString(digits)
	if err != nil || len(key) != sha256.Size || CheckClient(name) != nil {
		return Credential{}, fmt.Errorf("a client's credential is %sNAME:KEY with a name of 1 to %d letters, digits, "+
			"'.', '_', '-', and a key of %d hex digits; this one is not", clientForm, MaxClient, 2*sha256.Size)
	}
	return Credential{Client: name, Key: key}, nil
}

// NewCredential returns the credential of a client of the job with that secret, in the textual form
// of ParseCredential. It is always the same. It opens endpoints, but no rank's service, and the
// secret does not follow from it.
func NewCredential(secret []byte, client string) (string, error) {
	key, err := Derive(secret, client)
	if err != nil {
		return "", err
	}
	return clientForm + client + ":" + hex.EncodeToString(key), nil
}

// ParseSecret reads a job's secret from its textual form: hex digits of at least MinSecret
// bytes, or any other text of that length, taken literally, but no client's credential: see
// Credential. The error contains neither.
func ParseSecret(text string) ([]byte, error) {
	if strings.HasPrefix(text, clientForm) {
		what := "this begins like the credential of a client (" + clientForm + ")"
		if c, err := ParseCredential(text); err == nil {
			what = "this is the credential of client " + c.Client
		}
		return nil, errors.New(what + ": a rank needs the job's own secret")
	}
	if b, err := hex.DecodeString(text); err == nil && len(b) >= MinSecret {
		return b, nil
	}
	if len(text) < MinSecret {
		return nil, fmt.Errorf("a secret of %d bytes is too short: expected at least %d bytes of text or %d hex digits",
			len(text), MinSecret, 2*MinSecret)
	}
	return []byte(text), nil
}
