#include "egress/dns.h"

#include <ctype.h>
#include <string.h>

#define HEAD 12
#define TYPE_A 1
#define TYPE_AAAA 28
#define TYPE_OPT 41
#define CLASS_IN 1
#define PAYLOAD 1232 /* EDNS payload size that passes every network unfragmented */

static uint16_t get_u16(const uint8_t *at)
{
	return (uint16_t)(at[0] << 8 | at[1]);
}

static void put_u16(uint8_t *at, unsigned value)
{
	at[0] = (uint8_t)(value >> 8);
	at[1] = (uint8_t)value;
}

/* Read the name at HEAD. Compressed names are refused. Returns its size with the final zero, or 0. */
static size_t read_name(const uint8_t *message, size_t size, struct question *question)
{
	size_t at = HEAD;

	question->name_size = 0;
	question->plain = true;
	while (at < size && message[at]) {
		size_t label = message[at++];
		if (label > 63 || label > size - at || question->name_size + label + 1 > DNS_NAME_MAX + 1u)
			return 0;
		if (question->name_size)
			question->name[question->name_size++] = '.';
		for (size_t i = 0; i < label; i++) {
			uint8_t byte = message[at + i];
			if (byte >= 'A' && byte <= 'Z')
				byte = (uint8_t)(byte - 'A' + 'a');
			bool letter = (byte >= 'a' && byte <= 'z') || (byte >= '0' && byte <= '9');
			question->plain = question->plain && (letter || byte == '-' || byte == '_');
			if (question->name_size >= DNS_NAME_MAX)
				return 0;
			question->name[question->name_size++] = (char)byte;
		}
		at += label;
	}
	question->name[question->name_size] = 0;
	return at < size ? at + 1 - HEAD : 0;
}

bool dns_parse(const uint8_t *message, size_t size, struct question *question)
{
	/* One standard query without answers. An EDNS record may follow. */
	if (size < HEAD || message[2] & 0xf8 || get_u16(message + 4) != 1 || get_u16(message + 6) || get_u16(message + 8))
		return false;
	size_t name = read_name(message, size, question);
	if (!name || size - HEAD - name < 4)
		return false;
	question->size = name + 4;
	memcpy(question->bytes, message + HEAD, question->size);
	question->id = get_u16(message);
	const uint8_t *more = message + HEAD + question->size;
	size_t left = size - HEAD - question->size;
	question->extended = get_u16(message + 10) == 1 && left >= 11 && more[0] == 0 && get_u16(more + 1) == TYPE_OPT;
	return true;
}

static size_t write_head(const struct question *question, uint16_t id, unsigned flags, uint8_t *message)
{
	memset(message, 0, HEAD);
	put_u16(message, id);
	put_u16(message + 2, flags);
	put_u16(message + 4, 1);
	memcpy(message + HEAD, question->bytes, question->size);
	return HEAD + question->size;
}

size_t dns_query(const struct question *question, uint16_t id, uint8_t *message)
{
	size_t size = write_head(question, id, 0x0100, message); /* recursion desired */

	/* Normalize the case, which could carry hidden data. */
	if (question->plain)
		for (size_t i = 0; i + 4 < question->size; i++)
			message[HEAD + i] = (uint8_t)tolower(message[HEAD + i]);
	if (question->extended) {
		memset(message + size, 0, 11);
		put_u16(message + size + 1, TYPE_OPT);
		put_u16(message + size + 3, PAYLOAD);
		put_u16(message + 10, 1);
		size += 11;
	}
	return size;
}

size_t dns_refusal(const struct question *question, enum dns_code code, uint8_t *message)
{
	return write_head(question, question->id, 0x8180u | code, message);
}

bool dns_is_answer(const struct question *question, uint16_t id, const uint8_t *message, size_t size)
{
	if (size < HEAD + question->size || get_u16(message) != id || !(message[2] & 0x80) || get_u16(message + 4) != 1)
		return false;
	/* Label sizes are smaller than letters, so tolower() does not change them. */
	size_t name = question->size - 4;
	for (size_t i = 0; i < name; i++)
		if (tolower(message[HEAD + i]) != tolower(question->bytes[i]))
			return false;
	return memcmp(message + HEAD + name, question->bytes + name, 4) == 0;
}

/* The position after the name, or 0. */
static size_t skip_name(const uint8_t *message, size_t size, size_t at)
{
	while (at < size) {
		uint8_t label = message[at];
		if (label == 0)
			return at + 1;
		if ((label & 0xc0) == 0xc0) /* compression pointer: the rest is elsewhere, and not needed */
			return at + 2 <= size ? at + 2 : 0;
		if (label > 63)
			return 0;
		at += label + 1u;
	}
	return 0;
}

void dns_addresses(const uint8_t *message, size_t size,
		   void (*found)(void *context, const struct in6_addr *address, uint32_t seconds), void *context)
{
	if (size < HEAD)
		return;
	size_t at = skip_name(message, size, HEAD);
	if (!at)
		return;
	at += 4;
	for (unsigned i = get_u16(message + 6); i > 0; i--) {
		at = at < size ? skip_name(message, size, at) : 0;
		if (!at || at > size || size - at < 10)
			return;
		uint16_t type = get_u16(message + at), class = get_u16(message + at + 2);
		uint16_t length = get_u16(message + at + 8);
		uint32_t seconds = (uint32_t)get_u16(message + at + 4) << 16 | get_u16(message + at + 6);
		at += 10;
		if (length > size - at)
			return;
		struct in6_addr address = {.s6_addr = {[10] = 0xff, [11] = 0xff}};
		if (class == CLASS_IN && type == TYPE_A && length == 4) {
			memcpy(address.s6_addr + 12, message + at, 4);
			found(context, &address, seconds);
		} else if (class == CLASS_IN && type == TYPE_AAAA && length == 16) {
			memcpy(address.s6_addr, message + at, 16);
			found(context, &address, seconds);
		}
		at += length;
	}
}
