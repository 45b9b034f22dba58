/* DNS messages. The input is a query (two bytes of size, then the bytes) and the answer of a resolver (the rest). */
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

	require(question->name_size <= DNS_NAME_MAX && strlen(question->name) <= question->name_size,
		"the name matches its size");
	require(dns_parse(message, size, &again), "a forwarded query can be parsed");
	require(again.name_size == question->name_size && memcmp(again.name, question->name, again.name_size) == 0,
	      "a forwarded query has the same name");
	require(!dns_is_answer(question, 7, message, size), "a query is not an answer");
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
