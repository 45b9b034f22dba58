/* The launcher's side of egress: it starts the egress process (egress.h) when a sandbox first needs it. */
#pragma once

#include "launcher/sandboxes.h"

void sandbox_network(const struct request *request, const char *body);
void sandbox_connect(const struct request *request, const struct port *port);
void sandbox_close_egress(const struct sandbox *sandbox);
void egress_replied(void);      /* the socket to the egress process is readable */
void egress_client_close(void); /* kill the egress process */
