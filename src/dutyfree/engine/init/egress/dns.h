/* Questions and answers of the domain name system, as bytes: nothing here reads or writes a socket. */
#ifndef DUTYFREE_DNS_H
#define DUTYFREE_DNS_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DNS_MAX 4096 /* no message is larger, in either direction */
#define DNS_NAME_MAX 253

enum dns_code { DNS_FAILED = 2, DNS_NO_SUCH_NAME = 3 };

struct question {
	uint8_t bytes[DNS_NAME_MAX + 2 + 4]; /* name, type and class, as they stand in the message */
	size_t size;
	char name[DNS_NAME_MAX + 1]; /* lower case, without a final dot; "" is the root */
	size_t name_size;
	bool plain;    /* the name has no bytes but those of host names */
	bool extended; /* the client takes answers above 512 bytes */
	uint16_t id;
};

/* One question, and no more than that: false for everything else. */
bool dns_parse(const uint8_t *message, size_t size, struct question *question);
/* Nothing of the client's message but the question itself is passed on. */
size_t dns_query(const struct question *question, uint16_t id, uint8_t *message);
size_t dns_refusal(const struct question *question, enum dns_code code, uint8_t *message);

/* Whether this answers the question that was sent with this id. */
bool dns_is_answer(const struct question *question, uint16_t id, const uint8_t *message, size_t size);
/* Calls back for each address in an answer. */
void dns_addresses(const uint8_t *message, size_t size,
		   void (*found)(void *context, const struct in6_addr *address, uint32_t seconds), void *context);

#endif
