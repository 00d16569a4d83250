/*
 * Tells characters of UTF-8 from bytes that are none; see utf8.h.
 */
#include "utf8.h"

int utf8_length(const unsigned char *text)
{
	int length = text[0] < 0x80 ? 1 : text[0] < 0xc2 ? 0 : text[0] < 0xe0 ? 2 :
		     text[0] < 0xf0 ? 3 : text[0] < 0xf5 ? 4 : 0;

	/* What follows a character's first byte stops at the string's own end, a NUL. */
	for (int i = 1; i < length; i++)
		if ((text[i] & 0xc0) != 0x80)
			return 0;
	if ((text[0] == 0xe0 && text[1] < 0xa0) || (text[0] == 0xed && text[1] > 0x9f) ||
	    (text[0] == 0xf0 && text[1] < 0x90) || (text[0] == 0xf4 && text[1] > 0x8f))
		return 0;
	return length;
}
