/*
 * A slurmstepd that does what it is told on its standard input: enough of the
 * SPANK API to call the plugin's hooks in any order, with anything in a job's
 * description. Texts come in hexadecimal, so that any byte can be in them. What
 * the kernel says of a task goes to standard output, for tests to compare with.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <slurm/slurm.h>
#include <slurm/spank.h>

slurm_conf_t slurm_conf; /* Slurm's own copy of its configuration, as libslurmfull has it */

enum { MOST_TASKS = 4096 };

static struct {
	uint32_t uid, gid, job, step, tasks, cpus, stepmem, jobmem, restarts, array, index;
	uint32_t global;
	char *name;
	pid_t pid; /* of the task that a hook is called for, 0 for none */
	int status, failing;
} job = { .index = NO_VAL };

static int context = S_CTX_REMOTE, contained;
static long epilog_ms = -1, epilog_mib; /* what runs after each task, if not negative */
static pid_t pids[MOST_TASKS];
static int forked;

spank_context_t spank_context(void)
{
	return context;
}

static spank_err_t give_task(spank_item_t item, void *to)
{
	if (!job.pid)
		return ESPANK_NOT_TASK;
	if (item == S_TASK_PID)
		*(pid_t *)to = job.pid;
	else if (item == S_TASK_GLOBAL_ID)
		*(uint32_t *)to = job.global;
	else
		*(int *)to = job.status;
	return ESPANK_SUCCESS;
}

spank_err_t spank_get_item(spank_t spank, spank_item_t item, ...)
{
	static char *argv[2];
	va_list arguments;
	void *to;

	(void)spank;
	va_start(arguments, item);
	to = va_arg(arguments, void *);
	if (item == S_JOB_ARGV) {
		argv[0] = job.name;
		*(int *)to = job.name ? 1 : 0;
		*va_arg(arguments, char ***) = argv;
	}
	va_end(arguments);
	if (job.failing)
		return ESPANK_BAD_ARG;
	switch (item) {
	case S_JOB_ARGV: break;
	case S_JOB_UID: *(uid_t *)to = job.uid; break;
	case S_JOB_GID: *(gid_t *)to = job.gid; break;
	case S_JOB_ID: *(uint32_t *)to = job.job; break;
	case S_JOB_STEPID: *(uint32_t *)to = job.step; break;
	case S_JOB_LOCAL_TASK_COUNT: *(uint32_t *)to = job.tasks; break;
	case S_JOB_NCPUS: *(uint16_t *)to = (uint16_t)job.cpus; break;
	case S_STEP_ALLOC_MEM: *(uint64_t *)to = job.stepmem; break;
	case S_JOB_ALLOC_MEM: *(uint64_t *)to = job.jobmem; break;
	case S_SLURM_RESTART_COUNT: *(uint32_t *)to = job.restarts; break;
	case S_JOB_ARRAY_ID: *(uint32_t *)to = job.array; break;
	case S_JOB_ARRAY_TASK_ID: *(uint32_t *)to = job.index; break;
	case S_TASK_PID:
	case S_TASK_GLOBAL_ID:
	case S_TASK_EXIT_STATUS: return give_task(item, to);
	default: return ESPANK_BAD_ARG;
	}
	return ESPANK_SUCCESS;
}

static void set_item(const char *name, uint32_t value)
{
	static const struct {
		const char *name;
		uint32_t *to;
	} items[] = {
		{ "uid", &job.uid }, { "gid", &job.gid }, { "job", &job.job },
		{ "step", &job.step }, { "tasks", &job.tasks }, { "cpus", &job.cpus },
		{ "stepmem", &job.stepmem }, { "jobmem", &job.jobmem },
		{ "restarts", &job.restarts }, { "array", &job.array }, { "index", &job.index },
	};

	for (size_t i = 0; i < sizeof(items) / sizeof(*items); i++)
		if (!strcmp(items[i].name, name))
			*items[i].to = value;
}

/* The text behind a hexadecimal one; the caller frees it. */
static char *text_of(const char *hex)
{
	size_t length = strlen(hex) / 2;
	char *text = calloc(1, length + 1);
	unsigned byte;

	for (size_t i = 0; i < length && sscanf(hex + 2 * i, "%2x", &byte) == 1; i++)
		text[i] = (char)byte;
	return text;
}

/* Calls a hook, in a child of our own where Slurm would do so. */
static void call(spank_f *hook)
{
	pid_t child = contained ? fork() : -1;

	if (child > 0) {
		waitpid(child, NULL, 0);
		return;
	}
	if (hook(NULL, 0, NULL))
		abort();
	if (child == 0)
		_exit(0);
}

static void work(long ms, long mib, int status)
{
	struct timespec used;
	volatile char *memory = mib ? malloc((size_t)mib << 20) : NULL;

	for (size_t at = 0; memory && at < (size_t)mib << 20; at += 4096)
		memory[at] = 1;
	do {
		for (volatile int i = 0; i < 10000; i++)
			;
		clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
	} while (used.tv_sec * 1000 + used.tv_nsec / 1000000 < ms);
	if (status < 0) {
		signal(-status, SIG_DFL);
		kill(getpid(), -status);
		pause();
	}
	_exit(status);
}

static void start_task(long ms, long mib, int status)
{
	pid_t pid = fork();

	if (!pid)
		work(ms, mib, status);
	pids[forked] = pid;
	job.pid = pid;
	job.global = (uint32_t)forked++;
	call(slurm_spank_task_post_fork);
	job.pid = 0;
}

static void run_epilog(void)
{
	pid_t pid = fork();

	if (!pid)
		work(epilog_ms, epilog_mib, 0);
	if (waitpid(pid, NULL, 0) != pid)
		abort();
}

/* Reaps the tasks in the order in which they were started, as the kernel would say it. */
static void reap(void)
{
	struct rusage used;

	for (int i = 0; i < forked; i++) {
		if (wait4(pids[i], &job.status, 0, &used) != pids[i])
			abort();
		printf("%d %d %ld %ld %ld\n", (int)pids[i], job.status,
		       used.ru_utime.tv_sec * 1000000L + used.ru_utime.tv_usec,
		       used.ru_stime.tv_sec * 1000000L + used.ru_stime.tv_usec,
		       used.ru_maxrss * 1024L);
		if (epilog_ms >= 0)
			run_epilog();
		job.pid = pids[i];
		job.global = (uint32_t)i;
		call(slurm_spank_task_exit);
		job.pid = 0;
	}
	forked = 0;
}

/* What a task costs: a task_post_fork and a task_exit each, of processes that there are not. */
static void measure(long tasks)
{
	struct timespec begin, end;

	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (long i = 1; i <= tasks; i++) {
		job.pid = (pid_t)(4000000 + i);
		job.global = (uint32_t)i;
		call(slurm_spank_task_post_fork);
		call(slurm_spank_task_exit);
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	job.pid = 0;
	printf("%.3f\n", ((double)(end.tv_sec - begin.tv_sec) * 1e9 +
			  (double)(end.tv_nsec - begin.tv_nsec)) / 1e3 / (double)tasks);
}

/* Other threads of slurmstepd allocate, open and look things up all the while. */
static void *disturb(void *nothing)
{
	for (;;) {
		FILE *file = fopen("/proc/self/stat", "re");
		char text[256];

		if (file) {
			if (!fgets(text, sizeof(text), file))
				text[0] = '\0';
			fclose(file);
		}
		free(malloc(1 + (size_t)(getppid() & 1023)));
	}
	return nothing;
}

static void start_threads(int number)
{
	pthread_t thread;

	while (number-- > 0)
		if (pthread_create(&thread, NULL, disturb, NULL))
			abort();
}

/*
 * Stands between the plugin and the kernel's tables of mounts and cgroups, which
 * are files below `tables` where a test has an opinion of them.
 */
static char *tables;

FILE *__real_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode);
int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);

static const char *redirected(const char *path, char *other, size_t size)
{
	const char *name = strrchr(path, '/');

	if (!tables || strncmp(path, "/proc/", 6) ||
	    (strcmp(name, "/mountinfo") && strcmp(name, "/cgroup")))
		return path;
	if (snprintf(other, size, "%s%s", tables, name) >= (int)size)
		abort();
	return other;
}

FILE *__wrap_fopen(const char *path, const char *mode)
{
	char other[4096];

	return __real_fopen(redirected(path, other, sizeof(other)), mode);
}

int __wrap_open(const char *path, int flags, ...)
{
	char other[4096];

	return __real_open(redirected(path, other, sizeof(other)), flags, 0600);
}

static void run_hook(const char *name, char *argument)
{
	char *av[] = { argument };
	int ac = *argument ? 1 : 0;
	int answer = 0;

	if (!strcmp(name, "init"))
		answer = slurm_spank_init(NULL, ac, av);
	else if (!strcmp(name, "exit"))
		answer = slurm_spank_exit(NULL, ac, av);
	else if (!strcmp(name, "prolog"))
		answer = slurm_spank_job_prolog(NULL, ac, av);
	else if (!strcmp(name, "epilog"))
		answer = slurm_spank_job_epilog(NULL, ac, av);
	if (answer)
		abort();
}

static void limit_files(rlim_t bytes)
{
	struct rlimit limit = { bytes, RLIM_INFINITY };

	if (setrlimit(RLIMIT_FSIZE, &limit))
		abort();
}

static void obey(const char *word, char *first, const char *second, const char *third)
{
	if (!strcmp(word, "context"))
		context = atoi(first);
	else if (!strcmp(word, "item"))
		set_item(first, (uint32_t)strtoul(second, NULL, 10));
	else if (!strcmp(word, "failing"))
		job.failing = atoi(first);
	else if (!strcmp(word, "name")) {
		free(job.name);
		job.name = text_of(first);
	} else if (!strcmp(word, "node")) {
		char *text = text_of(first);

		setenv("SLURMD_NODENAME", text, 1);
		free(text);
	} else if (!strcmp(word, "taskepilog"))
		slurm_conf.task_epilog = strdup(first);
	else if (!strcmp(word, "epilogs")) {
		epilog_ms = atol(first);
		epilog_mib = atol(second);
	} else if (!strcmp(word, "contained"))
		contained = 1;
	else if (!strcmp(word, "tables"))
		tables = strdup(first);
	else if (!strcmp(word, "fsize"))
		limit_files(strtoul(first, NULL, 10));
	else if (!strcmp(word, "threads"))
		start_threads(atoi(first));
	else if (!strcmp(word, "task"))
		start_task(atol(first), atol(second), atoi(third));
	else if (!strcmp(word, "again"))
		call(slurm_spank_task_exit);
	else if (!strcmp(word, "reap"))
		reap();
	else if (!strcmp(word, "measure"))
		measure(atol(first));
	else if (!strcmp(word, "move")) {
		if (rename(first, second))
			abort();
	} else
		run_hook(word, first);
	fflush(stdout);
}

int main(void)
{
	char *line = NULL;
	size_t size = 0;

	while (getline(&line, &size, stdin) > 0) {
		char word[32] = "", first[4096] = "", second[4096] = "", third[64] = "";

		if (strlen(line) < 8192 &&
		    sscanf(line, "%31s %4095s %4095s %63s", word, first, second, third) > 0)
			obey(word, first, second, third);
	}
	free(line);
	free(job.name);
	free(slurm_conf.task_epilog);
	free(tables);
	return 0;
}
