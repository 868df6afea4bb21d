/* Sends standard input over a TLS connection that is a plain socket here, then prints the peer's
 * answer: ktls_copy HELPER HOST PORT BUNDLE [OPTION...] */
#include "ktls_client.h"

#include <stdio.h>
#include <unistd.h>

static int copy(ssize_t (*get)(int, void *, size_t), int from, int to)
{
    static char bytes[1 << 16];
    ssize_t count;

    while ((count = get(from, bytes, sizeof bytes)) > 0) {
        for (ssize_t done = 0; done < count;) {
            ssize_t written = write(to, bytes + done, (size_t)(count - done));
            if (written < 0)
                return -1;
            done += written;
        }
    }
    return (int)count;
}

int main(int argc, char **argv)
{
    char reason[512];
    int sock;

    if (argc < 5) {
        fprintf(stderr, "ktls_copy HELPER HOST PORT BUNDLE [OPTION...]\n");
        return 2;
    }
    struct ktls_request request = {
        .helper = argv[1],
        .host = argv[2],
        .port = argv[3],
        .bundle = argv[4],
        .sni = "pool",
        .ciphers = "ECDHE-RSA-AES256-GCM-SHA384:ECDHE-RSA-AES128-GCM-SHA256",
        .curves = "secp384r1",
        .options = (const char *const *)argv + 5,
        .timeout_ms = 30000,
    };
    sock = ktls_connect(&request, reason, sizeof reason);
    if (sock < 0) {
        fprintf(stderr, "migration-tls=ktls connect failed for %s:%s (%s); "
                "falling back to stunnel for this connection\n",
                request.host, request.port, reason);
        return 1;
    }
    if (copy(read, STDIN_FILENO, sock) < 0 || ktls_end(sock) < 0
        || copy(ktls_read, sock, STDOUT_FILENO) < 0) {
        perror("ktls_copy");
        return 1;
    }
    return 0;
}
