package pgtest

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/bootstrap/embed"
)

// storeVariable makes a process of the test binary the store, and holds the secret.
const storeVariable = "TUTTI_PGTEST_STORE"

const storeTimeout = 30 * time.Second // to start; a build with -race on a busy machine is slow

// store is the store of this test binary. It is a process and not a server in this one, so that a
// test sees only its own goroutines, log and load. It ends when this process ends in any way,
// because that closes its standard input.
var store struct {
	sync.Mutex
	address, secret string
	life            io.Closer // the other end of its standard input
}

// sharedStore returns the store's address and secret. It starts the store if there is none, or the
// last one does not answer.
func sharedStore(t *testing.T) (address, secret string) {
	t.Helper()
	store.Lock()
	defer store.Unlock()
	if store.address != "" {
		if c, err := net.DialTimeout("tcp", strings.TrimPrefix(store.address, "tutti://"), 5*time.Second); err == nil {
			c.Close()
			return store.address, store.secret
		}
		store.life.Close()
		store.address = ""
	}
	secret = bootstrap.NewSecret()
	address, life, err := startStore(executable(t), secret)
	if err != nil {
		t.Fatalf("pgtest: cannot start the store: %v", err)
	}
	store.address, store.secret, store.life = address, secret, life
	return address, secret
}

func startStore(binary, secret string) (address string, life io.Closer, err error) {
	complaints, err := os.CreateTemp("", "pgtest-store-")
	if err != nil {
		return "", nil, err
	}
	os.Remove(complaints.Name())
	defer complaints.Close()
	out, theirs, err := os.Pipe()
	if err != nil {
		return "", nil, err
	}
	defer out.Close()
	defer theirs.Close()
	cmd := exec.Command(binary)
	cmd.Dir = startDirectory
	cmd.Env = append(os.Environ(), storeVariable+"="+secret)
	cmd.Stdout, cmd.Stderr = theirs, complaints // files, not writers: nothing to copy, and no goroutine
	cmd.SysProcAttr = detached()
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return "", nil, err
	}
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	theirs.Close()
	out.SetReadDeadline(time.Now().Add(storeTimeout))
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		stdin.Close()
		cmd.Process.Kill()
		cmd.Wait()
		said := make([]byte, 4096)
		n, _ := complaints.ReadAt(said, 0)
		return "", nil, fmt.Errorf("its process gave no address within %v: %w: %s", storeTimeout, err,
			strings.TrimSpace(string(said[:n])))
	}
	return strings.TrimSpace(line), stdin, nil
}

// serveStore runs the store's process.
func serveStore(secret string) {
	// Signals of the terminal and of service managers are for the test; this process ends with it.
	signal.Ignore(os.Interrupt)
	os.Exit(func() int {
		raw, err := bootstrap.ParseSecret(secret)
		if err == nil {
			var s *embed.Server
			ctx, cancel := context.WithTimeout(context.Background(), storeTimeout)
			defer cancel()
			if s, err = embed.Start(ctx, embed.Config{Secret: raw}); err == nil {
				fmt.Println(s.Address())
				os.Stdout.Close()
				io.Copy(io.Discard, os.Stdin)
				err = s.Close()
			}
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}())
}
