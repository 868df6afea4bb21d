/* A TLS connection that is used as a plain socket: `dunlin handoff connect` makes the handshake
 * and leaves the rest to the kernel. */
#ifndef KTLS_CLIENT_H
#define KTLS_CLIENT_H

#include <stddef.h>
#include <sys/types.h>

struct ktls_request {
    const char *helper;  /* path of the program */
    const char *host;
    const char *port;
    const char *bundle;  /* trusted certificates; NULL believes whoever answers */
    const char *sni;
    const char *ciphers; /* as OpenSSL writes them */
    const char *curves;
    const char *const *options; /* more arguments, ended by NULL, or NULL */
    int timeout_ms;
};

/* A socket for read and write, or -1 and one line that says why: nothing has been sent then, and
 * another way may be taken. A socket that has been used is never replaced by another connection. */
int ktls_connect(const struct ktls_request *request, char *reason, size_t reason_bytes);

/* As read(2), and 0 too where the peer has said that nothing more comes, which read(2) gives as EIO.
 * `bytes` has room for two at least. */
ssize_t ktls_read(int sock, void *bytes, size_t count);

/* Says that nothing more comes from here; what the peer still says can be read. 0, or -1. */
int ktls_end(int sock);

#endif
