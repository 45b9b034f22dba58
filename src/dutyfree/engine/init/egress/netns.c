#define _GNU_SOURCE
#include "egress/netns.h"

#include "launcher/host.h"
#include "sys.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define LISTENER_PORT 1 /* no server wants it; another one if it is taken */
#define BACKLOG 256

static int host_network = -1;
static bool ipv6; /* the host has a way out */

int network_prepare(int network)
{
	struct sockaddr_in6 outside = {.sin6_family = AF_INET6, .sin6_port = htons(53)};
	AUTOCLOSE int probe = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	host_network = network;
	/* Sends nothing, but needs a route. Without one, programs in sandboxes shall not try IPv6 first. */
	outside.sin6_addr.s6_addr[0] = 0x20;
	ipv6 = probe >= 0 && connect(probe, (struct sockaddr *)&outside, sizeof outside) == 0;
	return 0;
}

static int enter(int network)
{
	return setns(network, CLONE_NEWNET) < 0 ? -errno : 0;
}

static void come_back(void)
{
	if (setns(host_network, CLONE_NEWNET) < 0)
		abort(); /* in the wrong network nothing may go on */
}

/* One for both versions of IP, where there are both. */
static int make_listener(void)
{
	struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons(LISTENER_PORT)};
	struct sockaddr_in any4 = {.sin_family = AF_INET, .sin_port = htons(LISTENER_PORT)};
	struct sockaddr *wanted = (struct sockaddr *)&any;
	socklen_t size = sizeof any;
	const int no = 0, yes = 1;
	int listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (listener < 0) {
		listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		wanted = (struct sockaddr *)&any4;
		size = sizeof any4;
	} else
		setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
	if (listener < 0)
		return -errno;
	/* It answers under addresses that are not the sandbox's. The option is one for both versions. */
	int error = setsockopt(listener, IPPROTO_IP, IP_TRANSPARENT, &yes, sizeof yes) < 0 ? -errno : 0;
	if (!error && bind(listener, wanted, size) < 0)
		error = -errno;
	if (error == -EADDRINUSE) {
		any.sin6_port = any4.sin_port = 0;
		error = bind(listener, wanted, size) < 0 ? -errno : 0;
	}
	/* Urgent data may come before anybody accepts (relay.c). */
	setsockopt(listener, SOL_SOCKET, SO_OOBINLINE, &yes, sizeof yes);
	if (!error && listen(listener, BACKLOG) < 0)
		error = -errno;
	if (error)
		close(listener);
	return error ? error : listener;
}

static int make_resolver(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET,
				      .sin_port = htons(53),
				      .sin_addr.s_addr = htonl(ADDRESS_RESOLVER)};
	int resolver = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (resolver < 0 || bind(resolver, (struct sockaddr *)&address, sizeof address) == 0)
		return resolver < 0 ? -errno : resolver;
	int error = -errno;
	close(resolver);
	return error;
}

int network_open(int network, int way[WAY_FDS])
{
	int error = enter(network);

	if (error)
		return error;
	for (int i = 0; i < WAY_FDS; i++)
		way[i] = -1;
	error = routes_lay(true, ipv6);
	if (!error && (way[WAY_LISTENER] = make_listener()) < 0)
		error = way[WAY_LISTENER];
	if (!error && (way[WAY_RESOLVER] = make_resolver()) < 0)
		error = way[WAY_RESOLVER];
	if (!error && (way[WAY_PROGRAM] = steer(network, way[WAY_LISTENER])) < 0)
		error = way[WAY_PROGRAM];
	if (error) {
		routes_lay(false, ipv6);
		for (int i = 0; i < WAY_FDS; i++)
			close_fd(&way[i]);
	}
	come_back();
	return error;
}

void network_close(int network)
{
	if (enter(network) == 0) {
		routes_lay(false, ipv6);
		come_back();
	}
}

struct errand {
	int network, family, made;
};

/* Without root there is no way back from there: a child does it then. */
static int make_socket(void *argument)
{
	struct errand *errand = argument;
	int error = errand->network < 0 ? 0 : enter(errand->network);

	if (error)
		return -error;
	errand->made = socket(errand->family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	return errand->made < 0 ? errno : 0;
}

int network_connect(int network, uint16_t port, int ipv6_only)
{
	struct sockaddr_in server = {.sin_family = AF_INET,
				     .sin_port = htons(port),
				     .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct sockaddr_in6 server6 = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	const struct sockaddr *address = ipv6_only ? (struct sockaddr *)&server6 : (struct sockaddr *)&server;
	struct errand errand = {.network = network, .family = address->sa_family, .made = -1};
	int error = host.rootless ? run_child(make_socket, &errand, -1) : -make_socket(&errand);
	int made = errand.made;

	if (!host.rootless)
		come_back();
	/* A socket belongs to the network that it was made in, wherever it is used. */
	if (!error && connect(made, address, ipv6_only ? sizeof server6 : sizeof server) < 0 && errno != EINPROGRESS) {
		error = -errno;
		close(made);
	}
	return error ? error : made;
}
