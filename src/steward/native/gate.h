/*
 * What the parts of job_submit_steward know of each other: gate_wire.c writes and reads
 * the lines, gate_ask.c asks, gate_conf.c knows what holds where nobody answers. Nobody
 * else sees these names: all is compiled with -fvisibility=hidden. None of it needs Slurm.
 */
#ifndef STEWARD_GATE_H
#define STEWARD_GATE_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/un.h>

enum {
	REQUEST_BYTES = 1 << 20, /* of a question: more than all texts can become in JSON */
	LONGEST_TEXT = 4096,	 /* of a text that is sent; Slurm takes a quarter of it */
	LONGEST_NODELIST = 1 << 16,
	ANSWER_BYTES = 1 << 16,
};

/*
 * A line that is being written; `failed` once it is too long, or memory is out. `oversize` is
 * the field of the first text that was cut, NULL for none.
 */
struct line {
	char *text;
	size_t used, room;
	int failed;
	const char *oversize;
};

/* What the gate answers; each text is "" where nothing is to be changed. */
struct answer {
	int ok;
	char *say, *admin_comment, *qos, *partition, *account;
};

/* Adds text as it is. */
void add_raw(struct line *line, const char *text, size_t length);

/* Adds `format`, for numbers and names of ours. */
void add(struct line *line, const char *format, ...) __attribute__((format(printf, 2, 3)));

/*
 * Adds a string of anybody's making, in quotes; bytes that are no UTF-8 become \xNN. Of a
 * string of more than `longest` bytes only the beginning is added, and 0 is returned.
 */
int add_quoted(struct line *line, const char *text, size_t longest);

/* Reads an answer, the newline at its end included; 0 if it is none. To be freed either way. */
int read_answer(const char *text, size_t length, struct answer *answer);
void free_answer(struct answer *answer);

/* What came of asking. */
enum asked {
	ANSWERED,
	SWITCHED_OFF, /* the site's file is there: all is admitted */
	QUIET,	      /* it failed a while ago, and is not asked for the moment */
	FAILED,	      /* it did not answer now; `why` says it */
};

/* How the gate is asked. */
struct asking {
	char socket[sizeof(((struct sockaddr_un *)0)->sun_path)];
	char off_file[PATH_MAX];
	int64_t timeout_ns, quiet_ns;
};

/* Names the file that the gate writes the site's policy to; what it says is read when it changes. */
void follow_file(const char *path);
void forget_file(void);
struct asking how_to_ask(void);

/* Returns 1, once, if a newer Steward wrote the file: what the one before said still holds. */
int take_newer_format(void);

/* The same, for all of asking. */
void begin_asking(const char *conf_path);
void end_asking(void);

enum { WHY_BYTES = 320 }; /* of why the gate did not answer, with its socket's path */

/* Asks the gate, if that is to be done now. The line ends with a newline. */
enum asked ask_gate(const struct line *request, struct answer *answer, char *why);

/* Policy for jobs while the gate does not answer, from the weakest to the strictest. */
enum policy {
	OBSERVE, /* the bank rejects no job in any case: reject nothing */
	ALLOW,	 /* reject jobs that cannot be priced */
	DENY,	 /* reject every job */
};

/* Strictest policy of partitions, with commas between; NULL for the default partition. */
enum policy find_strictest_policy(const char *partitions);

/* Weakest policy of all partitions, for a job whose partition is unknown. */
enum policy find_weakest_policy(void);

#endif
