/*
 * Who and where: what SPANK, slurmd's environment and slurm.conf say of a step on
 * this node. Nothing is asked of the job's own environment, which anybody can set.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <inttypes.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "facts.h"
#include "shim.h"

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

int find_file(int ac, char **av, char *node, char *file)
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

void name_step(uint32_t number, char *step, size_t size)
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
int has_task_epilog(void)
{
	const slurm_conf_t *conf = dlsym(RTLD_DEFAULT, "slurm_conf");
	const ElfW(Sym) *symbol = NULL;
	Dl_info info;

	if (!conf || !dladdr1(conf, &info, (void **)&symbol, RTLD_DL_SYMENT) || !symbol)
		return 0;
	return symbol->st_size == sizeof(*conf) && conf->task_epilog && *conf->task_epilog;
}

void add_number_item(struct line *line, const char *key, spank_t spank, spank_item_t item)
{
	uint32_t number = 0;

	if (spank_get_item(spank, item, &number) == ESPANK_SUCCESS && number < NO_VAL)
		add(line, ",\"%s\":%" PRIu32, key, number);
}

/* Slurm says 0 of a step of any run: then it is not known. */
void add_restarts(struct line *line, spank_t spank)
{
	uint32_t restarts = 0;

	if (spank_get_item(spank, S_SLURM_RESTART_COUNT, &restarts) == ESPANK_SUCCESS && restarts &&
	    restarts < NO_VAL)
		add(line, ",\"r\":%" PRIu32, restarts);
}

void add_owner(struct line *line, spank_t spank)
{
	uid_t uid = 0;
	gid_t gid = 0;

	if (spank_get_item(spank, S_JOB_UID, &uid) == ESPANK_SUCCESS)
		add(line, ",\"u\":%u", (unsigned)uid);
	if (spank_get_item(spank, S_JOB_GID, &gid) == ESPANK_SUCCESS)
		add(line, ",\"g\":%u", (unsigned)gid);
}

void add_memory(struct line *line, spank_t spank)
{
	uint64_t mib = 0;

	if (spank_get_item(spank, S_STEP_ALLOC_MEM, &mib) != ESPANK_SUCCESS || !mib)
		if (spank_get_item(spank, S_JOB_ALLOC_MEM, &mib) != ESPANK_SUCCESS)
			return;
	if (mib && mib < (uint64_t)INT64_MAX / 1048576)
		add(line, ",\"mem\":%" PRIu64, mib * 1048576);
}

void add_name(struct line *line, spank_t spank, const char *step)
{
	char **argv = NULL, *slash;
	int argc = 0;

	if (!isdigit((unsigned char)*step))
		return; /* what these run is Slurm's own matter */
	if (spank_get_item(spank, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS || argc < 1 || !argv ||
	    !argv[0])
		return;
	slash = strrchr(argv[0], '/');
	add_text(line, "name", slash && slash[1] ? slash + 1 : argv[0], NAME_BYTES);
}

void add_array(struct line *line, spank_t spank)
{
	uint32_t id = 0, task = NO_VAL;

	if (spank_get_item(spank, S_JOB_ARRAY_ID, &id) != ESPANK_SUCCESS || !id || id >= NO_VAL)
		return;
	if (spank_get_item(spank, S_JOB_ARRAY_TASK_ID, &task) == ESPANK_SUCCESS && task < NO_VAL)
		add(line, ",\"aj\":%" PRIu32 ",\"at\":\"%" PRIu32 "\"", id, task);
}
