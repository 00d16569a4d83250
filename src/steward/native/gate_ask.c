/*
 * Asks Steward's gate over its Unix socket; see gate.h.
 *
 * slurmctld holds locks while it waits, and calls from several threads at once: so there is
 * one deadline for all of connecting, sending and receiving; one that passes is followed by
 * a while in which nobody asks; and when that is over, one thread tries while the others
 * still do not wait. The while ends early where the answer comes that was too late: whoever
 * is next looks for it and does not wait. A failure that costs no time (no socket is there,
 * the gate is being restarted) is not followed by such a while: the next job is asked for
 * again.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "gate.h"

static _Atomic int64_t quiet_until; /* by CLOCK_MONOTONIC; 0 while the gate answers */
static _Atomic int64_t eased_at;    /* when a late answer ended such a while last */
static atomic_int late_fd = -1;	    /* where an answer may yet come that nobody waits for */

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Keeps a connection, or none, in place of the one that is kept. */
static void keep_late(int fd)
{
	int before = atomic_exchange(&late_fd, fd);

	if (before >= 0)
		close(before);
}

void begin_asking(const char *conf_path)
{
	follow_file(conf_path);
	atomic_store(&quiet_until, 0);
	atomic_store(&eased_at, 0);
	keep_late(-1);
}

void end_asking(void)
{
	keep_late(-1);
	forget_file();
}

/* ---- One question ----------------------------------------------------------------------- */

/*
 * Waits until something can be read or written; 0 if it cannot be at the deadline. Where this
 * thread itself comes late, since the host is busy, what is there by then is still taken.
 */
static int wait_for(int fd, short events, int64_t deadline)
{
	struct pollfd poll = { .fd = fd, .events = events };

	for (;;) {
		int64_t rest = deadline - now_ns(), left = rest > 0 ? rest : 0;
		struct timespec time = { left / 1000000000, left % 1000000000 };
		int ready = ppoll(&poll, 1, &time, NULL);

		if (ready > 0)
			return 1;
		if (ready < 0 && errno != EINTR && errno != EAGAIN)
			return 0;
		if (ready == 0 && !left)
			break;
	}
	errno = ETIMEDOUT;
	return 0;
}

/* Connects; where the gate's queue is full, connect(2) itself waits for a place in it. */
static int connect_to(const char *path, int64_t deadline)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int64_t left;
	int failure, fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return -1;
	strcpy(address.sun_path, path);
	while ((left = deadline - now_ns()) > 0) {
		struct timeval time = { left / 1000000000, left % 1000000000 / 1000 + 1 };

		if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time)))
			break;
		if (!connect(fd, (struct sockaddr *)&address, sizeof(address)))
			return fd;
		if (errno != EINTR)
			break;
	}
	/* What the socket's own time-out says is "try again", as if nothing had been waited for. */
	failure = left <= 0 || errno == EAGAIN ? ETIMEDOUT : errno;
	close(fd);
	errno = failure;
	return -1;
}

static int send_all(int fd, const char *text, size_t length, int64_t deadline)
{
	while (length) {
		ssize_t sent = send(fd, text, length, MSG_NOSIGNAL | MSG_DONTWAIT);

		if (sent > 0) {
			text += sent;
			length -= (size_t)sent;
		} else if (sent == 0 || (errno != EAGAIN && errno != EINTR)) {
			return 0;
		} else if (errno == EAGAIN && !wait_for(fd, POLLOUT, deadline)) {
			return 0;
		}
	}
	return 1;
}

/* Receives up to a newline; how many bytes that are, 0 if there is none in time or in room. */
static size_t receive_line(int fd, char *text, size_t room, int64_t deadline)
{
	size_t used = 0;

	while (used < room) {
		ssize_t got;

		if (!wait_for(fd, POLLIN, deadline))
			return 0;
		got = recv(fd, text + used, room - used, MSG_DONTWAIT);
		if (got == 0)
			return 0;
		if (got < 0 && (errno == EAGAIN || errno == EINTR))
			continue;
		if (got < 0)
			return 0;
		if (memchr(text + used, '\n', (size_t)got))
			return used + (size_t)got;
		used += (size_t)got;
	}
	return 0;
}

/*
 * Asks, whatever came of it before; 1 if there is an answer, or else `why` says what is wrong.
 * Where the question went out, its connection is left in `asked_fd`: to be closed.
 */
static int ask_once(const char *path, const struct line *request, int64_t deadline,
		    struct answer *answer, char *why, int *asked_fd)
{
	char *text = malloc(ANSWER_BYTES), reason[128];
	const char *what = NULL;
	size_t length;
	int fd = -1;

	if (!text) {
		what = "cannot be queried: out of memory";
	} else if ((fd = connect_to(path, deadline)) < 0) {
		/* Without the path and the reason nobody finds a directory that is closed. */
		snprintf(why, WHY_BYTES, "at %s is unreachable: %s", path,
			 strerror_r(errno, reason, sizeof(reason)));
	} else if (!send_all(fd, request->text, request->used, deadline)) {
		what = "does not accept the request";
	} else if (!(length = receive_line(fd, text, ANSWER_BYTES, deadline))) {
		what = "does not answer";
		*asked_fd = fd;
	} else if (!read_answer(text, length, answer)) {
		what = "sent an invalid reply";
	}
	if (what)
		snprintf(why, WHY_BYTES, "at %s %s", path, what);
	if (fd >= 0 && *asked_fd != fd)
		close(fd);
	free(text);
	return !*why;
}

/* Whether the answer has come that was too late for its job; never waits. */
static int has_answered_late(void)
{
	int fd = atomic_exchange(&late_fd, -1), none = -1;
	char *text = fd < 0 ? NULL : malloc(ANSWER_BYTES);
	ssize_t got = -1;
	int is_whole, may_come;

	if (fd < 0)
		return 0;
	if (text)
		got = recv(fd, text, ANSWER_BYTES, MSG_PEEK | MSG_DONTWAIT);
	is_whole = got > 0 && memchr(text, '\n', (size_t)got);
	/* Who has hung up answers no more. */
	may_come = got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
	free(text);
	if (is_whole || !may_come || !atomic_compare_exchange_strong(&late_fd, &none, fd))
		close(fd);
	return is_whole;
}

/* Whether it is this thread's to ask. */
static int may_ask(int64_t now, int64_t timeout_ns)
{
	int64_t until = atomic_load(&quiet_until);

	if (!until)
		return 1;
	/* One tries whether the gate is there again; the others go on without it so long. */
	if (now >= until)
		return atomic_compare_exchange_strong(&quiet_until, &until, now + timeout_ns);
	if (!has_answered_late())
		return 0;
	atomic_store(&eased_at, now);
	atomic_store(&quiet_until, 0);
	return 1;
}

/* Has nobody ask for a while: until the answer comes, unless one was late just before, too. */
static void be_quiet(int64_t quiet_ns, int fd)
{
	int64_t now = now_ns(), eased = atomic_load(&eased_at);

	if (eased && now - eased < quiet_ns && fd >= 0) {
		close(fd);
		fd = -1;
	}
	keep_late(fd);
	atomic_store(&quiet_until, now + quiet_ns);
}

enum asked ask_gate(const struct line *request, struct answer *answer, char *why)
{
	const struct asking how = how_to_ask();
	int64_t begun;
	int asked_fd = -1;

	memset(answer, 0, sizeof(*answer));
	*why = 0;
	if (!access(how.off_file, F_OK))
		return SWITCHED_OFF;
	if (request->failed) {
		snprintf(why, WHY_BYTES, "cannot be queried: out of memory");
		return FAILED;
	}
	begun = now_ns();
	if (!may_ask(begun, how.timeout_ns))
		return QUIET;
	if (ask_once(how.socket, request, begun + how.timeout_ns, answer, why, &asked_fd)) {
		keep_late(-1);
		atomic_store(&quiet_until, 0);
		return ANSWERED;
	}
	free_answer(answer);
	if (now_ns() - begun > how.timeout_ns / 10) {
		be_quiet(how.quiet_ns, asked_fd);
	} else {
		if (asked_fd >= 0)
			close(asked_fd);
		atomic_store(&quiet_until, 0);
	}
	return FAILED;
}
