/* DNS messages as bytes: parse queries, build queries and answers. No sockets here. */
#pragma once

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DNS_MAX 4096 /* largest message, in both directions */
#define DNS_NAME_MAX 253

enum dns_code { DNS_FAILED = 2, DNS_NO_SUCH_NAME = 3 };

struct question {
	uint8_t bytes[DNS_NAME_MAX + 2 + 4]; /* name, type and class, as in the message */
	size_t size;
	char name[DNS_NAME_MAX + 1]; /* lower case, no final dot; "" for the root */
	size_t name_size;
	bool plain;    /* the name has only characters of host names */
	bool extended; /* the client uses EDNS: it accepts answers above 512 bytes */
	uint16_t id;
};

/* Parse a query with exactly one question; false for everything else. */
bool dns_parse(const uint8_t *message, size_t size, struct question *question);
/* Build the query for the resolver. It contains only the question, nothing else of the client's message. */
size_t dns_query(const struct question *question, uint16_t id, uint8_t *message);
size_t dns_refusal(const struct question *question, enum dns_code code, uint8_t *message);

/* Whether the message answers this question, sent with this id. */
bool dns_is_answer(const struct question *question, uint16_t id, const uint8_t *message, size_t size);
/* Call `found` for each address in an answer. */
void dns_addresses(const uint8_t *message, size_t size,
		   void (*found)(void *context, const struct in6_addr *address, uint32_t seconds), void *context);
