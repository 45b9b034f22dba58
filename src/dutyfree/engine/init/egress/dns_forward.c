/* Names: the sandbox's questions, of which nothing but the question itself goes to the host's resolvers. */
#define _GNU_SOURCE
#include "egress/egress.h"

#include "egress/dns.h"
#include "sys.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#define SECOND 1000000000ull
#define PATIENCE (3 * SECOND / 2) /* with one resolver; then the next is asked */
#define ATTEMPTS 3
#define RECEIVED 16               /* in one turn */
#define SHORTEST 60               /* seconds that an address stays allowed, whatever its time to live */
#define LONGEST 3600

struct lookup {
	struct watch watch;
	struct lookup *next, **link;
	struct sockaddr_in asker;
	struct question question;
	uint16_t id;
	unsigned attempts;
	uint64_t deadline;
};

static unsigned under_way; /* of all sandboxes */
static uint8_t message[DNS_MAX + 1];

static void answer(struct client *client, const struct sockaddr_in *asker, size_t size)
{
	sendto(client->resolver.fd, message, size, MSG_NOSIGNAL, (const struct sockaddr *)asker, sizeof *asker);
}

static void end(struct client *client, struct lookup *lookup)
{
	watch_for(client, &lookup->watch, 0);
	close_fd(&lookup->watch.fd);
	*lookup->link = lookup->next;
	if (lookup->next)
		lookup->next->link = lookup->link;
	client->lookup_count--;
	under_way--;
	discard(lookup);
}

/* Ask the next resolver, from a port of its own: who would forge an answer has to guess it. */
static bool ask(struct client *client, struct lookup *lookup)
{
	const struct network *network = &client->policy.head;

	while (lookup->attempts < ATTEMPTS && network->resolvers) {
		const struct resolver *resolver = &network->resolver[lookup->attempts++ % network->resolvers];
		struct sockaddr_storage target;
		struct in6_addr address;
		watch_for(client, &lookup->watch, 0);
		close_fd(&lookup->watch.fd);
		memcpy(&address, resolver->address, sizeof address);
		socklen_t size = socket_address(&address, resolver->port, &target);
		lookup->watch.fd = socket(target.ss_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		if (lookup->watch.fd < 0 || connect(lookup->watch.fd, (struct sockaddr *)&target, size) < 0 ||
		    getrandom(&lookup->id, sizeof lookup->id, 0) < 0)
			continue;
		if (send(lookup->watch.fd, message, dns_query(&lookup->question, lookup->id, message), MSG_NOSIGNAL) < 0)
			continue;
		lookup->deadline = now() + PATIENCE;
		watch_for(client, &lookup->watch, EPOLLIN);
		return true;
	}
	return false;
}

static void give_up(struct client *client, struct lookup *lookup)
{
	answer(client, &lookup->asker, dns_refusal(&lookup->question, DNS_FAILED, message));
	end(client, lookup);
}

static void begin(struct client *client, const struct sockaddr_in *asker, const struct question *question)
{
	bool all = client->policy.head.flags & NETWORK_ALL;
	struct lookup *lookup = NULL;

	if (!all && (!question->plain || !policy_allows_name(&client->policy, question->name, question->name_size))) {
		answer(client, asker, dns_refusal(question, DNS_NO_SUCH_NAME, message));
		return;
	}
	if (client->lookup_count < LOOKUPS_MAX)
		lookup = calloc(1, sizeof *lookup);
	if (!lookup) {
		answer(client, asker, dns_refusal(question, DNS_FAILED, message));
		return;
	}
	lookup->watch = (struct watch){.kind = WATCH_LOOKUP, .fd = -1};
	lookup->asker = *asker;
	lookup->question = *question;
	lookup->next = client->lookups;
	lookup->link = &client->lookups;
	if (lookup->next)
		lookup->next->link = &lookup->next;
	client->lookups = lookup;
	client->lookup_count++;
	under_way++;
	if (!ask(client, lookup))
		give_up(client, lookup);
}

void lookup_receive(struct client *client)
{
	for (int i = 0; i < RECEIVED; i++) {
		struct sockaddr_in asker;
		socklen_t size = sizeof asker;
		struct question question;
		ssize_t count = recvfrom(client->resolver.fd, message, sizeof message, MSG_TRUNC,
					 (struct sockaddr *)&asker, &size);
		if (count < 0)
			return;
		/* What is no question gets no answer. */
		if (count <= DNS_MAX && size == sizeof asker && dns_parse(message, (size_t)count, &question))
			begin(client, &asker, &question);
	}
}

struct learning {
	struct client *client;
	const struct question *question;
};

static void learn(void *context, const struct in6_addr *address, uint32_t seconds)
{
	const struct learning *learning = context;

	seconds = seconds < SHORTEST ? SHORTEST : seconds > LONGEST ? LONGEST : seconds;
	policy_learn(&learning->client->policy, learning->question->name, learning->question->name_size, address,
		     now() + seconds * SECOND);
}

void lookup_event(struct client *client, struct watch *watch)
{
	struct lookup *lookup = (struct lookup *)(void *)watch;

	ssize_t size = recv(watch->fd, message, sizeof message, MSG_TRUNC);
	if (size < 0 && errno != EAGAIN && errno != EINTR) {
		if (!ask(client, lookup))
			give_up(client, lookup);
		return;
	}
	if (size < 0 || size > DNS_MAX || !dns_is_answer(&lookup->question, lookup->id, message, (size_t)size)) {
		watch_for(client, watch, EPOLLIN); /* somebody else's: ours may still come */
		return;
	}
	struct learning learning = {client, &lookup->question};
	dns_addresses(message, (size_t)size, learn, &learning);
	message[0] = (uint8_t)(lookup->question.id >> 8);
	message[1] = (uint8_t)lookup->question.id;
	answer(client, &lookup->asker, (size_t)size);
	end(client, lookup);
}

unsigned lookups_under_way(void)
{
	return under_way;
}

void lookup_drop(struct client *client)
{
	while (client->lookups)
		end(client, client->lookups);
}

void lookup_overdue(struct client *client, uint64_t moment)
{
	for (struct lookup *lookup = client->lookups, *next; lookup; lookup = next) {
		next = lookup->next;
		if (lookup->deadline <= moment && !ask(client, lookup))
			give_up(client, lookup);
	}
}
