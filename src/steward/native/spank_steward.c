/*
 * spank_steward: tells Steward what the steps of a compute node used.
 *
 * A SPANK plugin for slurmstepd, loaded by a line of plugstack.conf:
 *
 *     optional /usr/local/lib/steward/22.05.8/spank_steward.so spool=/var/spool/steward-shim
 *
 * Each fact is one line of JSON, appended by one write(2) to DIR/NODE.log; the
 * agent of the node sends them on. The plugin may cost a job nothing: it waits
 * for nobody, takes no lock that another process holds, always returns 0, and
 * where a line cannot be written it counts it, to say so in the next one. What
 * it does not know, it leaves out.
 *
 * Only Slurm's public headers are used. All of it runs in slurmstepd's main
 * thread; with SlurmdParameters=contain_spank, however, some hooks run in
 * children that slurmstepd forks for them, so what hooks know of each other
 * lies in a page that these share.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include "facts.h"
#include "shim.h"

#pragma GCC visibility push(default)
SPANK_PLUGIN(steward, 1)
#pragma GCC visibility pop

/* One step on this node, as all hooks of a slurmstepd share it. */
struct launch {
	int ended;
	int epilog;  /* slurm.conf names a TaskEpilog */
	pid_t stepd;
	uint32_t job;
	int64_t at_us;
	char step[32];
	char node[NODE_BYTES];
	char file[PATH_MAX];
	uint32_t tasks, forked, reaped;
	pid_t last_pid;
	uint64_t lost; /* lines since the last one that was written */
	struct used used;
	struct used task;	       /* as slurmstepd forked after it had reaped a task */
	int is_reaped, is_mixed;       /* that is so; a task's figures have others' in them */
	uint32_t forks;		       /* of slurmstepd's, since a task was told of last */
	int64_t peak_kib, most_kib;    /* the largest that is known; others had at most so much */
	struct totals totals;
	struct cgroup cgroup;
};

static struct launch *launch;

static void begin_of_launch(struct line *line, const char *kind)
{
	begin(line, kind, launch->job, launch->node);
	add(line, ",\"s\":\"%s\",\"l\":%" PRId64, launch->step, launch->at_us);
	if (launch->lost)
		add(line, ",\"lost\":%" PRIu64, launch->lost);
}

static void tell(struct line *line)
{
	if (write_line(line, launch->file))
		launch->lost = 0;
	else
		launch->lost++;
}
/* ---- What a task used ------------------------------------------------------------------ */

/*
 * slurmstepd's main thread reaps a task, runs the epilogs that slurm.conf and
 * the user of srun want after each task, waits for them, and only then has us
 * told of the task. Its forks for them are where the task can be told from them:
 * what was used is looked at before the first. A child that was reaped has had
 * faults of pages; without one more of these there is no task yet.
 */
static void before_fork(void)
{
	struct used now;

	if (!launch || getpid() != launch->stepd || syscall(SYS_gettid) != launch->stepd)
		return;
	launch->forks++;
	if (launch->is_reaped)
		return;
	read_used(launch->stepd, &now);
	if (!now.from_proc && now.minor_faults != launch->used.minor_faults) {
		launch->task = now;
		launch->is_reaped = 1;
	}
}

/* From now on the next task is waited for. */
static void begin_task(const struct used *used)
{
	launch->used = *used;
	launch->is_reaped = 0;
	launch->forks = 0;
}

/* Whether what an epilog used cannot be told from what its task did. */
static int is_with_epilog(const struct used *now)
{
	if (now->from_proc) /* slurmstepd has forked for this hook, too */
		return launch->epilog || launch->forks > 1;
	return launch->epilog && !launch->is_reaped;
}

/* Keeps in mind what the kernel's largest peak, in KiB, says of one task more. */
static void see_peak(int64_t before_kib, int64_t now_kib)
{
	if (now_kib > before_kib)
		launch->peak_kib = now_kib;
	else if (before_kib > launch->most_kib)
		launch->most_kib = before_kib;
}

/*
 * The largest peak of all tasks, in KiB, -1 where it cannot be known. slurmstepd
 * has also reaped the children that it forked for contained hooks: these had no
 * more than itself. (Not its ru_maxrss: that has slurmd's in it, which it was
 * before it was executed.)
 */
static int64_t largest_peak(void)
{
	struct rusage children;
	int64_t own_kib;

	if (!launch->used.from_proc)
		return launch->peak_kib && launch->peak_kib >= launch->most_kib ? launch->peak_kib : -1;
	own_kib = read_own_peak();
	if (launch->is_mixed || getpid() != launch->stepd || own_kib < 0 ||
	    getrusage(RUSAGE_CHILDREN, &children) || children.ru_maxrss <= own_kib)
		return -1;
	return children.ru_maxrss;
}

static int64_t grown(int64_t before, int64_t now)
{
	return before < 0 || now < 0 ? -1 : now < before ? 0 : now - before;
}

static int64_t in_bytes(int64_t number, int64_t unit)
{
	return number < 0 ? -1 : number * unit;
}

/* Adds what one task used: what has grown since the task before it was reaped. */
static void add_used(struct line *line, const struct used *before, const struct used *now)
{
	if (before->from_proc != now->from_proc)
		return; /* nothing to compare with */
	add_known(line, "ut", grown(before->user_us, now->user_us));
	add_known(line, "sy", grown(before->system_us, now->system_us));
	/* The kernel keeps the largest of all: it is this task's only where it rose. */
	if (before->peak_kib >= 0 && now->peak_kib > before->peak_kib)
		add_known(line, "rss", in_bytes(now->peak_kib, 1024));
	add_known(line, "minf", grown(before->minor_faults, now->minor_faults));
	add_known(line, "majf", grown(before->major_faults, now->major_faults));
	add_known(line, "in", in_bytes(grown(before->blocks_in, now->blocks_in), 512));
	add_known(line, "out", in_bytes(grown(before->blocks_out, now->blocks_out), 512));
	add_known(line, "vsw", grown(before->voluntary, now->voluntary));
	add_known(line, "isw", grown(before->involuntary, now->involuntary));
}

/* ---- The hooks -------------------------------------------------------------------------- */

static struct launch *new_launch(void)
{
	void *page = mmap(NULL, sizeof(struct launch), PROT_READ | PROT_WRITE,
			  MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	return page == MAP_FAILED ? NULL : page;
}

/* Finds out what later hooks need; 0 if nothing can be told of this step. */
static int fill(struct launch *new, spank_t spank, int ac, char **av)
{
	uint32_t step = 0;

	const struct totals nothing = { -1, -1, -1, -1, -1 };

	new->at_us = now_us();
	new->stepd = getpid();
	new->totals = nothing;
	if (spank_get_item(spank, S_JOB_ID, &new->job) != ESPANK_SUCCESS ||
	    spank_get_item(spank, S_JOB_STEPID, &step) != ESPANK_SUCCESS)
		return 0;
	if (spank_get_item(spank, S_JOB_LOCAL_TASK_COUNT, &new->tasks) != ESPANK_SUCCESS ||
	    new->tasks >= NO_VAL)
		new->tasks = 0;
	name_step(step, new->step, sizeof(new->step));
	new->epilog = has_task_epilog();
	return find_file(ac, av, new->node, new->file);
}

int slurm_spank_init(spank_t spank, int ac, char *av[])
{
	struct launch *new;
	struct line line;
	uint16_t cpus = 0;

	/* A plugin that plugstack.conf names twice is called twice. */
	if (spank_context() != S_CTX_REMOTE || launch || !(new = new_launch()))
		return 0;
	if (!fill(new, spank, ac, av)) {
		munmap(new, sizeof(*new));
		return 0;
	}
	launch = new;
	read_used(launch->stepd, &launch->used);
	(void)pthread_atfork(before_fork, NULL, NULL); /* or else: epilogs are not told apart */
	begin_of_launch(&line, "start");
	add_owner(&line, spank);
	if (launch->tasks && strcmp(launch->step, "extern"))
		add(&line, ",\"tasks\":%" PRIu32, launch->tasks);
	if (spank_get_item(spank, S_JOB_NCPUS, &cpus) == ESPANK_SUCCESS && cpus && cpus < NO_VAL16)
		add(&line, ",\"cpus\":%u", cpus);
	add_memory(&line, spank);
	add_name(&line, spank, launch->step);
	add_restarts(&line, spank);
	add_array(&line, spank);
	tell(&line);
	return 0;
}

int slurm_spank_task_post_fork(spank_t spank, int ac, char *av[])
{
	struct line line;
	struct used used;
	pid_t pid = -1;

	(void)ac;
	(void)av;
	if (!launch || spank_context() != S_CTX_REMOTE)
		return 0;
	/* SPANK names no process of an extern step, and its cgroup is gone at its end. */
	if (spank_get_item(spank, S_TASK_PID, &pid) != ESPANK_SUCCESS || pid <= 0)
		return 0;
	launch->forked++;
	/* Nothing of a task can have been reaped yet. */
	read_used(launch->stepd, &used);
	begin_task(&used);
	if (!*launch->cgroup.memory && !*launch->cgroup.cpu && !*launch->cgroup.io)
		find_cgroup(pid, &launch->cgroup);
	if (launch->forked == launch->tasks) {
		begin_of_launch(&line, "smgr");
		add(&line, ",\"tasks\":%" PRIu32, launch->forked);
		tell(&line);
	}
	return 0;
}

int slurm_spank_task_exit(spank_t spank, int ac, char *av[])
{
	struct line line;
	struct used used, *task = &used;
	pid_t pid = -1;
	int status = 0;

	(void)ac;
	(void)av;
	if (!launch || spank_context() != S_CTX_REMOTE ||
	    spank_get_item(spank, S_TASK_PID, &pid) != ESPANK_SUCCESS || pid == launch->last_pid)
		return 0;
	launch->last_pid = pid;
	launch->reaped++;
	read_used(launch->stepd, &used);
	begin_of_launch(&line, "task");
	add_number_item(&line, "id", spank, S_TASK_GLOBAL_ID);
	add(&line, ",\"pid\":%d", (int)pid);
	if (spank_get_item(spank, S_TASK_EXIT_STATUS, &status) == ESPANK_SUCCESS)
		add(&line, ",\"st\":%d", status);
	if (launch->is_reaped && !used.from_proc)
		task = &launch->task;
	add_used(&line, &launch->used, task);
	if (is_with_epilog(&used)) {
		launch->is_mixed = 1;
		add(&line, ",\"ep\":1");
	}
	see_peak(launch->used.peak_kib, task->peak_kib);
	begin_task(&used);
	tell(&line);
	/* The cgroup goes before the step's end is told of. */
	if (launch->reaped >= launch->forked)
		read_totals(&launch->cgroup, &launch->totals);
	return 0;
}

int slurm_spank_exit(spank_t spank, int ac, char *av[])
{
	struct line line;

	(void)spank;
	(void)ac;
	(void)av;
	if (!launch || spank_context() != S_CTX_REMOTE || launch->ended)
		return 0;
	launch->ended = 1;
	begin_of_launch(&line, "end");
	add(&line, ",\"tasks\":%" PRIu32, launch->reaped);
	add_known(&line, "rss", in_bytes(largest_peak(), 1024));
	add_known(&line, "peak", launch->totals.peak_bytes);
	add_known(&line, "cut", launch->totals.user_us);
	add_known(&line, "csy", launch->totals.system_us);
	add_known(&line, "crd", launch->totals.read_bytes);
	add_known(&line, "cwr", launch->totals.written_bytes);
	tell(&line);
	return 0;
}

static int tell_of_job(spank_t spank, int ac, char **av, const char *kind)
{
	char node[NODE_BYTES], file[PATH_MAX];
	struct line line;
	uint32_t job = 0;

	if (spank_context() != S_CTX_JOB_SCRIPT ||
	    spank_get_item(spank, S_JOB_ID, &job) != ESPANK_SUCCESS ||
	    !find_file(ac, av, node, file))
		return 0;
	begin(&line, kind, job, node);
	add_owner(&line, spank);
	write_line(&line, file);
	return 0;
}

int slurm_spank_job_prolog(spank_t spank, int ac, char *av[])
{
	return tell_of_job(spank, ac, av, "prolog");
}

int slurm_spank_job_epilog(spank_t spank, int ac, char *av[])
{
	return tell_of_job(spank, ac, av, "epilog");
}
