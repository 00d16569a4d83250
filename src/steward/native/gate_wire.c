/*
 * The two lines of JSON between slurmctld's plugin and Steward's gate, see gate.h.
 *
 * What is written holds texts of users, what is read may come from a gate that is broken:
 * so any bytes can be written, and reading is total and bounded. tests/unit/gate_vectors.json
 * is what this and steward_gate.lua agree on.
 */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gate.h"
#include "utf8.h"

enum { DEPTH = 16, FIRST_ROOM = 1024 };

/* ---- Writing ---------------------------------------------------------------------------- */

static int make_room(struct line *line, size_t length)
{
	size_t room = line->room ? line->room : FIRST_ROOM;
	char *text;

	if (line->failed || length > REQUEST_BYTES - line->used)
		return !(line->failed = 1);
	if (line->used + length <= line->room)
		return 1;
	while (room < line->used + length)
		room *= 2;
	if (!(text = realloc(line->text, room)))
		return !(line->failed = 1);
	line->text = text;
	line->room = room;
	return 1;
}

void add_raw(struct line *line, const char *text, size_t length)
{
	if (!make_room(line, length))
		return;
	memcpy(line->text + line->used, text, length);
	line->used += length;
}

void add(struct line *line, const char *format, ...)
{
	char text[128];
	va_list arguments;
	int length;

	va_start(arguments, format);
	length = vsnprintf(text, sizeof(text), format, arguments);
	va_end(arguments);
	if (length < 0 || (size_t)length >= sizeof(text))
		line->failed = 1;
	else
		add_raw(line, text, (size_t)length);
}

int add_quoted(struct line *line, const char *text, size_t longest)
{
	const unsigned char *at = (const unsigned char *)text, *end = at + strnlen(text, longest);

	add_raw(line, "\"", 1);
	while (at < end && !line->failed) {
		int length = utf8_length(at);

		if (!length)
			add(line, "\\\\x%02x", *at);
		else if (*at == '"' || *at == '\\')
			add(line, "\\%c", *at);
		else if (*at < 0x20 || *at == 0x7f)
			add(line, "\\u%04x", *at);
		else
			add_raw(line, (const char *)at, (size_t)length);
		at += length ? length : 1;
	}
	add_raw(line, "\"", 1);
	return !*end;
}

/* ---- Reading ---------------------------------------------------------------------------- */

struct reader {
	const char *at, *end;
};

static void pass_blanks(struct reader *reader)
{
	while (reader->at < reader->end && strchr(" \t\r", *reader->at) && *reader->at)
		reader->at++;
}

static int take(struct reader *reader, char wanted)
{
	pass_blanks(reader);
	if (reader->at == reader->end || *reader->at != wanted)
		return 0;
	reader->at++;
	return 1;
}

static int take_word(struct reader *reader, const char *word)
{
	size_t length = strlen(word);

	if ((size_t)(reader->end - reader->at) < length || memcmp(reader->at, word, length) != 0)
		return 0;
	reader->at += length;
	return 1;
}

static int read_hex(struct reader *reader, unsigned *code)
{
	*code = 0;
	if (reader->end - reader->at < 4)
		return 0;
	for (int i = 0; i < 4; i++) {
		unsigned char one = (unsigned char)*reader->at++;
		unsigned char lower = one | 0x20;

		if (one >= '0' && one <= '9')
			*code = *code * 16 + (one - '0');
		else if (lower >= 'a' && lower <= 'f')
			*code = *code * 16 + (lower - 'a' + 10);
		else
			return 0;
	}
	return 1;
}

/* Writes a character as UTF-8: never more bytes than its escape had. */
static char *put_utf8(char *to, unsigned code)
{
	if (code < 0x80) {
		*to++ = (char)code;
	} else if (code < 0x800) {
		*to++ = (char)(0xc0 | code >> 6);
		*to++ = (char)(0x80 | (code & 0x3f));
	} else if (code < 0x10000) {
		*to++ = (char)(0xe0 | code >> 12);
		*to++ = (char)(0x80 | (code >> 6 & 0x3f));
		*to++ = (char)(0x80 | (code & 0x3f));
	} else {
		*to++ = (char)(0xf0 | code >> 18);
		*to++ = (char)(0x80 | (code >> 12 & 0x3f));
		*to++ = (char)(0x80 | (code >> 6 & 0x3f));
		*to++ = (char)(0x80 | (code & 0x3f));
	}
	return to;
}

/* Reads what stands behind \u; half of a pair that stands alone becomes U+FFFD. */
static int read_code(struct reader *reader, unsigned *code)
{
	struct reader ahead;
	unsigned low;

	if (!read_hex(reader, code) || !*code)
		return 0; /* a NUL would end the text for Slurm */
	if (*code >= 0xd800 && *code < 0xdc00) {
		ahead = *reader;
		if (take_word(&ahead, "\\u") && read_hex(&ahead, &low) && low >= 0xdc00 &&
		    low < 0xe000) {
			*code = 0x10000 + ((*code - 0xd800) << 10) + (low - 0xdc00);
			*reader = ahead;
			return 1;
		}
	}
	if (*code >= 0xd800 && *code < 0xe000)
		*code = 0xfffd;
	return 1;
}

static int read_escape(struct reader *reader, char **to)
{
	static const char from[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
	const char *found;
	unsigned code;

	if (reader->at == reader->end)
		return 0;
	if (*reader->at == 'u') {
		reader->at++;
		if (!read_code(reader, &code))
			return 0;
		*to = put_utf8(*to, code);
		return 1;
	}
	found = *reader->at ? strchr(from, *reader->at) : NULL;
	if (!found)
		return 0;
	reader->at++;
	*(*to)++ = meant[found - from];
	return 1;
}

/* Reads a string into new memory; 0 if there is none. */
static int read_string(struct reader *reader, char **text)
{
	char *to;

	*text = NULL;
	if (!take(reader, '"') || !(*text = to = malloc((size_t)(reader->end - reader->at) + 1)))
		return 0;
	while (reader->at < reader->end && *reader->at != '"') {
		if ((unsigned char)*reader->at < 0x20)
			return 0;
		if (*reader->at != '\\') {
			*to++ = *reader->at++;
			continue;
		}
		reader->at++;
		if (!read_escape(reader, &to))
			return 0;
	}
	*to = 0;
	return take(reader, '"');
}

static int pass_string(struct reader *reader)
{
	char *text;
	int is_one = read_string(reader, &text);

	free(text);
	return is_one;
}

static int read_number(struct reader *reader, const char **begin, size_t *length)
{
	const char *at;

	pass_blanks(reader);
	at = *begin = reader->at;
	if (at < reader->end && *at == '-')
		at++;
	if (at == reader->end || *at < '0' || *at > '9')
		return 0;
	while (at < reader->end && *at && strchr("0123456789+-.eE", *at))
		at++;
	*length = (size_t)(at - *begin);
	reader->at = at;
	return 1;
}

/* Passes over a value of any kind, which a later gate may send. */
static int pass_value(struct reader *reader, int depth)
{
	const char *begin;
	size_t length;
	char close;

	pass_blanks(reader);
	if (depth > DEPTH || reader->at == reader->end)
		return 0;
	if (*reader->at == '"')
		return pass_string(reader);
	if (*reader->at != '{' && *reader->at != '[')
		return take_word(reader, "true") || take_word(reader, "false") ||
		       take_word(reader, "null") || read_number(reader, &begin, &length);
	close = *reader->at++ == '{' ? '}' : ']';
	if (take(reader, close))
		return 1;
	do {
		if (close == '}' && (!pass_string(reader) || !take(reader, ':')))
			return 0;
		if (!pass_value(reader, depth + 1))
			return 0;
	} while (take(reader, ','));
	return take(reader, close);
}

static char **text_of(struct answer *answer, const char *name)
{
	return !strcmp(name, "say")	      ? &answer->say :
	       !strcmp(name, "admin_comment") ? &answer->admin_comment :
	       !strcmp(name, "qos")	      ? &answer->qos :
	       !strcmp(name, "partition")     ? &answer->partition :
	       !strcmp(name, "account")	      ? &answer->account :
						NULL;
}

/* Reads a member's value; `seen` has bit 1 for the version, bit 2 for the verdict. */
static int read_member(struct reader *reader, const char *name, struct answer *answer, int *seen)
{
	const char *begin;
	size_t length;
	char **text = text_of(answer, name);

	pass_blanks(reader);
	if (text) {
		free(*text);
		return read_string(reader, text);
	}
	if (!strcmp(name, "v")) {
		*seen |= 1;
		return read_number(reader, &begin, &length) && length == 1 && *begin == '1';
	}
	if (!strcmp(name, "ok")) {
		*seen |= 2;
		answer->ok = take_word(reader, "true");
		return answer->ok || take_word(reader, "false");
	}
	return pass_value(reader, 1);
}

int read_answer(const char *text, size_t length, struct answer *answer)
{
	struct reader reader = { text, memchr(text, '\n', length) };
	int seen = 0, is_fine = 0;
	char *name = NULL;

	memset(answer, 0, sizeof(*answer));
	if (!reader.end || !take(&reader, '{'))
		return 0;
	do {
		free(name);
		name = NULL;
		is_fine = read_string(&reader, &name) && take(&reader, ':') &&
			  read_member(&reader, name, answer, &seen);
	} while (is_fine && take(&reader, ','));
	free(name);
	if (!is_fine || !take(&reader, '}') || seen != 3)
		return 0;
	pass_blanks(&reader);
	return reader.at == reader.end;
}

void free_answer(struct answer *answer)
{
	free(answer->say);
	free(answer->admin_comment);
	free(answer->qos);
	free(answer->partition);
	free(answer->account);
	memset(answer, 0, sizeof(*answer));
}
