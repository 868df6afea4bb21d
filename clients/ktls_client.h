/* A TLS connection as a plain socket: `dunlin handoff connect` performs the handshake, and the
 * kernel handles the records. */
#ifndef KTLS_CLIENT_H
#define KTLS_CLIENT_H

#include <stddef.h>
#include <sys/types.h>

struct ktls_request {
    const char *helper;  /* path of the helper program */
    const char *host;
    const char *port;
    const char *bundle;  /* file of trusted certificates; NULL accepts any peer */
    const char *sni;
    const char *ciphers; /* OpenSSL's names, separated by colons */
    const char *curves;
    const char *const *options; /* further arguments, terminated by NULL; or NULL */
    int timeout_ms;
};

/* Returns a socket for read(2) and write(2). On failure returns -1 and one line with the reason:
 * nothing was sent, so the caller may fall back to another transport. Never replace a socket that
 * has been used by another connection. */
int ktls_connect(const struct ktls_request *request, char *reason, size_t reason_bytes);

/* Like read(2), but also returns 0 for the peer's close_notify, for which read(2) fails with EIO.
 * `bytes` must have room for at least two. */
ssize_t ktls_read(int sock, void *bytes, size_t count);

/* Sends close_notify and shuts down sending; data of the peer can still be read. Returns 0, or -1
 * with errno set. */
int ktls_end(int sock);

#endif
