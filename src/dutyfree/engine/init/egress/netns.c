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

#define LISTENER_PORT 1 /* no server uses it; if it is taken, any port */
#define BACKLOG 256

static int host_netns = -1;
static bool ipv6; /* the host has an IPv6 route */

int netns_prepare(int netns)
{
	struct sockaddr_in6 outside = {.sin6_family = AF_INET6, .sin6_port = htons(53)};
	AUTOCLOSE int probe = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	host_netns = netns;
	/* A UDP connect() sends nothing but needs a route. Without a route, programs in sandboxes should not try IPv6
	 * first. */
	outside.sin6_addr.s6_addr[0] = 0x20;
	ipv6 = probe >= 0 && connect(probe, (struct sockaddr *)&outside, sizeof outside) == 0;
	return 0;
}

static int netns_enter(int netns)
{
	return setns(netns, CLONE_NEWNET) < 0 ? -errno : 0;
}

static void netns_leave(void)
{
	if (setns(host_netns, CLONE_NEWNET) < 0)
		abort(); /* never go on in the wrong network namespace */
}

/* One listener for IPv4 and IPv6, if the kernel has both. */
static int make_listener(void)
{
	struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_port = htons(LISTENER_PORT)};
	struct sockaddr_in any4 = {.sin_family = AF_INET, .sin_port = htons(LISTENER_PORT)};
	struct sockaddr *address = (struct sockaddr *)&any;
	socklen_t size = sizeof any;
	const int no = 0, yes = 1;
	int listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	if (listener < 0) {
		listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
		address = (struct sockaddr *)&any4;
		size = sizeof any4;
	} else
		setsockopt(listener, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
	if (listener < 0)
		return -errno;
	/* It answers for addresses that are not local. IP_TRANSPARENT covers both IP versions. */
	int error = setsockopt(listener, IPPROTO_IP, IP_TRANSPARENT, &yes, sizeof yes) < 0 ? -errno : 0;
	if (!error && bind(listener, address, size) < 0)
		error = -errno;
	if (error == -EADDRINUSE) {
		any.sin6_port = any4.sin_port = 0;
		error = bind(listener, address, size) < 0 ? -errno : 0;
	}
	/* Urgent data may arrive before accept() (relay.c). */
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

int netns_open(int netns, int fds[EGRESS_FDS])
{
	int error = netns_enter(netns);

	if (error)
		return error;
	for (int i = 0; i < EGRESS_FDS; i++)
		fds[i] = -1;
	error = routes_configure(true, ipv6);
	if (!error && (fds[EGRESS_FD_LISTENER] = make_listener()) < 0)
		error = fds[EGRESS_FD_LISTENER];
	if (!error && (fds[EGRESS_FD_RESOLVER] = make_resolver()) < 0)
		error = fds[EGRESS_FD_RESOLVER];
	if (!error && (fds[EGRESS_FD_PROGRAM] = sk_lookup_attach(netns, fds[EGRESS_FD_LISTENER])) < 0)
		error = fds[EGRESS_FD_PROGRAM];
	if (error) {
		routes_configure(false, ipv6);
		for (int i = 0; i < EGRESS_FDS; i++)
			close_fd(&fds[i]);
	}
	netns_leave();
	return error;
}

void netns_close(int netns)
{
	if (netns_enter(netns) == 0) {
		routes_configure(false, ipv6);
		netns_leave();
	}
}

struct socket_request {
	int netns, family, fd;
};

/* Rootless: a child does this, because we could not return to our namespace. */
static int create_socket(void *argument)
{
	struct socket_request *request = argument;
	int error = request->netns < 0 ? 0 : netns_enter(request->netns);

	if (error)
		return -error;
	request->fd = socket(request->family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	return request->fd < 0 ? errno : 0;
}

int netns_connect(int netns, uint16_t port, int ipv6_only)
{
	struct sockaddr_in server = {.sin_family = AF_INET,
				     .sin_port = htons(port),
				     .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct sockaddr_in6 server6 = {.sin6_family = AF_INET6, .sin6_port = htons(port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	const struct sockaddr *address = ipv6_only ? (struct sockaddr *)&server6 : (struct sockaddr *)&server;
	struct socket_request request = {.netns = netns, .family = address->sa_family, .fd = -1};
	int error = host.rootless ? run_child(create_socket, &request, -1) : -create_socket(&request);
	int fd = request.fd;

	if (!host.rootless)
		netns_leave();
	/* A socket stays in the network namespace that it was created in. */
	if (!error && connect(fd, address, ipv6_only ? sizeof server6 : sizeof server) < 0 && errno != EINPROGRESS) {
		error = -errno;
		close(fd);
	}
	return error ? error : fd;
}
