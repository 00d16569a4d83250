/*
 * The mounts that the files of a step lie on: whether lines may be written in a
 * directory, and, for facts.c, where the kernel's own files are seen.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include "facts.h"
#include "mounts.h"

/* Undoes the octal escapes of blanks and backslashes in a mount's fields. */
static void unescape(char *text)
{
	char *to = text;

	for (char *from = text; *from; to++) {
		if (from[0] == '\\' && from[1] >= '0' && from[1] <= '3' && from[2] >= '0' &&
		    from[2] <= '7' && from[3] >= '0' && from[3] <= '7') {
			*to = (char)((from[1] - '0') * 64 + (from[2] - '0') * 8 + (from[3] - '0'));
			from += 4;
		} else {
			*to = *from++;
		}
	}
	*to = '\0';
}

/* Takes a line of mountinfo apart, see proc_pid_mountinfo(5); 0 if it is none. */
static int parse_mount(char *line, struct mount *mount)
{
	char *behind = strstr(line, " - ");
	char *save = NULL;

	if (!behind)
		return 0;
	*behind = '\0';
	for (int field = 1; field <= 5; field++) {
		char *word = strtok_r(field == 1 ? line : NULL, " ", &save);

		if (!word)
			return 0;
		if (field == 4)
			mount->root = word;
		if (field == 5)
			mount->point = word;
	}
	mount->type = strtok_r(behind + 3, " ", &save);
	if (!mount->type || !strtok_r(NULL, " ", &save)) /* the source */
		return 0;
	mount->options = strtok_r(NULL, " \n", &save);
	if (!mount->options)
		mount->options = "";
	unescape(mount->root);
	unescape(mount->point);
	return 1;
}

const char *below(const char *path, const char *above)
{
	size_t length = strlen(above);

	if (length && above[length - 1] == '/')
		length--;
	if (strncmp(path, above, length) || (path[length] && path[length] != '/'))
		return NULL;
	return path + length;
}

int each_mount(void (*visit)(const struct mount *, void *), void *with)
{
	FILE *table = fopen("/proc/self/mountinfo", "re");
	struct mount mount;
	char *line = NULL;
	size_t size = 0;

	if (!table)
		return 0;
	while (getline(&line, &size, table) > 0)
		if (parse_mount(line, &mount))
			visit(&mount, with);
	free(line);
	fclose(table);
	return 1;
}

struct holder {
	const char *path;
	size_t length;
	int network;
};

static int is_network_type(const char *type)
{
	static const char *const types[] = { "9p", "afs", "autofs", "beegfs", "ceph", "cifs", "coda",
		"fuse", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
		"orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs" };

	for (size_t i = 0; i < sizeof(types) / sizeof(*types); i++)
		if (!strcmp(type, types[i]))
			return 1;
	return !strncmp(type, "fuse.", 5);
}

static void see_holder(const struct mount *mount, void *with)
{
	struct holder *holder = with;

	/* Of two at one place the later hides the earlier. */
	if (below(holder->path, mount->point) && strlen(mount->point) >= holder->length) {
		holder->length = strlen(mount->point);
		holder->network = is_network_type(mount->type);
	}
}

static int is_network_magic(uint32_t magic)
{
	static const uint32_t magics[] = {
		0x6969,	    /* NFS */
		0x0bd00bd0, /* Lustre */
		0x47504653, /* GPFS */
		0x19830326, /* BeeGFS */
		0xff534d42, 0xfe534d42, 0x517b, /* CIFS, SMB2, SMB */
		0x00c36400, /* Ceph */
		0x01021997, /* 9P */
		0x5346414f, 0x6b414653, /* AFS */
		0x65735546, /* FUSE */
		0x01161970, /* GFS2 */
		0x7461636f, /* OCFS2 */
		0x20030528, /* OrangeFS */
		0xaad7aaea, /* PanFS */
		0x73757245, /* Coda */
		0x0187,	    /* autofs */
	};

	for (size_t i = 0; i < sizeof(magics) / sizeof(*magics); i++)
		if (magic == magics[i])
			return 1;
	return 0;
}

/*
 * Whether a directory may be written to: on a network file system a server that
 * is away would hang slurmstepd. The kernel's list of mounts is asked first,
 * because statfs(2) itself would hang there; and what others may write to could
 * hold anything under our file's name.
 */
int is_fit(const char *directory)
{
	struct holder holder = { .path = directory };
	struct statfs system;
	struct stat status;

	if (!each_mount(see_holder, &holder) || holder.network)
		return 0;
	if (statfs(directory, &system) || is_network_magic((uint32_t)system.f_type))
		return 0;
	return !stat(directory, &status) && S_ISDIR(status.st_mode) && !(status.st_mode & S_IWOTH);
}
