/* Connects while a signal arrives every millisecond, and prints the result and the number of signals:
 * interrupted HELPER TIMEOUT_MS [ignoring] */
#define _GNU_SOURCE
#include "ktls_client.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>

static volatile sig_atomic_t arrived;

static void count(int signal)
{
    (void)signal;
    arrived++;
}

int main(int argc, char **argv)
{
    /* Without SA_RESTART, so that signals interrupt every wait. */
    struct sigaction action = { .sa_handler = count };
    struct itimerval often = { .it_interval.tv_usec = 1000, .it_value.tv_usec = 1000 };
    struct itimerval never = { 0 };
    char reason[512];
    int sock;

    if (argc < 3)
        return 2;
    struct ktls_request request = {
        .helper = argv[1], .host = "192.0.2.1", .port = "443", .sni = "pool",
        .ciphers = "none", .curves = "none", .timeout_ms = atoi(argv[2]),
    };
    if (argc > 3)
        signal(SIGCHLD, SIG_IGN);
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    sock = ktls_connect(&request, reason, sizeof reason);
    setitimer(ITIMER_REAL, &never, NULL);
    printf("%s; %d signals\n", sock < 0 ? reason : "a socket", (int)arrived);
    return 0;
}
