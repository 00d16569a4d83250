/*
 * What the kernel knows of a step: its cgroup, and what its tasks used. Only
 * regular files below /proc and /sys are read.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "facts.h"
#include "mounts.h"

enum { TABLE_BYTES = 65536 };

/* ---- Small files of the kernel ------------------------------------------------------ */

/* Reads a file as text; its length, or -1. */
ssize_t slurp(const char *path, char *text, size_t size)
{
	size_t used = 0;
	ssize_t got = 0;
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return -1;
	while (used < size - 1 && (got = read(fd, text + used, size - 1 - used)) > 0)
		used += (size_t)got;
	close(fd);
	text[used] = '\0';
	return got < 0 ? -1 : (ssize_t)used;
}

/* Reads a file in a directory; its length, or -1. */
static ssize_t slurp_in(const char *directory, const char *name, char *text, size_t size)
{
	char path[PATH_MAX];

	if (!*directory || snprintf(path, sizeof(path), "%s/%s", directory, name) >= (int)sizeof(path))
		return -1;
	return slurp(path, text, size);
}

/* The number at `text`, -1 if there is none. */
static int64_t number_at(const char *text)
{
	char *end;
	long long value;

	if (!text || !isdigit((unsigned char)*text))
		return -1;
	errno = 0;
	value = strtoll(text, &end, 10);
	return errno ? -1 : (int64_t)value;
}

static int64_t number_in(const char *directory, const char *name)
{
	char text[64];

	return slurp_in(directory, name, text, sizeof(text)) < 0 ? -1 : number_at(text);
}

/* The number behind a word at the beginning of a line, -1 if there is none. */
static int64_t number_after(const char *text, const char *word)
{
	size_t length = strlen(word);

	for (const char *line = text; line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (!strncmp(line, word, length) && line[length] == ' ')
			return number_at(line + length + 1);
	}
	return -1;
}

/* The sum of the numbers behind a word anywhere; -1 where the word is nowhere. */
static int64_t sum_after(const char *text, const char *word)
{
	int64_t sum = -1;

	for (const char *at = strstr(text, word); at; at = strstr(at, word)) {
		int64_t number;

		at += strlen(word);
		number = number_at(at);
		if (number >= 0)
			sum = (sum < 0 ? 0 : sum) + number;
	}
	return sum;
}

/* ---- cgroups ------------------------------------------------------------------------- */

/*
 * Cuts what is one task's off a step's cgroup (version 1 …/step_0/task_0,
 * version 2 …/step_0/user/task_0); 0 if it is no step's, as with another
 * ProctrackType, where it would be the whole of slurmd's.
 */
static int cut_to_step(char *path)
{
	char *job = strstr(path, "/job_");
	char *last = strrchr(path, '/');

	if (!job || !strstr(job, "/step_"))
		return 0;
	if (!strncmp(last, "/task_", 6))
		*last = '\0';
	return 1;
}

struct wanted {
	struct cgroup *cgroup;
	char unified[PATH_MAX], memory[PATH_MAX], cpu[PATH_MAX], io[PATH_MAX];
};

static int has_word(const char *list, const char *word)
{
	size_t length = strlen(word);

	for (const char *at = strstr(list, word); at; at = strstr(at + 1, word))
		if ((at == list || at[-1] == ',') && (!at[length] || at[length] == ','))
			return 1;
	return 0;
}

/* Takes a line of /proc/PID/cgroup, NUMBER:CONTROLLERS:PATH, see cgroups(7). */
static void see_membership(char *line, struct wanted *wanted)
{
	char *controllers = strchr(line, ':');
	char *path = controllers ? strchr(controllers + 1, ':') : NULL;

	if (!path)
		return;
	*controllers++ = '\0';
	*path++ = '\0';
	if (strlen(path) >= PATH_MAX || !cut_to_step(path))
		return;
	if (!*controllers && !strcmp(line, "0"))
		strcpy(wanted->unified, path);
	if (has_word(controllers, "memory"))
		strcpy(wanted->memory, path);
	if (has_word(controllers, "cpuacct"))
		strcpy(wanted->cpu, path);
	if (has_word(controllers, "blkio"))
		strcpy(wanted->io, path);
}

/* Where a cgroup is in the file system, if it is seen through this mount. */
static void place(char *to, const char *path, const struct mount *mount)
{
	const char *rest = *path ? below(path, mount->root) : NULL;

	if (rest && snprintf(to, PATH_MAX, "%s%s", mount->point, rest) >= PATH_MAX)
		*to = '\0';
}

static void see_cgroups(const struct mount *mount, void *with)
{
	struct wanted *wanted = with;
	struct cgroup *cgroup = wanted->cgroup;

	if (!strcmp(mount->type, "cgroup2") && *wanted->unified && !*cgroup->memory) {
		place(cgroup->memory, wanted->unified, mount);
		strcpy(cgroup->cpu, cgroup->memory);
		strcpy(cgroup->io, cgroup->memory);
		cgroup->unified = *cgroup->memory != '\0';
	}
	if (strcmp(mount->type, "cgroup"))
		return;
	if (has_word(mount->options, "memory"))
		place(cgroup->memory, wanted->memory, mount);
	if (has_word(mount->options, "cpuacct"))
		place(cgroup->cpu, wanted->cpu, mount);
	if (has_word(mount->options, "blkio"))
		place(cgroup->io, wanted->io, mount);
}

/* Finds the step's cgroup by one of its processes. */
void find_cgroup(pid_t pid, struct cgroup *cgroup)
{
	struct wanted *wanted = calloc(1, sizeof(*wanted));
	char *text = malloc(TABLE_BYTES);
	char path[64], *save = NULL;

	snprintf(path, sizeof(path), "/proc/%d/cgroup", (int)pid);
	if (wanted && text && slurp(path, text, TABLE_BYTES) > 0) {
		wanted->cgroup = cgroup;
		for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
			see_membership(line, wanted);
		if (*wanted->memory || *wanted->cpu || *wanted->io)
			*wanted->unified = '\0'; /* a hybrid: the controllers are with version 1 */
		if (*wanted->unified || *wanted->memory || *wanted->cpu || *wanted->io)
			each_mount(see_cgroups, wanted);
	}
	free(text);
	free(wanted);
}

static int64_t nanoseconds_in(const char *directory, const char *name)
{
	int64_t number = number_in(directory, name);

	return number < 0 ? -1 : number / 1000;
}

static void read_unified(const struct cgroup *cgroup, char *text, struct totals *totals)
{
	totals->peak_bytes = number_in(cgroup->memory, "memory.peak");
	if (slurp_in(cgroup->cpu, "cpu.stat", text, TABLE_BYTES) > 0) {
		totals->user_us = number_after(text, "user_usec");
		totals->system_us = number_after(text, "system_usec");
	}
	if (slurp_in(cgroup->io, "io.stat", text, TABLE_BYTES) > 0) {
		totals->read_bytes = sum_after(text, "rbytes=");
		totals->written_bytes = sum_after(text, "wbytes=");
	}
}

static void read_version_1(const struct cgroup *cgroup, char *text, struct totals *totals)
{
	totals->peak_bytes = number_in(cgroup->memory, "memory.max_usage_in_bytes");
	totals->user_us = nanoseconds_in(cgroup->cpu, "cpuacct.usage_user");
	totals->system_us = nanoseconds_in(cgroup->cpu, "cpuacct.usage_sys");
	if (slurp_in(cgroup->io, "blkio.throttle.io_service_bytes_recursive", text, TABLE_BYTES) > 0) {
		totals->read_bytes = sum_after(text, " Read ");
		totals->written_bytes = sum_after(text, " Write ");
	}
}

void read_totals(const struct cgroup *cgroup, struct totals *totals)
{
	char *text = malloc(TABLE_BYTES);

	if (text && cgroup->unified)
		read_unified(cgroup, text, totals);
	else if (text)
		read_version_1(cgroup, text, totals);
	free(text);
}

/* ---- What children used --------------------------------------------------------------- */

static int64_t microseconds(const struct timeval *time)
{
	return (int64_t)time->tv_sec * 1000000 + time->tv_usec;
}

/* What slurmstepd has reaped, from /proc: all that a child of it can know, in clock ticks. */
static void read_parent(pid_t stepd, struct used *used)
{
	char path[64], text[2048], *field;
	int64_t fields[18] = { 0 };
	long ticks = sysconf(_SC_CLK_TCK);

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)stepd);
	/* In a PID namespace of the job's the number would be another process's. */
	if (getppid() != stepd || ticks <= 0 || slurp(path, text, sizeof(text)) <= 0)
		return;
	field = strrchr(text, ')'); /* the name may hold anything; field 3 follows */
	for (int i = 3; field && i <= 17; i++) {
		field = strchr(field + 1, ' ');
		fields[i] = field ? number_at(field + 1) : -1;
	}
	if (!field)
		return;
	used->minor_faults = fields[11];
	used->major_faults = fields[13];
	used->user_us = fields[16] * 1000000 / ticks;
	used->system_us = fields[17] * 1000000 / ticks;
}

/* What all tasks that were reaped until now used together. */
void read_used(pid_t stepd, struct used *used)
{
	const struct used unknown = { -1, -1, -1, -1, -1, -1, -1, -1, -1, 1 };
	struct rusage children;

	*used = unknown;
	if (getpid() != stepd) {
		read_parent(stepd, used);
	} else if (!getrusage(RUSAGE_CHILDREN, &children)) {
		used->user_us = microseconds(&children.ru_utime);
		used->system_us = microseconds(&children.ru_stime);
		used->minor_faults = children.ru_minflt;
		used->major_faults = children.ru_majflt;
		used->blocks_in = children.ru_inblock;
		used->blocks_out = children.ru_oublock;
		used->voluntary = children.ru_nvcsw;
		used->involuntary = children.ru_nivcsw;
		used->peak_kib = children.ru_maxrss;
		used->from_proc = 0;
	}
}

/* The most memory that this process has held since it was executed, in KiB; -1 if unknown. */
int64_t read_own_peak(void)
{
	static const char word[] = "\nVmHWM:";
	char *text = malloc(TABLE_BYTES);
	char *at = NULL;
	int64_t kib = -1;

	if (text && slurp("/proc/self/status", text, TABLE_BYTES) > 0)
		at = strstr(text, word);
	if (at) {
		at += strlen(word);
		kib = number_at(at + strspn(at, " \t"));
	}
	free(text);
	return kib;
}
