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
/* What a record of TLS can be, and the alert that is an end (RFC 5246, sections 6.2.1 and 7.2). */
enum { ALERT = 21, DATA = 23, WARNING = 1, CLOSE_NOTIFY = 0 };

static long long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static void run_helper(const struct ktls_request *request, int desk, int errors)
{
    char number[16];
    const char *words[ARGUMENTS];
    int count = 0;
    const char *fixed[] = {
        request->helper, "--host", request->host, "--port", request->port, "--sni", request->sni,
        "--ciphers", request->ciphers, "--curves", request->curves, "--send-fd", number,
    };

    snprintf(number, sizeof number, "%d", desk);
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        words[count++] = fixed[i];
    words[count++] = request->bundle ? "--cert-bundle-file" : "--no-verify";
    if (request->bundle)
        words[count++] = request->bundle;
    for (const char *const *more = request->options; more && *more && count < ARGUMENTS - 1;)
        words[count++] = *more++;
    words[count] = NULL;
    /* The one descriptor of ours that the helper is to have; its line goes where errors go. */
    if (fcntl(desk, F_SETFD, 0) == 0 && dup2(STDERR_FILENO, STDOUT_FILENO) >= 0
        && dup2(errors, STDERR_FILENO) >= 0)
        execv(request->helper, (char *const *)words);
    dprintf(errors, "%s: %s\n", request->helper, strerror(errno));
    _exit(127);
}

/* Reads one line until the helper has closed its end; -1 when that takes too long, whatever signals
 * come meanwhile. */
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

/* Waits until the helper has ended, whatever signals come meanwhile; one that does not in time is
 * killed. -1 where it did not end by itself, or its end cannot be learned. */
static int wait_for(pid_t helper, int *status, long long until)
{
    int killed = 0;

    for (;;) {
        pid_t ended = waitpid(helper, status, killed ? 0 : WNOHANG);

        if (ended == helper)
            return killed ? -1 : 0;
        /* Nobody is told of children whose SIGCHLD is ignored. */
        if (ended < 0 && errno != EINTR)
            return -1;
        if (ended == 0 && now_ms() >= until)
            killed = kill(helper, SIGKILL) == 0;
        else if (ended == 0)
            poll(NULL, 0, 1);
    }
}

/* The helper has ended: what it has passed is there. Whoever still holds its end passes nothing. */
static int receive_socket(int desk)
{
    char byte;
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = { .iov_base = &byte, .iov_len = 1 };
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1,
        /* The room is a multiple of eight, which would take a second one. */
        .msg_control = control.room, .msg_controllen = CMSG_LEN(sizeof(int)),
    };
    struct cmsghdr *header;
    ssize_t count;
    int passed = -1;

    count = recvmsg(desk, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
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
    int desk[2], errors[2], status = 0, passed = -1, is_late;
    pid_t helper;

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, desk) < 0) {
        snprintf(reason, reason_bytes, "socketpair: %s", strerror(errno));
        return -1;
    }
    if (pipe2(errors, O_CLOEXEC) < 0) {
        snprintf(reason, reason_bytes, "pipe: %s", strerror(errno));
        close(desk[0]);
        close(desk[1]);
        return -1;
    }
    helper = fork();
    if (helper == 0)
        run_helper(request, desk[1], errors[1]);
    snprintf(reason, reason_bytes, "no process can be had: %s", strerror(errno));
    close(desk[1]);
    close(errors[1]);
    if (helper < 0) {
        close(desk[0]);
        close(errors[0]);
        return -1;
    }
    is_late = read_reason(errors[0], reason, reason_bytes, until) < 0;
    if (wait_for(helper, &status, is_late ? 0 : until) < 0 || is_late) {
        if (reason[0] == '\0')
            snprintf(reason, reason_bytes, "the helper did not end in time, or SIGCHLD is ignored");
    /* Only of a helper that ended well is the socket taken. */
    } else if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
        passed = receive_socket(desk[0]);
        if (passed < 0)
            snprintf(reason, reason_bytes, "the helper did not pass one socket");
    } else if (reason[0] == '\0') {
        snprintf(reason, reason_bytes, "the helper failed with status %d", status);
    }
    close(errors[0]);
    close(desk[0]);
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

    /* A socket behind which a process seals has none. */
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
