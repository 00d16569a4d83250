/*
 * What facts.c asks of mounts.c: where in this process's file system things are.
 * Nobody else sees these names: all is compiled with -fvisibility=hidden.
 */
#ifndef STEWARD_MOUNTS_H
#define STEWARD_MOUNTS_H

/* A line of mountinfo, see proc_pid_mountinfo(5); its words live as long as the visit. */
struct mount {
	char *root, *point, *type, *options;
};

/* Calls `visit` for each mount that this process sees; 0 where they cannot be read. */
int each_mount(void (*visit)(const struct mount *, void *), void *with);

/* Whether a path is `above`, or below it; where the rest of it begins. */
const char *below(const char *path, const char *above);

#endif
