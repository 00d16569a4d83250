/*
 * What spank_steward asks of the kernel, see facts.c and mounts.c. Nobody else sees
 * these names: all is compiled with -fvisibility=hidden.
 */
#ifndef STEWARD_FACTS_H
#define STEWARD_FACTS_H

#include <limits.h>
#include <stdint.h>
#include <sys/types.h>

/* What tasks used until now; -1 where it cannot be known. */
struct used {
	int64_t user_us, system_us;
	int64_t minor_faults, major_faults;
	int64_t blocks_in, blocks_out;
	int64_t voluntary, involuntary;
	int64_t peak_kib;
	int from_proc; /* read from /proc of slurmstepd, not by getrusage(2) */
};

/* What the step's cgroup says; -1 where it says nothing. */
struct totals {
	int64_t peak_bytes;
	int64_t user_us, system_us;
	int64_t read_bytes, written_bytes;
};

/* Directories of the step's cgroup, "" where there is none. */
struct cgroup {
	int unified; /* version 2, where all three are one */
	char memory[PATH_MAX], cpu[PATH_MAX], io[PATH_MAX];
};

/* Reads a file as text; its length, or -1. */
ssize_t slurp(const char *path, char *text, size_t size);

/* Whether lines may be written in a directory. */
int is_fit(const char *directory);

/* Finds the step's cgroup by one of its processes; leaves it alone where there is none. */
void find_cgroup(pid_t pid, struct cgroup *cgroup);

/* Reads what the cgroup says; leaves alone what it does not say. */
void read_totals(const struct cgroup *cgroup, struct totals *totals);

/* Reads what all tasks that slurmstepd has reaped until now used together. */
void read_used(pid_t stepd, struct used *used);

/* The most memory that this process has held since it was executed, in KiB; -1 if unknown. */
int64_t read_own_peak(void);

#endif
