/*
 * A line of spank_steward's: how it is written as JSON, and how it gets into the
 * file of its node without waiting for anybody, or tearing another's.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "shim.h"
#include "utf8.h"

int64_t now_us(void)
{
	struct timespec now;

	if (clock_gettime(CLOCK_REALTIME, &now))
		return 0;
	return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

void add(struct line *line, const char *format, ...)
{
	/* Room for the newlines before and behind. */
	size_t room = LINE_BYTES - 1 - line->used;
	va_list arguments;
	int length;

	va_start(arguments, format);
	length = vsnprintf(line->text + line->used, room, format, arguments);
	va_end(arguments);
	if (length < 0 || (size_t)length >= room)
		line->too_long = 1;
	else
		line->used += (size_t)length;
}

void add_text(struct line *line, const char *key, const char *value, size_t most)
{
	const unsigned char *text = (const unsigned char *)value;
	const unsigned char *end = text + strnlen(value, most);

	add(line, ",\"%s\":\"", key);
	while (text < end) {
		/* What follows a character's first byte stops at the string's own end, a NUL. */
		int length = utf8_length(text);

		if (length > end - text)
			break; /* the bound cuts it in two */
		if (!length)
			add(line, "\\ufffd");
		else if (*text == '"' || *text == '\\')
			add(line, "\\%c", *text);
		else if (*text < 0x20 || *text == 0x7f)
			add(line, "\\u%04x", *text);
		else
			add(line, "%.*s", length, (const char *)text);
		text += length ? length : 1;
	}
	add(line, "\"");
}

void add_known(struct line *line, const char *key, int64_t value)
{
	if (value >= 0)
		add(line, ",\"%s\":%" PRId64, key, value);
}

void begin(struct line *line, const char *kind, uint32_t job, const char *node)
{
	line->used = 0;
	line->too_long = 0;
	line->text[line->used++] = '\n';
	add(line, "{\"v\":1,\"k\":\"%s\",\"t\":%" PRId64 ",\"j\":%" PRIu32, kind, now_us(), job);
	add_text(line, "n", node, NODE_BYTES);
}

/* A file that grows beyond RLIMIT_FSIZE has its writer killed by SIGXFSZ. */
static int may_grow(off_t size)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_FSIZE, &limit))
		return 0;
	return limit.rlim_cur == RLIM_INFINITY ||
	       (uint64_t)size + LINE_BYTES <= (uint64_t)limit.rlim_cur;
}

static int append(int fd, const char *text, size_t length)
{
	struct stat file;
	char last = '\n';

	if (fstat(fd, &file) || !S_ISREG(file.st_mode) || !may_grow(file.st_size))
		return 0;
	/* A line that was torn, by a full disk or a crash, must not tear ours. */
	if (file.st_size > 0 && pread(fd, &last, 1, file.st_size - 1) == 1 && last != '\n')
		return write(fd, text, length) == (ssize_t)length;
	return write(fd, text + 1, length - 1) == (ssize_t)length - 1;
}

/*
 * Appends a line to a file; 0 if it is lost. It is opened for each line, so
 * that a file that was renamed gets no line more than the one that is being
 * written, and no task inherits it.
 */
int write_line(struct line *line, const char *file)
{
	int fd, written;

	add(line, "}");
	if (line->too_long)
		return 0;
	line->text[line->used++] = '\n';
	/* O_NONBLOCK: a FIFO that somebody put there would have us wait for its reader. */
	fd = open(file, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY,
		  0600);
	if (fd < 0)
		return 0;
	written = append(fd, line->text, line->used);
	close(fd);
	return written;
}
