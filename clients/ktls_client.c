#define _GNU_SOURCE
#include "ktls_client.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/tls.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef SOL_TLS
#define SOL_TLS 282
#endif

enum { ARGUMENTS = 64 };
/* TLS record types, and the close_notify alert (RFC 5246, sections 6.2.1 and 7.2). */
enum { ALERT = 21, DATA = 23, WARNING = 1, CLOSE_NOTIFY = 0 };

static long long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static void run_helper(const struct ktls_request *request, int channel, int errors)
{
    char number[16];
    const char *arguments[ARGUMENTS];
    int count = 0;
    const char *fixed[] = {
        request->helper, "--host", request->host, "--port", request->port, "--sni", request->sni,
        "--ciphers", request->ciphers, "--curves", request->curves, "--send-fd", number,
    };

    snprintf(number, sizeof number, "%d", channel);
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        arguments[count++] = fixed[i];
    arguments[count++] = request->bundle ? "--cert-bundle-file" : "--no-verify";
    if (request->bundle)
        arguments[count++] = request->bundle;
    for (const char *const *more = request->options; more && *more && count < ARGUMENTS - 1;)
        arguments[count++] = *more++;
    arguments[count] = NULL;
    /* The only descriptor that the helper inherits besides standard input, output and error.
     * Its line of output goes to standard error. */
    if (fcntl(channel, F_SETFD, 0) == 0 && dup2(STDERR_FILENO, STDOUT_FILENO) >= 0
        && dup2(errors, STDERR_FILENO) >= 0)
        execv(request->helper, (char *const *)arguments);
    dprintf(errors, "%s: %s\n", request->helper, strerror(errno));
    _exit(127);
}

/* Reads until the helper closes its end, and keeps the first line. Returns -1 at the deadline.
 * Signals do not interrupt it. */
static int read_reason(int errors, char *reason, size_t bytes, long long until)
{
    size_t length = 0;

    for (;;) {
        struct pollfd ready = { .fd = errors, .events = POLLIN };
        long long left = until - now_ms();
        char scrap[256];
        ssize_t count;
        int is_ready = left > 0 ? poll(&ready, 1, (int)left) : 0;

        if (is_ready < 0 && errno == EINTR)
            continue;
        if (is_ready <= 0) {
            snprintf(reason, bytes, "%s",
                     is_ready < 0 ? strerror(errno) : "the helper did not answer in time");
            return -1;
        }
        if (length + 1 < bytes)
            count = read(errors, reason + length, bytes - 1 - length);
        else
            count = read(errors, scrap, sizeof scrap);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            break;
        if (length + 1 < bytes)
            length += (size_t)count;
    }
    reason[length] = '\0';
    reason[strcspn(reason, "\n")] = '\0';
    return 0;
}

/* Waits for the helper to exit, and kills it at the deadline. Returns -1 if it was killed or if its
 * exit status is not available. Signals do not interrupt it. */
static int wait_for(pid_t helper, int *status, long long until)
{
    int killed = 0;

    for (;;) {
        pid_t ended = waitpid(helper, status, killed ? 0 : WNOHANG);

        if (ended == helper)
            return killed ? -1 : 0;
        /* If SIGCHLD is ignored, the kernel discards the exit status (waitpid(2)). */
        if (ended < 0 && errno != EINTR)
            return -1;
        if (ended == 0 && now_ms() >= until)
            killed = kill(helper, SIGKILL) == 0;
        else if (ended == 0)
            poll(NULL, 0, 1);
    }
}

/* The helper has exited, so its message has arrived. Another process that still holds the helper's
 * end sends none, so do not wait for one. */
static int receive_socket(int channel)
{
    char byte;
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = { .iov_base = &byte, .iov_len = 1 };
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1,
        /* Not sizeof control.room, which is padded and would fit a second descriptor. */
        .msg_control = control.room, .msg_controllen = CMSG_LEN(sizeof(int)),
    };
    struct cmsghdr *header;
    ssize_t count;
    int passed = -1;

    count = recvmsg(channel, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    header = count == 1 ? CMSG_FIRSTHDR(&message) : NULL;
    if (header && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS
        && header->cmsg_len == CMSG_LEN(sizeof passed))
        memcpy(&passed, CMSG_DATA(header), sizeof passed);
    if (passed >= 0 && message.msg_flags & MSG_CTRUNC) {
        close(passed);
        passed = -1;
    }
    return passed;
}

int ktls_connect(const struct ktls_request *request, char *reason, size_t reason_bytes)
{
    long long until = now_ms() + request->timeout_ms;
    int channel[2], errors[2], status = 0, passed = -1, is_late;
    pid_t helper;

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, channel) < 0) {
        snprintf(reason, reason_bytes, "socketpair: %s", strerror(errno));
        return -1;
    }
    if (pipe2(errors, O_CLOEXEC) < 0) {
        snprintf(reason, reason_bytes, "pipe: %s", strerror(errno));
        close(channel[0]);
        close(channel[1]);
        return -1;
    }
    helper = fork();
    if (helper == 0)
        run_helper(request, channel[1], errors[1]);
    snprintf(reason, reason_bytes, "fork: %s", strerror(errno));
    close(channel[1]);
    close(errors[1]);
    if (helper < 0) {
        close(channel[0]);
        close(errors[0]);
        return -1;
    }
    is_late = read_reason(errors[0], reason, reason_bytes, until) < 0;
    if (wait_for(helper, &status, is_late ? 0 : until) < 0 || is_late) {
        if (reason[0] == '\0')
            snprintf(reason, reason_bytes, "the helper did not end in time, or SIGCHLD is ignored");
    /* Use the socket only if the helper succeeded. */
    } else if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        passed = receive_socket(channel[0]);
        if (passed < 0)
            snprintf(reason, reason_bytes, "the helper did not pass one socket");
    } else if (reason[0] == '\0') {
        snprintf(reason, reason_bytes, "the helper failed with status %d", status);
    }
    close(errors[0]);
    close(channel[0]);
    return passed;
}

ssize_t ktls_read(int sock, void *bytes, size_t count)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(1)];
    } control;
    struct iovec part = { .iov_base = bytes, .iov_len = count };
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1,
        .msg_control = control.room, .msg_controllen = sizeof control.room,
    };
    ssize_t length = recvmsg(sock, &message, 0);
    struct cmsghdr *header = length > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    unsigned char kind = DATA;

    /* A socket without kernel TLS has no record type. */
    if (header && header->cmsg_level == SOL_TLS && header->cmsg_type == TLS_GET_RECORD_TYPE)
        kind = *CMSG_DATA(header);
    if (kind == DATA)
        return length;
    if (kind == ALERT && length == 2 && ((unsigned char *)bytes)[1] == CLOSE_NOTIFY)
        return 0;
    errno = EIO;
    return -1;
}

int ktls_end(int sock)
{
    unsigned char alert[] = { WARNING, CLOSE_NOTIFY };
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(1)];
    } control = { .room = { 0 } };
    struct iovec part = { .iov_base = alert, .iov_len = sizeof alert };
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1,
        .msg_control = control.room, .msg_controllen = sizeof control.room,
    };
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);

    header->cmsg_level = SOL_TLS;
    header->cmsg_type = TLS_SET_RECORD_TYPE;
    header->cmsg_len = CMSG_LEN(1);
    *CMSG_DATA(header) = ALERT;
    if (sendmsg(sock, &message, MSG_NOSIGNAL) < 0)
        return -1;
    return shutdown(sock, SHUT_WR);
}
