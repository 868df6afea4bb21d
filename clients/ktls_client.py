"""A TLS connection as a plain socket: `dunlin handoff connect` performs the handshake, and the
kernel handles the records. Needs Python 3.9 or newer, and only the standard library.

    sock = ktls_client.connect("host2", 443, bundle="/etc/stunnel/xapi-pool-ca-bundle.pem")
    sock.sendall(b"...")

Never replace a socket that has been used by another connection: fall back only for `Failed`.
"""

import array
import errno
import logging
import os
import socket
import subprocess
import sys

HELPER = "/usr/libexec/xapi/dunlin-ktls-helper/ktls-helper"
CIPHERS = "ECDHE-RSA-AES256-GCM-SHA384:ECDHE-RSA-AES128-GCM-SHA256"
CURVES = "secp384r1"

# linux/tls.h, and TLS record types (RFC 5246, section 6.2.1).
SOL_TLS, TLS_SET_RECORD_TYPE, TLS_GET_RECORD_TYPE = 282, 1, 2
ALERT, DATA = 21, 23
CLOSE_NOTIFY = b"\x01\x00"


class Failed(Exception):
    """No socket was obtained and nothing was sent; the message is one line with the reason."""


def connect(host, port, bundle=None, sni="pool", helper=HELPER, timeout=30, options=()):
    """Returns a socket to `host`. Without `bundle`, any peer is accepted."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    trust = ["--cert-bundle-file", bundle] if bundle else ["--no-verify"]
    arguments = [helper, "--host", host, "--port", str(port), "--sni", sni, *trust]
    arguments += ["--ciphers", CIPHERS, "--curves", CURVES]
    arguments += ["--send-fd", str(theirs.fileno()), *options]
    with ours:
        with theirs:
            try:
                process = subprocess.Popen(
                    arguments,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            except OSError as error:
                raise Failed(f"{helper}: {error.strerror}") from error
        with process:
            try:
                output, reason = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise Failed(f"the helper did not answer within {timeout} s") from error
        if process.returncode != 0:
            raise Failed(reason.strip() or f"the helper ended with {process.returncode}")
        logging.info("%s", output.strip())
        descriptors = array.array("i")
        # The helper has exited, so its message has arrived. Another process that still holds the
        # helper's end sends none, so do not wait for one. `recv_fds` ignores its flags.
        how = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        try:
            _, notes, flags, _ = ours.recvmsg(1, socket.CMSG_LEN(descriptors.itemsize), how)
        except OSError as error:
            raise Failed(f"the helper did not pass one socket: {error.strerror}") from error
        for level, kind, value in notes:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(value)
    if not descriptors or flags & socket.MSG_CTRUNC:
        for one in descriptors:
            os.close(one)
        raise Failed("the helper did not pass one socket")
    return socket.socket(fileno=descriptors[0])


def receive(sock, size):
    """Like `recv`, but also returns no bytes for the peer's close_notify, for which `recv` fails
    with EIO."""
    data, notes, _, _ = sock.recvmsg(size, socket.CMSG_SPACE(1))
    for level, kind, value in notes:
        if (level, kind) == (SOL_TLS, TLS_GET_RECORD_TYPE) and value[0] != DATA:
            if value[0] == ALERT and data[1:] == CLOSE_NOTIFY[1:]:
                return b""
            raise OSError(errno.EIO, f"unexpected TLS record of type {value[0]}: {data.hex()}")
    return data


def end(sock):
    """Sends close_notify and shuts down sending; data of the peer can still be received."""
    sock.sendmsg([CLOSE_NOTIFY], [(SOL_TLS, TLS_SET_RECORD_TYPE, bytes([ALERT]))])
    sock.shutdown(socket.SHUT_WR)


def warn(host, port, reason):
    """Logs that the caller falls back to stunnel."""
    logging.warning(
        "migration-tls=ktls connect failed for %s:%s (%s); "
        "falling back to stunnel for this connection", host, port, reason)


def main(helper, host, port, bundle, *options):
    """Sends standard input, then prints the peer's answer."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        sock = connect(host, int(port), bundle, helper=helper, options=options)
    except Failed as reason:
        warn(host, port, reason)
        return 1
    with sock:
        while data := sys.stdin.buffer.read(1 << 16):
            sock.sendall(data)
        end(sock)
        while data := receive(sock, 1 << 16):
            sys.stdout.buffer.write(data)
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 5:
        sys.exit("usage: ktls_client.py HELPER HOST PORT BUNDLE [OPTION...]")
    sys.exit(main(*sys.argv[1:]))
