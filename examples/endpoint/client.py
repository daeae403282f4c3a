#!/usr/bin/env python3
"""A client of a Tutti endpoint, which needs only Python. docs/wire.md describes the protocol. Connections are plain."""
import argparse, contextlib, hmac, os, re, secrets, socket, struct, sys

(HELLO, PING, PONG, BYE, STAY, GET, PUT, DATA, DONE, CANCEL, LOOKUP, LIST, WATCH, REGION, GONE, MESSAGE, OFFER, PULL,
 PIECE, SENT, TAKEN, CREDIT, DROPPED, INQUIRE, STATE) = range(0x10, 0x29)
OK, CANCELLED, NO_REGION, DENIED = 0, 1, 2, 8
CODES = ["ok", "cancelled", "no such region", "the region was unregistered", "the region does not allow that",
         "out of the region's bounds", "the region's file or device failed", "too many requests", "refused"]
WINDOW, LONGEST, EACH, PAGE = 64 << 10, 16 << 10, 128, 1024  # bytes unread, of a whole message, more for each; a List
VERSION, BULK = 2, 47  # of the frames; bytes of the extension of Put, Data, Message and Piece
ADDRESS = r"\[?([\w%:-]{1,63}(?:\.[\w%:-]{1,63})*\.?)\]?:([0-9]{1,5})"

class Error(Exception): """What a user should read."""

def credential(text):
    """Returns the client's name, b"" for the job's secret, and the key."""
    if text.startswith("client:"):
        if m := re.fullmatch(r"client:([A-Za-z0-9._-]{1,32}):([0-9A-Fa-f]{64})", text):
            return m[1].encode(), bytes.fromhex(m[2])
        raise Error("a client's credential is client:NAME:KEY with 64 hex digits; this one is not")
    key = bytes.fromhex(text) if re.fullmatch(r"([0-9A-Fa-f]{2}){16,}", text) else os.fsencode(text)
    if len(key) < 16:
        raise Error("no secret, or one of less than 16 bytes: set TUTTI_SECRET, or use --secret-file")
    return b"", key

class Client:
    """A connection to an endpoint, which ends it 5 minutes after the last call, unless its program says otherwise.
    From then on, and once an answer took longer than timeout, calls raise Error or OSError: make another Client."""
    def __init__(self, address, secret, timeout=30):
        if not (m := re.fullmatch(ADDRESS, address, re.ASCII)) or not 0 < int(m[2]) < 65536:
            raise Error(f"{address!r} is not HOST:PORT")
        self.requests = self.sent = self.received = 0  # number of the last request, message sent and message received
        self.credit, self.kept = 0, []  # what was received of Message frames; frames that no call waited for
        self.sock = socket.create_connection((m[1], int(m[2])), timeout)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # recv fails if the endpoint's host is gone
        for option in {"TCP_KEEPIDLE", "TCP_KEEPINTVL"} & set(dir(socket)):
            self.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), 15)  # seconds
        self.input = self.sock.makefile("rb")
        identity, session = secrets.randbits(63) + 1, secrets.randbits(63) + 1
        self.handshake(*credential(secret), identity)
        self.put_frame(HELLO, session, struct.pack("<HBBIIIQQ", VERSION, 0, 1, 1024, WINDOW, LONGEST, identity, 0))
        version, _, self.room, self.longest = struct.unpack_from("<HHxxxxII", self.wait(session, HELLO)[2])
        if version != VERSION:
            raise Error(f"the endpoint's frames are of version {version}, and this client's of version {VERSION}")

    def handshake(self, name, key, identity):
        """Proves to the endpoint that we know the key, and has it prove the same."""
        def mac(label):
            return hmac.digest(key, struct.pack("<I", len(label)) + label + b"\x08\0\0\0endpoint" + said, "sha256")
        wrong = Error("not authenticated: this is no endpoint, or one with another secret than this client")
        said = name.ljust(32, b"\0") + secrets.token_bytes(32)
        self.sock.sendall(b"tutti/3\n" + said + mac(b"open"))
        if re.fullmatch(rb"tutti/[124-9A-Z]\r", magic := self.take(8)):
            raise Error(f"the endpoint speaks {magic[:7].decode()}, and this client tutti/3")
        if magic != b"tutti/3\r" or (nonce := self.take(32)) == bytes(32):
            raise wrong
        hello = struct.pack("<IIQQQ", 0, 0, identity, 0, 1)
        said += nonce + hello
        self.sock.sendall(mac(b"dial") + hello)
        proof, verdict = self.take(32), self.take(4)
        said += verdict + (text := self.take(int.from_bytes(verdict[2:], "little")))
        if not hmac.compare_digest(proof, mac(b"accept")):
            raise wrong
        if verdict[0] != OK:
            raise Error(f"refused: {text.decode(errors='replace')}")

    def close(self):
        """Tells the endpoint that no connection was lost, and closes it."""
        with self.sock, self.input, contextlib.suppress(OSError):
            self.put_frame(BYE, 0)

    def take(self, n):
        if len(b := self.input.read(n)) < n:
            raise Error("the endpoint closed the connection")
        return b

    def put_frame(self, op, address, ext=b"", payload=b""):
        ext = ext.ljust(BULK if op in (PUT, MESSAGE, PIECE) else 0, b"\0")
        self.sock.sendall(struct.pack("<QQB", len(ext) + len(payload), address, op) + ext + payload)

    def wait(self, address, *ops):
        """Returns the next frame with one of ops and that address, None: any, as opcode, address and the rest."""
        while True:
            for i, (op, of, _) in enumerate(self.kept):
                if op in ops and address in (None, of):
                    return self.kept.pop(i)
            size, of, op = struct.unpack("<QQB", self.take(17))
            body = self.take(size)
            if op in (PING, BYE):
                self.put_frame(PONG if op == PING else STAY, of)
            elif op in (LOOKUP, INQUIRE):  # there are no regions here, and no state
                self.put_frame(DONE, of, struct.pack("<BQ", NO_REGION if op == LOOKUP else DENIED, 0))
            elif op != CREDIT:  # without its room in the window more messages are offered
                self.kept.append((op, of, body))

    def check(self, frame, what):
        """Returns the bytes of a Done or a Taken, or raises an error if it has another code than OK."""
        code, n = struct.unpack_from("<BQ", frame[2])
        if code != OK:
            raise Error(f"{what}: {CODES[code]} {frame[2][9:].decode(errors='replace')}".rstrip())
        return n

    def request(self, op, ext=b"", payload=b""):
        """Sends a request and returns its number."""
        self.requests += 1
        self.put_frame(op, self.requests, ext, payload)
        return self.requests

    def gather(self, n, address, op, *ends):
        """Returns the n bytes of frames with op, None if they have not come so, and the frame that ends them."""
        data, got = bytearray(n), 0
        while (end := self.wait(address, op, *ends))[0] == op:
            at, payload = struct.unpack_from("<Q", end[2])[0], end[2][BULK:]
            data[at:at + len(payload)] = payload
            got += len(payload)
        return bytes(data) if got == n == len(data) else None, end

    def regions(self):
        """Yields name, length and rights (1: read, 2: write, 3: both) of the regions."""
        name, count = b"", PAGE
        while count == PAGE:
            number = self.request(LIST, struct.pack("<I", PAGE), name)
            while (frame := self.wait(number, REGION, DONE))[0] == REGION:
                name = frame[2][25:]
                yield name, *struct.unpack_from("<QB", frame[2], 16)
            count = self.check(frame, "list")

    def lookup(self, region):
        """Returns a region's number and generation, as Get and Put have them, and its length."""
        if not 0 < len(name := os.fsencode(region)) < 256:
            raise Error(f"{region:.20}: the name of a region has 1 to 255 bytes")
        frame = self.wait(self.request(LOOKUP, payload=name), REGION, DONE)
        if frame[0] == DONE:  # it has a code other than OK
            self.check(frame, region)
        return frame[2][:16], struct.unpack_from("<Q", frame[2], 16)[0]

    def extent(self, region, offset, length):
        """Returns a range of a region as Get and Put have it, and its length: without one, all that follows."""
        where, total = self.lookup(region)
        length = max(total - offset, 0) if length is None else length
        if not 0 <= offset <= total - length <= total:
            raise Error(f"{region}: {CODES[5]}: {length} bytes at offset {offset} of {total}")
        return where + struct.pack("<QQ", offset, length), length

    def read(self, region, offset=0, length=None):
        """Returns bytes of a region, without a length all from the offset on."""
        where, length = self.extent(region, offset, length)
        number = self.request(GET, where)
        data, end = self.gather(length, number, DATA, DONE)
        self.check(end, region)
        if data is None:
            raise Error(f"{region}: not all bytes have come")
        return data

    def write(self, region, offset, data):
        """Writes to a region, and returns when the bytes are there."""
        where, _ = self.extent(region, offset, len(data))
        self.check(self.wait(self.request(PUT, where, data), DONE), region)

    def send(self, message):
        """Sends a message, and returns when the endpoint has it."""
        self.sent += 1
        if len(message) <= min(self.longest, self.room - EACH):
            self.room -= len(message) + EACH
            self.put_frame(MESSAGE, self.sent, payload=message)
        else:
            self.put_frame(OFFER, self.sent, struct.pack("<Q", len(message)))
        while (frame := self.wait(self.sent, PULL, TAKEN))[0] == PULL:
            at, n = struct.unpack("<QQ", frame[2])
            self.put_frame(PIECE, self.sent, struct.pack("<Q", at), message[at:at + n])
            self.put_frame(SENT, self.sent)
        self.check(frame, "send")

    def recv(self):
        """Waits for the next message, however long that takes, and returns it."""
        timeout = self.sock.gettimeout()
        while True:
            self.sock.settimeout(None)
            try:
                op, number, body = self.wait(None, MESSAGE, OFFER, DROPPED)
            finally:
                self.sock.settimeout(timeout)
            if number <= self.received:  # this is another Dropped of a message that has ended
                continue
            self.received = number
            data, n = (body[BULK:], 0) if op == MESSAGE else (b"", int.from_bytes(body, "little"))
            if n > 0:
                self.put_frame(PULL, number, struct.pack("<QQ", 0, n))
                data, (op, _, _) = self.gather(n, number, PIECE, SENT, DROPPED)
            code = CANCELLED if op == DROPPED or data is None else OK
            self.put_frame(TAKEN, number, struct.pack("<BQ", code, len(data) if code == OK else 0))
            if op == MESSAGE:
                self.credit += len(data) + EACH
                self.put_frame(CREDIT, self.credit)
            if code == OK:
                return data

def put(data):
    """Writes to the standard output. A file or a pipe may take less than it is given at once."""
    data = memoryview(data)
    while data:
        data = data[os.write(1, data):]

def run(client, args):
    """Does what the command says."""
    if args.command == "ls":
        for name, length, rights in client.regions():
            put(b"%s %12d %s\n" % ([b"--", b"r-", b"-w", b"rw"][rights & 3], length, name))
    elif args.command == "read":
        put(client.read(args.REGION, args.OFF or 0, args.LEN))
    elif args.command == "write":
        client.write(args.REGION, args.OFF, open(args.FILE, "rb").read())
    elif args.command == "send":
        client.send(os.fsencode(args.TEXT))
    else:
        put(client.recv())

def main():
    parser = argparse.ArgumentParser(description="Uses a Tutti endpoint. read and recv write to standard output.")
    parser.add_argument("--secret-file", help="has the job's secret or a client's credential; else TUTTI_SECRET has")
    parser.add_argument("address", metavar="HOST:PORT")
    commands = parser.add_subparsers(dest="command", required=True)
    for usage in "ls", "read REGION [OFF] [LEN]", "write REGION OFF FILE", "send TEXT", "recv":
        command = commands.add_parser(usage.split()[0])
        for a in usage.split()[1:]:
            kind, many = int if a.strip("[]") in ("OFF", "LEN") else str, "?" if a[0] == "[" else None
            command.add_argument(a.strip("[]"), type=kind, nargs=many)
    args = parser.parse_args()
    try:
        os.fstat(1)  # it is open: else the connection could get its number
        secret = open(args.secret_file, "rb").read() if args.secret_file else os.environb.get(b"TUTTI_SECRET", b"")
        with contextlib.closing(Client(args.address, os.fsdecode(secret.rstrip(b"\r\n")))) as client:
            run(client, args)
    except (Error, OSError, MemoryError) as e:
        sys.exit(f"client.py: {str(e) or type(e).__name__}")

if __name__ == "__main__":
    main()
