/*
 * scrontab for a Slurm that comes without it (Debian's 22.05): `scrontab ACCOUNT COUNT SCRIPT`.
 *
 * Puts so many entries into the caller's crontab that run SCRIPT, a shell's words, each
 * minute; 0 removes the crontab. Prints their job ids. What it calls of libslurmfull has no
 * public header: struct cron_entry is that of src/common/cron.h of 22.05.
 */
#include <pwd.h>
#include <slurm/slurm.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct cron_entry {
	uint32_t flags;
	void *minute, *hour, *day_of_month, *month, *day_of_week;
	char *cronspec;
	uint32_t line_start, line_end;
};

extern struct cron_entry *new_cron_entry(void);
extern void bit_set_all(void *bits);
extern char *cronspec_from_cron_entry(struct cron_entry *entry);

#define EVERY_FIELD_IS_ANY 0x1f

static job_desc_msg_t *entry_of(const struct passwd *user, char *account, const char *words,
				uint32_t line)
{
	static char *environment[] = {"PATH=/usr/bin:/bin", "SHELL=/bin/sh", NULL};
	job_desc_msg_t *job = calloc(1, sizeof(*job));
	struct cron_entry *entry = new_cron_entry();
	char *script = NULL;

	if (!job || !entry || asprintf(&script, "#!/bin/sh\n%s\n", words) < 0)
		exit(2);
	bit_set_all(entry->minute);
	bit_set_all(entry->hour);
	bit_set_all(entry->day_of_month);
	bit_set_all(entry->month);
	bit_set_all(entry->day_of_week);
	entry->flags = EVERY_FIELD_IS_ANY;
	entry->cronspec = cronspec_from_cron_entry(entry);
	entry->line_start = entry->line_end = line;
	slurm_init_job_desc_msg(job);
	job->account = account;
	job->bitflags |= CRON_JOB;
	job->crontab_entry = entry;
	job->environment = environment;
	job->env_size = 2;
	job->name = "cron";
	job->script = script;
	job->std_out = job->std_err = "/dev/null";
	job->time_limit = 5;
	job->min_cpus = job->num_tasks = job->cpus_per_task = 1;
	job->user_id = user->pw_uid;
	job->group_id = user->pw_gid;
	job->work_dir = user->pw_dir;
	return job;
}

int main(int argc, char **argv)
{
	const struct passwd *user = getpwuid(getuid());
	crontab_update_response_msg_t *answer;
	void *jobs = slurm_list_create(NULL); /* List up to 23.11, list_t * since */
	char text[65536] = "";

	if (argc != 4 || !user)
		return 2;
	slurm_init(NULL);
	if (!atoi(argv[2]))
		return slurm_remove_crontab(user->pw_uid, user->pw_gid) ? 1 : 0;
	for (int line = 0; line < atoi(argv[2]); line++) {
		size_t used = strlen(text);
		snprintf(text + used, sizeof(text) - used, "* * * * * %s\n", argv[3]);
		slurm_list_append(jobs, entry_of(user, argv[1], argv[3], line));
	}
	answer = slurm_update_crontab(user->pw_uid, user->pw_gid, text, jobs);
	if (!answer || answer->return_code) {
		fprintf(stderr, "%s: %s\n",
			answer ? slurm_strerror(answer->return_code) : "no answer",
			answer && answer->err_msg ? answer->err_msg : "");
		return 1;
	}
	for (uint32_t i = 0; i < answer->jobids_count; i++)
		printf("%u\n", answer->jobids[i]);
	return 0;
}
