/*
 * What every plugin knows of UTF-8, for texts of anybody's making. Nobody else sees this
 * name: all is compiled with -fvisibility=hidden.
 */
#ifndef STEWARD_UTF8_H
#define STEWARD_UTF8_H

/*
 * How many bytes the UTF-8 character at `text` has, 0 if it is none (RFC 3629). The text ends
 * with a NUL, behind which nothing is looked at.
 */
int utf8_length(const unsigned char *text);

#endif
