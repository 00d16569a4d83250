/*
 * spank_steward: tells Steward what the steps of a compute node used.
 *
 * A SPANK plugin for slurmstepd, loaded by a line of plugstack.conf:
 *
 *     optional /usr/local/lib/steward/22.05.8/spank_steward.so spool=/var/spool/steward/shim
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
#include <ctype.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <inttypes.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#pragma GCC visibility push(default)
#include <slurm/slurm.h>
#include <slurm/spank.h>

SPANK_PLUGIN(steward, 1)
#pragma GCC visibility pop

/* Weak, so that `steward plugins check` can load this without Slurm. */
#pragma weak spank_context
#pragma weak spank_get_item

#include "facts.h"

enum { LINE_BYTES = 4096, NAME_BYTES = 64, NODE_BYTES = 256 };

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

/* ---- One line ---------------------------------------------------------------------- */

struct line {
	size_t used;
	int too_long;
	char text[LINE_BYTES + 1]; /* the newline that may have to go before it is text[0] */
};

static int64_t now_us(void)
{
	struct timespec now;

	if (clock_gettime(CLOCK_REALTIME, &now))
		return 0;
	return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

__attribute__((format(printf, 2, 3)))
static void add(struct line *line, const char *format, ...)
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

/* How many bytes the UTF-8 character at `text` has, 0 if it is none (RFC 3629). */
static int utf8_length(const unsigned char *text)
{
	int length = text[0] < 0x80 ? 1 : text[0] < 0xc2 ? 0 : text[0] < 0xe0 ? 2 :
		     text[0] < 0xf0 ? 3 : text[0] < 0xf5 ? 4 : 0;

	for (int i = 1; i < length; i++)
		if ((text[i] & 0xc0) != 0x80)
			return 0;
	if ((text[0] == 0xe0 && text[1] < 0xa0) || (text[0] == 0xed && text[1] > 0x9f) ||
	    (text[0] == 0xf0 && text[1] < 0x90) || (text[0] == 0xf4 && text[1] > 0x8f))
		return 0;
	return length;
}

/* Adds a member whose value is a string of anybody's making, at most `most` bytes of it. */
static void add_text(struct line *line, const char *key, const char *value, size_t most)
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

static void add_known(struct line *line, const char *key, int64_t value)
{
	if (value >= 0)
		add(line, ",\"%s\":%" PRId64, key, value);
}

static void begin(struct line *line, const char *kind, uint32_t job, const char *node)
{
	line->used = 0;
	line->too_long = 0;
	line->text[line->used++] = '\n';
	add(line, "{\"v\":1,\"k\":\"%s\",\"t\":%" PRId64 ",\"j\":%" PRIu32, kind, now_us(), job);
	add_text(line, "n", node, NODE_BYTES);
}

static void begin_of_launch(struct line *line, const char *kind)
{
	begin(line, kind, launch->job, launch->node);
	add(line, ",\"s\":\"%s\",\"l\":%" PRId64, launch->step, launch->at_us);
	if (launch->lost)
		add(line, ",\"lost\":%" PRIu64, launch->lost);
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
static int write_line(struct line *line, const char *file)
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

/* ---- Who and where --------------------------------------------------------------------- */

/* NodeName as slurmd gave it to its children; never from the job's environment. */
static int find_node(char *node, size_t size)
{
	const char *given = getenv("SLURMD_NODENAME");

	if (given && *given) {
		if (strlen(given) >= size)
			return 0;
		strcpy(node, given);
	} else {
		if (gethostname(node, size - 1))
			return 0;
		node[size - 1] = '\0';
		node[strcspn(node, ".")] = '\0';
	}
	return *node && *node != '.' && !strchr(node, '/');
}

/* Puts the path of this node's file together; 0 if nothing can be written. */
static int find_file(int ac, char **av, char *node, char *file)
{
	const char *directory = NULL;

	for (int i = 0; i < ac; i++)
		if (!strncmp(av[i], "spool=", 6))
			directory = av[i] + 6;
	if (!directory || *directory != '/' || !find_node(node, NODE_BYTES))
		return 0;
	if (snprintf(file, PATH_MAX, "%s/%s.log", directory, node) >= PATH_MAX)
		return 0;
	return is_fit(directory);
}

/* "+1" of a step's component, where slurmstepd's title names it: [123.0+1]. */
static void add_component(char *step, size_t size, uint32_t number)
{
	char title[512], wanted[24], *found, *end;

	snprintf(wanted, sizeof(wanted), ".%" PRIu32 "+", number);
	if (slurp("/proc/self/cmdline", title, sizeof(title)) <= 0 || !(found = strchr(title, '[')))
		return;
	found = strstr(found, wanted);
	if (!found)
		return;
	end = found + strlen(wanted);
	end += strspn(end, "0123456789");
	if (*end == ']' && (size_t)(end - found) <= size)
		snprintf(step, size, "%.*s", (int)(end - found - 1), found + 1);
}

/* A step's name as Slurm writes it behind the dot. */
static void name_step(uint32_t number, char *step, size_t size)
{
	const char *known = number == SLURM_BATCH_SCRIPT     ? "batch" :
			    number == SLURM_EXTERN_CONT	     ? "extern" :
			    number == SLURM_INTERACTIVE_STEP ? "interactive" :
							       NULL;

	if (known) {
		snprintf(step, size, "%s", known);
	} else {
		snprintf(step, size, "%" PRIu32, number);
		add_component(step, size, number);
	}
}

/*
 * Whether slurm.conf names a TaskEpilog. slurm.h tells what Slurm's own copy of
 * its configuration looks like; it is looked into only where it has the size
 * that it had when this was compiled.
 */
static int has_task_epilog(void)
{
	const slurm_conf_t *conf = dlsym(RTLD_DEFAULT, "slurm_conf");
	const ElfW(Sym) *symbol = NULL;
	Dl_info info;

	if (!conf || !dladdr1(conf, &info, (void **)&symbol, RTLD_DL_SYMENT) || !symbol)
		return 0;
	return symbol->st_size == sizeof(*conf) && conf->task_epilog && *conf->task_epilog;
}

static void add_number_item(struct line *line, const char *key, spank_t spank, spank_item_t item)
{
	uint32_t number = 0;

	if (spank_get_item(spank, item, &number) == ESPANK_SUCCESS && number < NO_VAL)
		add(line, ",\"%s\":%" PRIu32, key, number);
}

/* Slurm says 0 of a step of any run: then it is not known. */
static void add_restarts(struct line *line, spank_t spank)
{
	uint32_t restarts = 0;

	if (spank_get_item(spank, S_SLURM_RESTART_COUNT, &restarts) == ESPANK_SUCCESS && restarts &&
	    restarts < NO_VAL)
		add(line, ",\"r\":%" PRIu32, restarts);
}

static void add_owner(struct line *line, spank_t spank)
{
	uid_t uid = 0;
	gid_t gid = 0;

	if (spank_get_item(spank, S_JOB_UID, &uid) == ESPANK_SUCCESS)
		add(line, ",\"u\":%u", (unsigned)uid);
	if (spank_get_item(spank, S_JOB_GID, &gid) == ESPANK_SUCCESS)
		add(line, ",\"g\":%u", (unsigned)gid);
}

static void add_memory(struct line *line, spank_t spank)
{
	uint64_t mib = 0;

	if (spank_get_item(spank, S_STEP_ALLOC_MEM, &mib) != ESPANK_SUCCESS || !mib)
		if (spank_get_item(spank, S_JOB_ALLOC_MEM, &mib) != ESPANK_SUCCESS)
			return;
	if (mib && mib < (uint64_t)INT64_MAX / 1048576)
		add(line, ",\"mem\":%" PRIu64, mib * 1048576);
}

static void add_name(struct line *line, spank_t spank)
{
	char **argv = NULL, *slash;
	int argc = 0;

	if (!isdigit((unsigned char)*launch->step))
		return; /* what these run is Slurm's own matter */
	if (spank_get_item(spank, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS || argc < 1 || !argv ||
	    !argv[0])
		return;
	slash = strrchr(argv[0], '/');
	add_text(line, "name", slash && slash[1] ? slash + 1 : argv[0], NAME_BYTES);
}

static void add_array(struct line *line, spank_t spank)
{
	uint32_t id = 0, task = NO_VAL;

	if (spank_get_item(spank, S_JOB_ARRAY_ID, &id) != ESPANK_SUCCESS || !id || id >= NO_VAL)
		return;
	if (spank_get_item(spank, S_JOB_ARRAY_TASK_ID, &task) == ESPANK_SUCCESS && task < NO_VAL)
		add(line, ",\"aj\":%" PRIu32 ",\"at\":\"%" PRIu32 "\"", id, task);
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
	add_name(&line, spank);
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
