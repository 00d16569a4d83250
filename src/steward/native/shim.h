/*
 * What the parts of spank_steward know of each other: shim_line.c writes the lines,
 * shim_step.c knows who and where a step is, spank_steward.c has the hooks. Nobody
 * else sees these names: all is compiled with -fvisibility=hidden.
 */
#ifndef STEWARD_SHIM_H
#define STEWARD_SHIM_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
#include <slurm/slurm.h>
#include <slurm/spank.h>
#pragma GCC visibility pop

/* Weak, so that `steward plugins check` can load this without Slurm. */
#pragma weak spank_context
#pragma weak spank_get_item

enum { LINE_BYTES = 4096, NAME_BYTES = 64, NODE_BYTES = 256 };

/* ---- One line, see shim_line.c ------------------------------------------------------- */

struct line {
	size_t used;
	int too_long;
	char text[LINE_BYTES + 1]; /* the newline that may have to go before it is text[0] */
};

int64_t now_us(void);

/* Begins a line of a kind, with what every line has. */
void begin(struct line *line, const char *kind, uint32_t job, const char *node);

/* Adds `format`, for numbers and names of ours. */
void add(struct line *line, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Adds a member whose value is a string of anybody's making, at most `most` bytes of it. */
void add_text(struct line *line, const char *key, const char *value, size_t most);

/* Adds a member whose value is a number, if that is known: not negative. */
void add_known(struct line *line, const char *key, int64_t value);

/* Appends a line to a file; 0 if it is lost. */
int write_line(struct line *line, const char *file);

/* ---- Who and where, see shim_step.c --------------------------------------------------- */

/* Puts the path of this node's file together; 0 if nothing can be written. */
int find_file(int ac, char **av, char *node, char *file);

/* A step's name as Slurm writes it behind the dot. */
void name_step(uint32_t number, char *step, size_t size);

/* Whether slurm.conf names a TaskEpilog. */
int has_task_epilog(void);

/* Add members of what SPANK says of a step or task, where it says it. */
void add_number_item(struct line *line, const char *key, spank_t spank, spank_item_t item);
void add_restarts(struct line *line, spank_t spank);
void add_owner(struct line *line, spank_t spank);
void add_memory(struct line *line, spank_t spank);
void add_name(struct line *line, spank_t spank, const char *step);
void add_array(struct line *line, spank_t spank);

#endif
