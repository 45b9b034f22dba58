/* DNS forwarding: send the queries of a sandbox to the host's resolvers, and the answers back. */
#include "egress/egress.h"

#include "egress/dns.h"
#include "sys.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#define SECOND 1000000000ull
#define QUERY_TIMEOUT (3 * SECOND / 2) /* per resolver; then ask the next one */
#define ATTEMPTS 3
#define QUERIES_PER_TURN 16 /* per turn of the sandbox */
#define TTL_MIN 60          /* seconds for which a resolved address stays allowed: bounds for its TTL */
#define TTL_MAX 3600

struct lookup {
	struct watch watch;
	struct lookup *next, **link;
	struct sockaddr_in sender;
	struct question question;
	uint16_t id;
	unsigned attempts;
	uint64_t deadline;
};

static unsigned active; /* lookups of all sandboxes */
static uint8_t message[DNS_MAX + 1];

static void answer(struct client *client, const struct sockaddr_in *sender, size_t size)
{
	sendto(client->resolver.fd, message, size, MSG_NOSIGNAL, (const struct sockaddr *)sender, sizeof *sender);
}

static void lookup_end(struct client *client, struct lookup *lookup)
{
	watch_set(client, &lookup->watch, 0);
	close_fd(&lookup->watch.fd);
	*lookup->link = lookup->next;
	if (lookup->next)
		lookup->next->link = lookup->link;
	client->lookup_count--;
	active--;
	egress_free(lookup);
}

/* Ask the next resolver, each time from a new random port: someone who forges an answer must guess it. */
static bool send_query(struct client *client, struct lookup *lookup)
{
	const struct network *network = &client->policy.head;

	while (lookup->attempts < ATTEMPTS && network->resolvers) {
		const struct resolver *resolver = &network->resolver[lookup->attempts++ % network->resolvers];
		struct sockaddr_storage target;
		struct in6_addr address;
		watch_set(client, &lookup->watch, 0);
		close_fd(&lookup->watch.fd);
		memcpy(&address, resolver->address, sizeof address);
		socklen_t size = socket_address(&address, resolver->port, &target);
		lookup->watch.fd = socket(target.ss_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		if (lookup->watch.fd < 0 || connect(lookup->watch.fd, (struct sockaddr *)&target, size) < 0 ||
		    getrandom(&lookup->id, sizeof lookup->id, 0) < 0)
			continue;
		if (send(lookup->watch.fd, message, dns_query(&lookup->question, lookup->id, message), MSG_NOSIGNAL) < 0)
			continue;
		lookup->deadline = now() + QUERY_TIMEOUT;
		watch_set(client, &lookup->watch, EPOLLIN);
		return true;
	}
	return false;
}

static void fail_lookup(struct client *client, struct lookup *lookup)
{
	answer(client, &lookup->sender, dns_refusal(&lookup->question, DNS_FAILED, message));
	lookup_end(client, lookup);
}

static void lookup_begin(struct client *client, const struct sockaddr_in *sender, const struct question *question)
{
	bool all = client->policy.head.flags & NETWORK_ALL;
	struct lookup *lookup = NULL;

	if (!all && (!question->plain || !policy_allows_name(&client->policy, question->name, question->name_size))) {
		answer(client, sender, dns_refusal(question, DNS_NO_SUCH_NAME, message));
		return;
	}
	if (client->lookup_count < LOOKUPS_MAX)
		lookup = calloc(1, sizeof *lookup);
	if (!lookup) {
		answer(client, sender, dns_refusal(question, DNS_FAILED, message));
		return;
	}
	lookup->watch = (struct watch){.kind = WATCH_LOOKUP, .fd = -1};
	lookup->sender = *sender;
	lookup->question = *question;
	lookup->next = client->lookups;
	lookup->link = &client->lookups;
	if (lookup->next)
		lookup->next->link = &lookup->next;
	client->lookups = lookup;
	client->lookup_count++;
	active++;
	if (!send_query(client, lookup))
		fail_lookup(client, lookup);
}

void lookup_receive(struct client *client)
{
	for (int i = 0; i < QUERIES_PER_TURN; i++) {
		struct sockaddr_in sender;
		socklen_t size = sizeof sender;
		struct question question;
		ssize_t count = recvfrom(client->resolver.fd, message, sizeof message, MSG_TRUNC,
					 (struct sockaddr *)&sender, &size);
		if (count < 0)
			return;
		/* Ignore what is not a query. */
		if (count <= DNS_MAX && size == sizeof sender && dns_parse(message, (size_t)count, &question))
			lookup_begin(client, &sender, &question);
	}
}

struct learn_context {
	struct client *client;
	const struct question *question;
};

static void add_resolved(void *context, const struct in6_addr *address, uint32_t seconds)
{
	const struct learn_context *learn = context;

	seconds = seconds < TTL_MIN ? TTL_MIN : seconds > TTL_MAX ? TTL_MAX : seconds;
	policy_add_resolved(&learn->client->policy, learn->question->name, learn->question->name_size, address,
		     now() + seconds * SECOND);
}

void lookup_event(struct client *client, struct watch *watch)
{
	struct lookup *lookup = (struct lookup *)(void *)watch;

	ssize_t size = recv(watch->fd, message, sizeof message, MSG_TRUNC);
	if (size < 0 && errno != EAGAIN && errno != EINTR) {
		if (!send_query(client, lookup))
			fail_lookup(client, lookup);
		return;
	}
	if (size < 0 || size > DNS_MAX || !dns_is_answer(&lookup->question, lookup->id, message, (size_t)size)) {
		watch_set(client, watch, EPOLLIN); /* not the answer to this query: it may still come */
		return;
	}
	struct learn_context learn = {client, &lookup->question};
	dns_addresses(message, (size_t)size, add_resolved, &learn);
	message[0] = (uint8_t)(lookup->question.id >> 8);
	message[1] = (uint8_t)lookup->question.id;
	answer(client, &lookup->sender, (size_t)size);
	lookup_end(client, lookup);
}

unsigned lookup_total(void)
{
	return active;
}

void lookup_cancel_all(struct client *client)
{
	while (client->lookups)
		lookup_end(client, client->lookups);
}

void lookup_retry(struct client *client, uint64_t moment)
{
	for (struct lookup *lookup = client->lookups, *next; lookup; lookup = next) {
		next = lookup->next;
		if (lookup->deadline <= moment && !send_query(client, lookup))
			fail_lookup(client, lookup);
	}
}
