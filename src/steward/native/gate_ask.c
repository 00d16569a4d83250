/*
 * Asks Steward's gate over its Unix socket, and knows what holds where it does not answer;
 * see gate.h.
 *
 * slurmctld holds locks while it waits, and calls from several threads at once: so there is
 * one deadline for all of connecting, sending and receiving; one that passes is followed by
 * a while in which nobody asks; and when that is over, one thread tries while the others
 * still do not wait. A failure that costs no time (no socket is there, the gate is being
 * restarted) is not followed by such a while: the next job is asked for again.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "gate.h"

enum {
	NAME_BYTES = 128,
	CONF_BYTES = 1 << 20,
	SOCKET_BYTES = sizeof(((struct sockaddr_un *)0)->sun_path),
	MOST_TIMEOUT_MS = 1000,
	MOST_QUIET_S = 3600,
};

struct rule {
	char name[NAME_BYTES];
	int is_denied;
};

/* What the site decided, as the gate has written it down. */
struct conf {
	char socket[SOCKET_BYTES];
	char off_file[PATH_MAX];
	char default_partition[NAME_BYTES];
	int64_t timeout_ns, quiet_ns;
	int is_denied;
	struct rule *rules;
	size_t rule_count;
};

static pthread_mutex_t conf_lock = PTHREAD_MUTEX_INITIALIZER;
static char conf_path[PATH_MAX]; /* these four under conf_lock */
static struct conf conf;
static struct stat conf_seen;

static _Atomic int64_t quiet_until; /* by CLOCK_MONOTONIC; 0 while the gate answers */

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- The site's policy ------------------------------------------------------------------ */

static void take_defaults(struct conf *new)
{
	memset(new, 0, sizeof(*new));
	strcpy(new->socket, "/run/steward/gate.sock");
	strcpy(new->off_file, "/run/steward/gate.off");
	new->timeout_ns = 100 * 1000000LL;
	new->quiet_ns = 10 * 1000000000LL;
}

/* Copies a word that fits; one that does not is passed over. */
static void take_text(char *to, size_t room, const char *from)
{
	if (strlen(from) < room)
		strcpy(to, from);
}

/* Takes a number that stands in a file, of a thousandth of `unit_ns` or more. */
static void take_time(int64_t *to, const char *from, double unit_ns, double most)
{
	char *end;
	double value = strtod(from, &end);

	if (end != from && !*end && value >= 0 && value <= most)
		*to = (int64_t)(value * unit_ns);
}

static int read_policy(const char *word, int *is_denied)
{
	if (!strcmp(word, "deny") || !strcmp(word, "allow")) {
		*is_denied = *word == 'd';
		return 1;
	}
	return 0;
}

static void take_rule(struct conf *new, const char *name, const char *policy)
{
	struct rule *rules = new->rules;
	int is_denied;

	if (strlen(name) >= NAME_BYTES || !read_policy(policy, &is_denied))
		return;
	rules = realloc(rules, (new->rule_count + 1) * sizeof(*rules));
	if (!rules)
		return;
	new->rules = rules;
	strcpy(rules[new->rule_count].name, name);
	rules[new->rule_count++].is_denied = is_denied;
}

/* Takes one line; what it does not know it passes over. */
static void take_line(struct conf *new, char *line)
{
	char *left = NULL, *words[3] = { NULL, NULL, NULL };

	line[strcspn(line, "#\r\n")] = 0;
	for (int i = 0; i < 3; i++)
		words[i] = strtok_r(i ? NULL : line, " \t", &left);
	if (!words[0] || !words[1])
		return;
	if (!strcmp(words[0], "partition") && words[2])
		take_rule(new, words[1], words[2]);
	else if (!strcmp(words[0], "policy"))
		(void)read_policy(words[1], &new->is_denied);
	else if (!strcmp(words[0], "default_partition"))
		take_text(new->default_partition, NAME_BYTES, words[1]);
	else if (!strcmp(words[0], "socket"))
		take_text(new->socket, SOCKET_BYTES, words[1]);
	else if (!strcmp(words[0], "off_file"))
		take_text(new->off_file, PATH_MAX, words[1]);
	else if (!strcmp(words[0], "timeout_ms"))
		take_time(&new->timeout_ns, words[1], 1e6, MOST_TIMEOUT_MS);
	else if (!strcmp(words[0], "quiet_s"))
		take_time(&new->quiet_ns, words[1], 1e9, MOST_QUIET_S);
}

static void read_conf(FILE *file)
{
	struct conf new;
	char *line = NULL;
	size_t room = 0, total = 0;
	ssize_t length;

	take_defaults(&new);
	while ((length = getline(&line, &room, file)) > 0 && (total += (size_t)length) < CONF_BYTES)
		take_line(&new, line);
	free(line);
	free(conf.rules);
	conf = new;
}

/*
 * Reads the file again where it is another one. Where it is gone, what it said still holds:
 * a daemon that ends may take it along, and with it goes nobody's policy.
 */
static void follow_conf(void)
{
	struct stat seen;
	FILE *file;

	if (!*conf_path || stat(conf_path, &seen) ||
	    (seen.st_mtim.tv_sec == conf_seen.st_mtim.tv_sec &&
	     seen.st_mtim.tv_nsec == conf_seen.st_mtim.tv_nsec &&
	     seen.st_ino == conf_seen.st_ino && seen.st_size == conf_seen.st_size) ||
	    !S_ISREG(seen.st_mode) || !(file = fopen(conf_path, "re")))
		return;
	conf_seen = seen;
	read_conf(file);
	fclose(file);
}

void begin_asking(const char *path)
{
	pthread_mutex_lock(&conf_lock);
	take_defaults(&conf);
	memset(&conf_seen, 0, sizeof(conf_seen));
	*conf_path = 0;
	take_text(conf_path, sizeof(conf_path), path);
	follow_conf();
	pthread_mutex_unlock(&conf_lock);
	atomic_store(&quiet_until, 0);
}

void end_asking(void)
{
	pthread_mutex_lock(&conf_lock);
	free(conf.rules);
	take_defaults(&conf);
	pthread_mutex_unlock(&conf_lock);
}

static int is_rule_denied(const char *name, size_t length)
{
	int denied = conf.is_denied;

	for (size_t i = 0; i < conf.rule_count; i++)
		if (strlen(conf.rules[i].name) == length && !memcmp(conf.rules[i].name, name, length))
			denied = conf.rules[i].is_denied;
	return denied;
}

int is_denied(const char *partitions)
{
	int denied = 0;

	pthread_mutex_lock(&conf_lock);
	if (!partitions || !*partitions)
		partitions = conf.default_partition;
	for (;;) {
		size_t length = strcspn(partitions, ",");

		denied |= is_rule_denied(partitions, length);
		if (!partitions[length])
			break;
		partitions += length + 1;
	}
	pthread_mutex_unlock(&conf_lock);
	return denied;
}

/* ---- One question ----------------------------------------------------------------------- */

/* Waits until something can be read or written; 0 at the deadline. */
static int wait_for(int fd, short events, int64_t deadline)
{
	struct pollfd poll = { .fd = fd, .events = events };
	int64_t left;

	while ((left = deadline - now_ns()) > 0) {
		struct timespec time = { left / 1000000000, left % 1000000000 };
		int ready = ppoll(&poll, 1, &time, NULL);

		if (ready > 0)
			return 1;
		if (ready < 0 && errno != EINTR && errno != EAGAIN)
			return 0;
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

/* Asks, whatever came of it before; 1 if there is an answer, or else `why` says what is wrong. */
static int ask_once(const char *path, const struct line *request, int64_t deadline,
		    struct answer *answer, char *why)
{
	char *text = malloc(ANSWER_BYTES), reason[128];
	const char *what = NULL;
	size_t length;
	int fd = -1;

	if (!text) {
		what = "has no memory";
	} else if ((fd = connect_to(path, deadline)) < 0) {
		/* Without the path and the reason nobody finds a directory that is closed. */
		snprintf(why, WHY_BYTES, "at %s cannot be reached: %s", path,
			 strerror_r(errno, reason, sizeof(reason)));
	} else if (!send_all(fd, request->text, request->used, deadline)) {
		what = "does not listen";
	} else if (!(length = receive_line(fd, text, ANSWER_BYTES, deadline))) {
		what = "does not answer";
	} else if (!read_answer(text, length, answer)) {
		what = "answers what cannot be understood";
	}
	if (what)
		snprintf(why, WHY_BYTES, "at %s %s", path, what);
	if (fd >= 0)
		close(fd);
	free(text);
	return !*why;
}

/* Whether it is this thread's to ask. */
static int may_ask(int64_t now, int64_t timeout_ns)
{
	int64_t until = atomic_load(&quiet_until);

	if (!until)
		return 1;
	/* One tries whether the gate is there again; the others go on without it so long. */
	return now >= until && atomic_compare_exchange_strong(&quiet_until, &until, now + timeout_ns);
}

enum asked ask_gate(const struct line *request, struct answer *answer, char *why)
{
	char path[SOCKET_BYTES], off_file[PATH_MAX];
	int64_t timeout_ns, quiet_ns, begun;

	memset(answer, 0, sizeof(*answer));
	*why = 0;
	pthread_mutex_lock(&conf_lock);
	follow_conf();
	strcpy(path, conf.socket);
	strcpy(off_file, conf.off_file);
	timeout_ns = conf.timeout_ns;
	quiet_ns = conf.quiet_ns;
	pthread_mutex_unlock(&conf_lock);
	if (!access(off_file, F_OK))
		return SWITCHED_OFF;
	if (request->failed) {
		snprintf(why, WHY_BYTES, "is not asked of so long a request");
		return FAILED;
	}
	begun = now_ns();
	if (!may_ask(begun, timeout_ns))
		return QUIET;
	if (ask_once(path, request, begun + timeout_ns, answer, why)) {
		atomic_store(&quiet_until, 0);
		return ANSWERED;
	}
	free_answer(answer);
	if (now_ns() - begun > timeout_ns / 10)
		atomic_store(&quiet_until, now_ns() + quiet_ns);
	else
		atomic_store(&quiet_until, 0);
	return FAILED;
}
