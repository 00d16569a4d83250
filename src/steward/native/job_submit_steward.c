/*
 * job_submit_steward: asks Steward's gate whether a job can be paid.
 *
 * A plugin of slurmctld's, the last in JobSubmitPlugins, so that it sees what the others
 * have changed:
 *
 *     PluginDir=/usr/lib/slurm:/usr/local/lib/steward/22.05.8
 *     JobSubmitPlugins=lua,steward
 *
 * The gate gets a job's description in one line of JSON, and says in another whether it may
 * be queued, and which fields to change. If it does not answer in time, the plugin admits or
 * rejects jobs by the site's outage policy (see gate_conf.c).
 *
 * Only Slurm's public headers are used. slurmctld calls this from several threads at once
 * (23.02 and later): all that is shared lies in gate_ask.c and
 * gate_conf.c, which know it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <link.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gate.h"

#pragma GCC visibility push(default)
#include <slurm/slurm.h>
#include <slurm/slurm_errno.h>
#include <slurm/spank.h>

const char plugin_name[] = "Steward: checks whether an account can pay for a job";
const char plugin_type[] = "job_submit/steward";
const uint32_t plugin_version = SLURM_VERSION_NUMBER;

int init(void);
int fini(void);
int job_submit(job_desc_msg_t *job, uint32_t by, char **message);
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(23, 2, 0)
int job_modify(job_desc_msg_t *job, void *record, uint32_t by, char **message);
#else
int job_modify(job_desc_msg_t *job, void *record, uint32_t by);
#endif

/* Of libslurmfull: what slurmctld frees must be of its own making. In no public header. */
char *slurm_xstrdup(const char *text);
void slurm_xfree(void **text);
#pragma GCC visibility pop

/* Weak, so that `steward plugins check` can load this without Slurm. */
#pragma weak slurm_error
#pragma weak slurm_info
#pragma weak slurm_xstrdup
#pragma weak slurm_xfree

static const char default_conf[] = "/run/steward/gate.conf";
static const char denied_message[] =
	"Rejected, because the bank does not answer: try again in a minute.";
static const char oversize_message[] =
	"This job cannot be priced: one of its lists is longer than Slurm accepts. Shorten it.";

static const slurm_conf_t *slurms_conf;
static atomic_int is_said; /* that the gate fails */
static void *(*find_task)(uint32_t array, uint32_t task); /* find_job_array_rec of slurmctld */

/* `--exclusive=topo`, of 24.11 on: whole nodes. No older slurmctld gives a job this number. */
enum { SHARED_TOPO = 4 };

/* ---- What a job asks for ---------------------------------------------------------------- */

/* Adds a text, or its beginning where it is longer than any that can be priced. */
static void add_long_text(struct line *line, const char *name, const char *text, size_t longest)
{
	if (!text || !*text)
		return;
	add(line, ",\"%s\":", name);
	if (!add_quoted(line, text, longest) && !line->oversize)
		line->oversize = name;
}

static void add_text(struct line *line, const char *name, const char *text)
{
	add_long_text(line, name, text, LONGEST_TEXT);
}

static void add_16(struct line *line, const char *name, uint16_t value)
{
	if (value < NO_VAL16)
		add(line, ",\"%s\":%u", name, value);
}

static void add_32(struct line *line, const char *name, uint32_t value)
{
	if (value < NO_VAL)
		add(line, ",\"%s\":%" PRIu32, name, value);
}

static void add_minutes(struct line *line, const char *name, uint32_t value)
{
	if (value == INFINITE)
		add(line, ",\"%s\":-1", name);
	else
		add_32(line, name, value);
}

static void add_true(struct line *line, const char *name, int is_so)
{
	if (is_so)
		add(line, ",\"%s\":true", name);
}

static void add_memory(struct line *line, uint64_t mib)
{
	if (mib == NO_VAL64)
		return;
	if (mib & MEM_PER_CPU)
		add(line, ",\"mem_per_cpu_mib\":%" PRIu64, mib & ~MEM_PER_CPU);
	else
		add(line, ",\"pn_min_memory_mib\":%" PRIu64, mib);
}

static void add_size(struct line *line, const job_desc_msg_t *job)
{
	add_32(line, "min_nodes", job->min_nodes);
	add_32(line, "max_nodes", job->max_nodes);
	add_32(line, "num_tasks", job->num_tasks);
	add_16(line, "cpus_per_task", job->cpus_per_task);
	add_32(line, "min_cpus", job->min_cpus);
	add_32(line, "max_cpus", job->max_cpus);
	add_16(line, "pn_min_cpus", job->pn_min_cpus);
	add_memory(line, job->pn_min_memory);
	add_16(line, "ntasks_per_node", job->ntasks_per_node);
	add_16(line, "ntasks_per_socket", job->ntasks_per_socket);
	add_16(line, "ntasks_per_core", job->ntasks_per_core);
	add_16(line, "ntasks_per_tres", job->ntasks_per_tres);
	add_16(line, "sockets_per_node", job->sockets_per_node);
	add_16(line, "cores_per_socket", job->cores_per_socket);
	add_16(line, "threads_per_core", job->threads_per_core);
	/* A number of threads costs no less than one of cores: the whole node, either way. */
	if (job->core_spec < NO_VAL16)
		add(line, ",\"core_spec\":%u", job->core_spec & ~CORE_SPEC_THREAD);
	/* Jobs of one user or MCS label may share a node, and are billed what they ask for. */
	add_true(line, "exclusive", job->shared == JOB_SHARED_NONE || job->shared == SHARED_TOPO);
	add_true(line, "overcommit", job->overcommit != NO_VAL8 && job->overcommit);
}

/* Texts that are priced, or that say who pays; see LONGEST_TEXTS in estimate/bounds.py. */
static void add_names(struct line *line, const job_desc_msg_t *job)
{
	add_text(line, "account", job->account);
	add_text(line, "partition", job->partition);
	add_text(line, "qos", job->qos);
	add_text(line, "array", job->array_inx);
	add_long_text(line, "req_nodes", job->req_nodes, LONGEST_NODELIST);
	add_text(line, "licenses", job->licenses);
	add_text(line, "tres_per_job", job->tres_per_job);
	add_text(line, "tres_per_node", job->tres_per_node);
	add_text(line, "tres_per_socket", job->tres_per_socket);
	add_text(line, "tres_per_task", job->tres_per_task);
	add_text(line, "cpus_per_tres", job->cpus_per_tres);
	add_text(line, "mem_per_tres", job->mem_per_tres);
}

static uint32_t id_of(const job_desc_msg_t *job)
{
#ifdef STEWARD_STEP_ID /* said by steward.admin.plugins.build, which looks into slurm.h */
	uint32_t id = job->step_id.job_id;
#else
	uint32_t id = job->job_id;
#endif

	/* Commands name an array's task 5_3, and slurmctld the job that is meant. */
	if ((!id || id >= NO_VAL) && job->job_id_str)
		id = (uint32_t)strtoul(job->job_id_str, NULL, 10);
	return id;
}

/*
 * Find the array and the task of slurmctld's job record; 0 if it has none or cannot be read.
 * slurmctld gives a changed task its own job id, and users may name the task by it. No public
 * header declares the record. In every version array_job_id and array_task_id are adjacent near
 * its start; slurmctld's own search with these two numbers must return this very record.
 */
static uint32_t find_array(const void *record, uint32_t *task)
{
	uint32_t words[64];

	if (!record || !find_task)
		return 0;
	memcpy(words, record, sizeof(words)); /* less than any version's record */
	for (size_t i = 0; i + 1 < sizeof(words) / sizeof(*words); i++) {
		if (words[i] && words[i] < NO_VAL && words[i + 1] < NO_VAL &&
		    find_task(words[i], words[i + 1]) == record) {
			*task = words[i + 1];
			return words[i];
		}
	}
	return 0;
}

static const char *cluster_name(void)
{
	return slurms_conf && slurms_conf->cluster_name ? slurms_conf->cluster_name : "";
}

/* Whether an update gives a job a priority, and so lets it go if it was held. */
static int is_released(const job_desc_msg_t *job)
{
	return job->priority != NO_VAL && job->priority;
}

/* Writes the question; the line is to be freed. */
static void write_request(struct line *line, const char *op, const job_desc_msg_t *job,
			  const void *record, uint32_t by)
{
	const int is_modify = !strcmp(op, "modify");
	uint32_t task = 0;
	const uint32_t array = is_modify ? find_array(record, &task) : 0;
	const int is_by_own_id = array && id_of(job) != array;

	add(line, "{\"v\":1,\"op\":\"%s\",\"cluster\":", op);
	add_quoted(line, cluster_name(), LONGEST_TEXT);
	add(line, ",\"by\":%" PRIu32, by);
	if (is_by_own_id)
		add(line, ",\"jobs\":\"%" PRIu32 "_%" PRIu32 "\"", array, task);
	else if (is_modify)
		add_text(line, "jobs", job->job_id_str);
	/* The user is the job's, never who submits it; an update names whom it likes. */
	add(line, ",\"job\":{\"uid\":");
	if (is_modify || job->user_id >= NO_VAL)
		add(line, "-1");
	else
		add(line, "%" PRIu32, job->user_id);
	if (is_modify)
		add_32(line, "job_id", is_by_own_id ? array : id_of(job));
	add_names(line, job);
	if (!is_modify) /* the gate adds its token to it */
		add_text(line, "admin_comment", job->admin_comment);
	add_minutes(line, "time_limit_min", job->time_limit);
	add_minutes(line, "time_min_min", job->time_min);
	add_size(line, job);
	if (job->begin_time > 0)
		add(line, ",\"begin_us\":%" PRId64, (int64_t)job->begin_time * 1000000);
	add_true(line, "held", job->priority == 0);
	add_true(line, "released", is_modify && is_released(job));
	add_true(line, "het", !is_modify && job->het_job_offset < NO_VAL);
	add_true(line, "cron", (job->bitflags & CRON_JOB) != 0);
	add(line, "}");
	if (line->oversize)
		add(line, ",\"oversize\":\"%s\"", line->oversize);
	add(line, "}\n");
}

/* Whether an update may make a job cost more; a note, a new name or a hold does not. */
static int is_about_cost(const job_desc_msg_t *job)
{
	return job->account || job->partition || job->qos || job->array_inx ||
	       job->req_nodes || job->licenses || job->tres_per_job ||
	       job->tres_per_node || job->tres_per_socket || job->tres_per_task ||
	       job->cpus_per_tres || job->mem_per_tres || job->time_limit != NO_VAL ||
	       job->time_min != NO_VAL || job->min_nodes != NO_VAL || job->max_nodes != NO_VAL ||
	       job->num_tasks != NO_VAL || job->cpus_per_task != NO_VAL16 ||
	       job->min_cpus != NO_VAL || job->max_cpus != NO_VAL ||
	       job->pn_min_cpus != NO_VAL16 || job->pn_min_memory != NO_VAL64 ||
	       job->ntasks_per_node != NO_VAL16 || job->ntasks_per_socket != NO_VAL16 ||
	       job->ntasks_per_core != NO_VAL16 || job->ntasks_per_tres != NO_VAL16 ||
	       job->sockets_per_node != NO_VAL16 || job->cores_per_socket != NO_VAL16 ||
	       job->threads_per_core != NO_VAL16 || job->core_spec != NO_VAL16 ||
	       job->shared != NO_VAL16 || job->begin_time > 0 ||
	       is_released(job);
}

/* ---- What becomes of it ----------------------------------------------------------------- */

static void replace(char **to, const char *text)
{
	if (!text || !*text)
		return;
	slurm_xfree((void **)to);
	*to = slurm_xstrdup(text);
}

/* Tells the user, behind what other plugins have said. */
static void tell(char **message, const char *text)
{
	char *both;

	if (!message || !text || !*text)
		return;
	if (!*message) {
		*message = slurm_xstrdup(text);
	} else if ((both = malloc(strlen(*message) + strlen(text) + 2))) {
		strcpy(both, *message);
		strcat(both, "\n");
		strcat(both, text);
		replace(message, both);
		free(both);
	}
}

/* Says once in slurmctld's log that the gate fails, and once that it is there again. */
static void log_change(enum asked asked, const char *why)
{
	if (take_newer_format())
		slurm_error("job_submit/steward: a newer Steward wrote gate.conf: only its policies "
			    "apply; install this plugin again and restart slurmctld");
	if (asked == FAILED && !atomic_exchange(&is_said, 1))
		slurm_error("job_submit/steward: the gate %s; the outage policy applies until it answers",
			    why);
	else if (asked == ANSWERED && atomic_exchange(&is_said, 0))
		slurm_info("job_submit/steward: the gate answers again");
}

/* What Slurm itself may always change, whatever becomes of the gate. */
static int is_slurms(uint32_t by)
{
	return by == 0 || by == getuid();
}

static int decide(const char *op, job_desc_msg_t *job, const void *record, uint32_t by,
		  char **message)
{
	struct line line = { 0 };
	struct answer answer;
	char why[WHY_BYTES];
	enum asked asked;
	int code = SLURM_SUCCESS;

	if (!slurm_xstrdup || !slurm_xfree)
		return SLURM_SUCCESS; /* init has said so */
	write_request(&line, op, job, record, by);
	asked = ask_gate(&line, &answer, why);
	free(line.text);
	log_change(asked, why);
	if (asked == ANSWERED) {
		tell(message, answer.say);
		if (answer.ok) {
			replace(&job->admin_comment, answer.admin_comment);
			replace(&job->qos, answer.qos);
			replace(&job->partition, answer.partition);
			replace(&job->account, answer.account);
		} else {
			code = ESLURM_ACCOUNTING_POLICY;
		}
		free_answer(&answer);
	} else if (asked != SWITCHED_OFF) {
		/* An update does not show the job's partition. */
		enum policy policy = *op == 's' || job->partition ?
					     find_strictest_policy(job->partition) :
					     find_weakest_policy();

		if (policy >= ALLOW && line.oversize && by != 0) {
			/* Nobody could make it shorter later. */
			tell(message, oversize_message);
			code = ESLURM_ACCOUNTING_POLICY;
		} else if (policy == DENY && (*op == 's' || !is_slurms(by))) {
			tell(message, denied_message);
			code = ESLURM_ACCOUNTING_POLICY;
		}
	}
	return code;
}

int job_submit(job_desc_msg_t *job, uint32_t by, char **message)
{
	return decide("submit", job, NULL, by, message);
}

#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(23, 2, 0)
int job_modify(job_desc_msg_t *job, void *record, uint32_t by, char **message)
{
	return is_about_cost(job) ? decide("modify", job, record, by, message) : SLURM_SUCCESS;
}
#else
int job_modify(job_desc_msg_t *job, void *record, uint32_t by)
{
	char *message = NULL;
	int code;

	if (!is_about_cost(job))
		return SLURM_SUCCESS;
	code = decide("modify", job, record, by, &message);
	if (message) {
		/* This Slurm has no way to tell the user. */
		slurm_info("job_submit/steward: JobId=%" PRIu32 ": %s", id_of(job), message);
		slurm_xfree((void **)&message);
	}
	return code;
}
#endif

/*
 * Slurm hands a plugin no name of the cluster. The configuration that it has loaded is
 * there for all to see, but no public header says that this is its form: it is looked into
 * only where it has the size that it had when this was compiled.
 */
static const slurm_conf_t *find_conf(void)
{
	const slurm_conf_t *found = dlsym(RTLD_DEFAULT, "slurm_conf");
	const ElfW(Sym) *symbol = NULL;
	Dl_info info;

	if (!found || !dladdr1(found, &info, (void **)&symbol, RTLD_DL_SYMENT) || !symbol ||
	    symbol->st_size != sizeof(*found))
		return NULL;
	return found;
}

int init(void)
{
	const char *path = getenv("STEWARD_GATE_CONF");

	slurms_conf = find_conf();
	*(void **)&find_task = dlsym(RTLD_DEFAULT, "find_job_array_rec");
	begin_asking(path && *path ? path : default_conf);
	atomic_store(&is_said, 0);
	if (!slurm_xstrdup || !slurm_xfree)
		slurm_error("job_submit/steward: this slurmctld lacks xstrdup: every job is admitted");
	return SLURM_SUCCESS;
}

int fini(void)
{
	end_asking();
	return SLURM_SUCCESS;
}
