/* Names: what a sandbox asks (a size of two bytes, and that many), and what a resolver answers (the rest). */
#define _GNU_SOURCE
#include "egress/dns.h"
#include "jail.h"

#include <string.h>

static void count(void *context, const struct in6_addr *address, uint32_t seconds)
{
	uint8_t *sum = context;

	for (unsigned i = 0; i < sizeof address->s6_addr; i++)
		*sum = (uint8_t)(*sum + address->s6_addr[i] + seconds);
}

static void check_question(const struct question *question)
{
	uint8_t message[DNS_MAX];
	struct question again;
	size_t size = dns_query(question, 7, message);

	require(question->name_size <= DNS_NAME_MAX && strlen(question->name) <= question->name_size, "the name has its size");
	require(dns_parse(message, size, &again), "what is passed on is a question");
	require(again.name_size == question->name_size && memcmp(again.name, question->name, again.name_size) == 0,
	      "what is passed on is the same name");
	require(!dns_is_answer(question, 7, message, size), "a question is no answer");
	size = dns_refusal(question, DNS_FAILED, message);
	require(dns_is_answer(question, question->id, message, size), "a refusal is an answer");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct question question;
	uint8_t sum = 0;
	uint16_t first;

	if (size < sizeof first || size > 2 * DNS_MAX)
		return 0;
	memcpy(&first, data, sizeof first);
	data += sizeof first;
	size -= sizeof first;
	if (first > size)
		first = (uint16_t)size;
	if (dns_parse(data, first, &question)) {
		check_question(&question);
		dns_is_answer(&question, question.id, data + first, size - first);
	}
	dns_addresses(data + first, size - first, count, &sum);
	return 0;
}
