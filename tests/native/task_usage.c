/*
 * A job's program that says what it used, as its last act. Tests compile it as `used`; its
 * arguments are FILE CPU_MS MIB HOW.
 *
 * HOW is an exit code, a signal as a negative number to die of, or "term": to
 * run until SIGTERM comes. FILE.JOB.PID gets a line "JOB STEP TASK PID USER_US
 * SYSTEM_US PEAK_BYTES". Memory is given back before the kernel is asked, the
 * line is written to memory that the file is mapped to, and nothing is left to
 * clean up but a small static program: its end adds next to nothing to it.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t asked_to_end;

static void on_term(int number)
{
	asked_to_end = number;
}

static const char *variable(const char *name)
{
	const char *value = getenv(name);

	return value ? value : "-";
}

static void touch(size_t bytes)
{
	volatile char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
				     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		_exit(99);
	for (size_t at = 0; at < bytes; at += 4096)
		memory[at] = 1;
	munmap((void *)memory, bytes);
}

static void burn(long ms, int until_term)
{
	struct timespec used;

	do {
		for (volatile int i = 0; i < 10000; i++)
			;
		clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
	} while (!asked_to_end &&
		 (until_term || used.tv_sec * 1000 + used.tv_nsec / 1000000 < ms));
}

/* The page that is this process's file, touched already. */
static char *page_of(const char *prefix)
{
	char path[4096];
	char *page;
	int fd;

	snprintf(path, sizeof(path), "%s.%s.%d", prefix, variable("SLURM_JOB_ID"), (int)getpid());
	fd = open(path, O_RDWR | O_CREAT, 0644);
	if (fd < 0 || ftruncate(fd, 4096))
		_exit(97);
	page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (page == MAP_FAILED)
		_exit(97);
	page[4095] = '\n';
	close(fd);
	return page;
}

int main(int argc, char **argv)
{
	struct rusage used;
	int how, until_term;
	char *page;

	if (argc != 5)
		return 98;
	until_term = !strcmp(argv[4], "term");
	how = atoi(argv[4]);
	if (until_term)
		signal(SIGTERM, on_term);
	page = page_of(argv[1]);
	if (atol(argv[3]))
		touch((size_t)atol(argv[3]) << 20);
	burn(atol(argv[2]), until_term);
	getrusage(RUSAGE_SELF, &used);
	snprintf(page, 4095, "%s %s %s %d %ld %ld %ld\n", variable("SLURM_JOB_ID"),
		 variable("SLURM_STEP_ID"), variable("SLURM_PROCID"), (int)getpid(),
		 used.ru_utime.tv_sec * 1000000L + used.ru_utime.tv_usec,
		 used.ru_stime.tv_sec * 1000000L + used.ru_stime.tv_usec, used.ru_maxrss * 1024L);
	if (asked_to_end)
		how = -asked_to_end;
	if (how < 0) {
		signal(-how, SIG_DFL);
		kill(getpid(), -how);
	}
	_exit(how);
}
