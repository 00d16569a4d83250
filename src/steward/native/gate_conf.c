/*
 * What the site decided of asking the gate, and of jobs while it does not answer, as the gate
 * has written it down in a file; see gate.h.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "gate.h"

enum {
	NAME_BYTES = 128,
	CONF_BYTES = 1 << 20,
	MOST_TIMEOUT_MS = 1000,
	MOST_QUIET_S = 3600,
	FORMAT = 1, /* of the file; also in steward_gate.lua and plugin_conf.py */
};

struct rule {
	char name[NAME_BYTES];
	enum policy policy;
};

struct conf {
	long format;
	struct asking asking;
	char default_partition[NAME_BYTES];
	enum policy policy; /* of every other partition */
	int has_policy;     /* whether the file states it */
	struct rule *rules;
	size_t rule_count;
};

static pthread_mutex_t conf_lock = PTHREAD_MUTEX_INITIALIZER;
static char conf_path[PATH_MAX]; /* these four under conf_lock */
static struct conf conf;
static struct stat conf_seen;
static int is_newer; /* whether the last file is of a newer format, until it is logged */

static void take_defaults(struct conf *new)
{
	memset(new, 0, sizeof(*new));
	strcpy(new->asking.socket, "/run/steward/gate.sock");
	strcpy(new->asking.off_file, "/run/steward/gate.off");
	new->asking.timeout_ns = 100 * 1000000LL;
	new->asking.quiet_ns = 10 * 1000000000LL;
	new->policy = ALLOW;
}

/* Copies a word that fits; one that does not is passed over. */
static void take_text(char *to, size_t room, const char *from)
{
	if (strlen(from) < room)
		strcpy(to, from);
}

/* Takes a number that stands in a file, of a thousandth of `unit_ns` or more. */
static void take_time(int64_t *to, const char *from, double unit_ns, double most)
{
	char *end;
	double value = strtod(from, &end);

	if (end != from && !*end && value >= 0 && value <= most)
		*to = (int64_t)(value * unit_ns);
}

/* Reads a policy; returns 0 for any other word. */
static int read_policy(const char *word, enum policy *policy)
{
	static const char *const words[] = { [OBSERVE] = "observe", [ALLOW] = "allow", [DENY] = "deny" };

	for (int i = OBSERVE; i <= DENY; i++) {
		if (!strcmp(word, words[i])) {
			*policy = (enum policy)i;
			return 1;
		}
	}
	return 0;
}

static void take_rule(struct conf *new, const char *name, const char *word)
{
	struct rule *rules = new->rules;
	enum policy policy;

	if (strlen(name) >= NAME_BYTES || !read_policy(word, &policy))
		return;
	rules = realloc(rules, (new->rule_count + 1) * sizeof(*rules));
	if (!rules)
		return;
	new->rules = rules;
	strcpy(rules[new->rule_count].name, name);
	rules[new->rule_count++].policy = policy;
}

/* Takes one line; what it does not know it passes over. */
static void take_line(struct conf *new, char *line)
{
	char *left = NULL, *words[3] = { NULL, NULL, NULL };

	line[strcspn(line, "#\r\n")] = 0;
	for (int i = 0; i < 3; i++)
		words[i] = strtok_r(i ? NULL : line, " \t", &left);
	if (!words[0] || !words[1])
		return;
	if (!strcmp(words[0], "partition") && words[2])
		take_rule(new, words[1], words[2]);
	else if (!strcmp(words[0], "format"))
		new->format = strtol(words[1], NULL, 10);
	else if (!strcmp(words[0], "policy"))
		new->has_policy |= read_policy(words[1], &new->policy);
	else if (!strcmp(words[0], "default_partition"))
		take_text(new->default_partition, NAME_BYTES, words[1]);
	else if (!strcmp(words[0], "socket"))
		take_text(new->asking.socket, sizeof(new->asking.socket), words[1]);
	else if (!strcmp(words[0], "off_file"))
		take_text(new->asking.off_file, PATH_MAX, words[1]);
	else if (!strcmp(words[0], "timeout_ms"))
		take_time(&new->asking.timeout_ns, words[1], 1e6, MOST_TIMEOUT_MS);
	else if (!strcmp(words[0], "quiet_s"))
		take_time(&new->asking.quiet_ns, words[1], 1e9, MOST_QUIET_S);
}

static void read_conf(FILE *file)
{
	struct conf new;
	char *line = NULL;
	size_t room = 0, total = 0;
	ssize_t length;

	take_defaults(&new);
	while ((length = getline(&line, &room, file)) > 0 && (total += (size_t)length) < CONF_BYTES)
		take_line(&new, line);
	free(line);
	is_newer = new.format > FORMAT;
	free(conf.rules);
	if (!is_newer) {
		conf = new;
		return;
	}
	/* Every format states policies alike; other lines may mean something else now. */
	conf.rules = new.rules;
	conf.rule_count = new.rule_count;
	if (new.has_policy)
		conf.policy = new.policy;
}

/*
 * Reads the file again where it is another one. Where it is gone, what it said still holds:
 * a daemon that ends may take it along, and with it goes nobody's policy.
 */
static void follow_conf(void)
{
	struct stat seen;
	FILE *file;

	if (!*conf_path || stat(conf_path, &seen) ||
	    (seen.st_mtim.tv_sec == conf_seen.st_mtim.tv_sec &&
	     seen.st_mtim.tv_nsec == conf_seen.st_mtim.tv_nsec &&
	     seen.st_ino == conf_seen.st_ino && seen.st_size == conf_seen.st_size) ||
	    !S_ISREG(seen.st_mode) || !(file = fopen(conf_path, "re")))
		return;
	conf_seen = seen;
	read_conf(file);
	fclose(file);
}

void follow_file(const char *path)
{
	pthread_mutex_lock(&conf_lock);
	take_defaults(&conf);
	memset(&conf_seen, 0, sizeof(conf_seen));
	*conf_path = 0;
	take_text(conf_path, sizeof(conf_path), path);
	follow_conf();
	pthread_mutex_unlock(&conf_lock);
}

void forget_file(void)
{
	pthread_mutex_lock(&conf_lock);
	free(conf.rules);
	take_defaults(&conf);
	pthread_mutex_unlock(&conf_lock);
}

struct asking how_to_ask(void)
{
	struct asking found;

	pthread_mutex_lock(&conf_lock);
	follow_conf();
	found = conf.asking;
	pthread_mutex_unlock(&conf_lock);
	return found;
}

int take_newer_format(void)
{
	int newer;

	pthread_mutex_lock(&conf_lock);
	newer = is_newer;
	is_newer = 0;
	pthread_mutex_unlock(&conf_lock);
	return newer;
}

static enum policy find_rule(const char *name, size_t length)
{
	enum policy policy = conf.policy;

	for (size_t i = 0; i < conf.rule_count; i++)
		if (strlen(conf.rules[i].name) == length && !memcmp(conf.rules[i].name, name, length))
			policy = conf.rules[i].policy;
	return policy;
}

enum policy find_strictest_policy(const char *partitions)
{
	enum policy strictest = OBSERVE;

	pthread_mutex_lock(&conf_lock);
	if (!partitions || !*partitions)
		partitions = conf.default_partition;
	for (;;) {
		size_t length = strcspn(partitions, ",");
		enum policy policy = find_rule(partitions, length);

		if (policy > strictest)
			strictest = policy;
		if (!partitions[length])
			break;
		partitions += length + 1;
	}
	pthread_mutex_unlock(&conf_lock);
	return strictest;
}

enum policy find_weakest_policy(void)
{
	enum policy weakest;

	pthread_mutex_lock(&conf_lock);
	weakest = conf.policy;
	for (size_t i = 0; i < conf.rule_count; i++)
		if (conf.rules[i].policy < weakest)
			weakest = conf.rules[i].policy;
	pthread_mutex_unlock(&conf_lock);
	return weakest;
}
