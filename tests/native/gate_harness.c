/*
 * A slurmctld that does what it is told on its standard input: enough of one to call the
 * submit plugin's hooks with anything in a job's description. Texts come in hexadecimal,
 * "-" for an empty one, so that any byte can be in them. What came of an order goes to
 * standard output, a line each.
 */
#include "job_submit_steward.c"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

slurm_conf_t slurm_conf; /* as libslurmfull has it */

/* slurmctld's record of the changed job, with array_job_id and array_task_id inside. */
static uint32_t record[512];
enum { ARRAY = 14, TASK };

/* Replaces slurmctld's function: returns the record for its array and task, else NULL. */
void *find_job_array_rec(uint32_t array, uint32_t task);
void *find_job_array_rec(uint32_t array, uint32_t task)
{
	return record[ARRAY] == array && record[TASK] == task ? record : NULL;
}

static atomic_int logged;
static char last_log[1024];
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;

static void keep_log(const char *format, va_list arguments)
{
	pthread_mutex_lock(&log_lock);
	vsnprintf(last_log, sizeof(last_log), format, arguments);
	pthread_mutex_unlock(&log_lock);
	atomic_fetch_add(&logged, 1);
}

void slurm_info(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	keep_log(format, arguments);
	va_end(arguments);
}


void slurm_error(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	keep_log(format, arguments);
	va_end(arguments);
}

char *slurm_xstrdup(const char *text)
{
	return text ? strdup(text) : NULL;
}

void slurm_xfree(void **text)
{
	free(*text);
	*text = NULL;
}

/* ---- A job's description ---------------------------------------------------------------- */

#define TEXT(field) { #field, offsetof(job_desc_msg_t, field), 0 }
#define NUMBER(field) \
	{ #field, offsetof(job_desc_msg_t, field), sizeof(((job_desc_msg_t *)0)->field) }

static const struct {
	const char *name;
	size_t offset, size;
} fields[] = {
	TEXT(account), TEXT(partition), TEXT(qos), TEXT(reservation), TEXT(array_inx),
	TEXT(req_nodes), TEXT(features), TEXT(licenses), TEXT(tres_per_job), TEXT(tres_per_node),
	TEXT(tres_per_socket), TEXT(tres_per_task), TEXT(cpus_per_tres), TEXT(mem_per_tres),
	TEXT(admin_comment), TEXT(job_id_str), TEXT(comment), TEXT(name), TEXT(dependency),
	TEXT(exc_nodes),
	NUMBER(user_id), NUMBER(time_limit), NUMBER(time_min), NUMBER(min_nodes), NUMBER(max_nodes),
	NUMBER(num_tasks), NUMBER(cpus_per_task), NUMBER(min_cpus), NUMBER(max_cpus),
	NUMBER(pn_min_cpus), NUMBER(pn_min_memory), NUMBER(ntasks_per_node),
	NUMBER(ntasks_per_socket), NUMBER(ntasks_per_core), NUMBER(ntasks_per_tres),
	NUMBER(sockets_per_node), NUMBER(cores_per_socket), NUMBER(threads_per_core),
	NUMBER(core_spec), NUMBER(shared), NUMBER(overcommit), NUMBER(priority),
	NUMBER(begin_time), NUMBER(het_job_offset), NUMBER(bitflags), NUMBER(nice),
#ifdef STEWARD_STEP_ID
	{ "job_id", offsetof(job_desc_msg_t, step_id.job_id), sizeof(uint32_t) },
#else
	NUMBER(job_id),
#endif
};

enum { FIELDS = sizeof(fields) / sizeof(*fields) };

static void put_number(job_desc_msg_t *job, int field, uint64_t value)
{
	char *to = (char *)job + fields[field].offset;

	switch (fields[field].size) {
	case 1: *(uint8_t *)to = (uint8_t)value; break;
	case 2: *(uint16_t *)to = (uint16_t)value; break;
	case 4: *(uint32_t *)to = (uint32_t)value; break;
	default: *(uint64_t *)to = value;
	}
}

static char **text_at(job_desc_msg_t *job, int field)
{
	return (char **)((char *)job + fields[field].offset);
}

static void empty(job_desc_msg_t *job)
{
	for (int i = 0; i < FIELDS; i++)
		if (!fields[i].size)
			free(*text_at(job, i));
	memset(job, 0, sizeof(*job));
	for (int i = 0; i < FIELDS; i++)
		if (fields[i].size)
			put_number(job, i, UINT64_MAX - 1); /* NO_VAL of any width */
	job->begin_time = 0;
	job->bitflags = 0;
}

static unsigned nibble(char digit)
{
	return (unsigned)(digit <= '9' ? digit - '0' : digit - 'a' + 10);
}

static char *from_hex(const char *hex)
{
	size_t length = strcmp(hex, "-") ? strlen(hex) / 2 : 0;
	char *text = malloc(length + 1);

	for (size_t i = 0; i < length; i++)
		text[i] = (char)(nibble(hex[2 * i]) << 4 | nibble(hex[2 * i + 1]));
	text[length] = 0;
	return text;
}

static void set(job_desc_msg_t *job, const char *name, const char *value)
{
	for (int i = 0; i < FIELDS; i++) {
		if (strcmp(fields[i].name, name) != 0)
			continue;
		if (fields[i].size) {
			put_number(job, i, strtoull(value, NULL, 0));
		} else {
			free(*text_at(job, i));
			*text_at(job, i) = from_hex(value);
		}
		return;
	}
	fprintf(stderr, "no field %s\n", name);
	exit(2);
}

/* ---- Orders ----------------------------------------------------------------------------- */

static void say(const char *text)
{
	putchar(' ');
	if (!text || !*text)
		putchar('-');
	for (; text && *text; text++)
		printf("%02x", (unsigned char)*text);
}

static int ask(const char *op, job_desc_msg_t *job, uint32_t by, char **message)
{
	if (*op == 's')
		return job_submit(job, by, message);
#if SLURM_VERSION_NUMBER >= SLURM_VERSION_NUM(23, 2, 0)
	return job_modify(job, record, by, message);
#else
	return job_modify(job, record, by);
#endif
}

static double now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static void do_ask(const char *op, job_desc_msg_t *job, uint32_t by, char *message)
{
	double begun = now_ms();
	int code = ask(op, job, by, &message);

	printf("%d %.2f", code, now_ms() - begun);
	say(message);
	say(job->admin_comment);
	say(job->qos);
	say(job->partition);
	say(job->account);
	printf("\n");
	free(message);
}

static void do_write(const char *op, job_desc_msg_t *job, uint32_t by)
{
	struct line line = { 0 };

	write_request(&line, op, job, record, by);
	if (line.failed)
		printf("failed\n");
	else
		fwrite(line.text, 1, line.used, stdout);
	free(line.text);
}

static void do_read(const char *hex)
{
	struct answer answer;
	char *text = from_hex(hex), *exact;
	size_t length = strcmp(hex, "-") ? strlen(hex) / 2 : 0;

	/* Memory of just this size, so that a byte read beyond it is found. */
	exact = malloc(length ? length : 1);
	memcpy(exact, text, length);
	free(text);
	if (!read_answer(exact, length, &answer)) {
		printf("none\n");
	} else {
		printf("%d", answer.ok);
		say(answer.say);
		say(answer.admin_comment);
		say(answer.qos);
		say(answer.partition);
		say(answer.account);
		printf("\n");
	}
	free_answer(&answer);
	free(exact);
}

struct crowd {
	int count, admitted, refused;
	double most_ms;
};

static void *submit_many(void *argument)
{
	struct crowd *crowd = argument;

	for (int i = 0; i < crowd->count; i++) {
		job_desc_msg_t job = { 0 };
		char *message = NULL;
		double begun;

		empty(&job);
		job.user_id = 1000;
		job.partition = strdup("main");
		begun = now_ms();
		if (job_submit(&job, 1000, &message))
			crowd->refused++;
		else
			crowd->admitted++;
		if (now_ms() - begun > crowd->most_ms)
			crowd->most_ms = now_ms() - begun;
		free(message);
		empty(&job);
	}
	return NULL;
}

static void do_crowd(int threads, int count)
{
	pthread_t *ids = calloc((size_t)threads, sizeof(*ids));
	struct crowd *crowds = calloc((size_t)threads, sizeof(*crowds)), all = { 0 };

	for (int i = 0; i < threads; i++) {
		crowds[i].count = count;
		pthread_create(&ids[i], NULL, submit_many, &crowds[i]);
	}
	for (int i = 0; i < threads; i++) {
		pthread_join(ids[i], NULL);
		all.admitted += crowds[i].admitted;
		all.refused += crowds[i].refused;
		if (crowds[i].most_ms > all.most_ms)
			all.most_ms = crowds[i].most_ms;
	}
	printf("%d %d %.2f\n", all.admitted, all.refused, all.most_ms);
	free(ids);
	free(crowds);
}

int main(void)
{
	static job_desc_msg_t job;
	char *line = NULL, cluster[64] = "c";
	size_t room = 0;

	slurm_conf.cluster_name = cluster;
	setvbuf(stdout, NULL, _IOLBF, 0);
	empty(&job);
	while (getline(&line, &room, stdin) > 0) {
		char *left, *words[4];

		for (int i = 0; i < 4; i++)
			words[i] = strtok_r(i ? NULL : line, " \n", &left);
		for (int i = 0; i < 4; i++)
			words[i] = words[i] ? words[i] : "";
		if (!strcmp(words[0], "init"))
			init();
		else if (!strcmp(words[0], "fini"))
			fini();
		else if (!strcmp(words[0], "conf"))
			setenv("STEWARD_GATE_CONF", words[1], 1);
		else if (!strcmp(words[0], "cluster"))
			snprintf(cluster, sizeof(cluster), "%s", words[1]);
		else if (!strcmp(words[0], "new"))
			empty(&job);
		else if (!strcmp(words[0], "set"))
			set(&job, words[1], words[2]);
		else if (!strcmp(words[0], "record")) {
			record[ARRAY] = (uint32_t)strtoul(words[1], NULL, 10);
			record[TASK] = (uint32_t)strtoul(words[2], NULL, 10);
		} else if (!strcmp(words[0], "write"))
			do_write(words[1], &job, (uint32_t)strtoul(words[2], NULL, 10));
		else if (!strcmp(words[0], "read"))
			do_read(words[1]);
		else if (!strcmp(words[0], "ask"))
			do_ask(words[1], &job, (uint32_t)strtoul(words[2], NULL, 10),
			       *words[3] ? from_hex(words[3]) : NULL);
		else if (!strcmp(words[0], "crowd"))
			do_crowd(atoi(words[1]), atoi(words[2]));
		else if (!strcmp(words[0], "log"))
			printf("%d %s\n", atomic_load(&logged), last_log);
		else
			return 2;
	}
	empty(&job);
	free(line);
	fini();
	return 0;
}
