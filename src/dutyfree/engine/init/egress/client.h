/* The launcher's way to its egress process (egress.h), which is started when it is first needed. */
#ifndef DUTYFREE_GATE_H
#define DUTYFREE_GATE_H

#include "egress/egress.h"

int egress_client_open(int epoll, uint64_t event); /* starts it, if it does not run: 0 or -errno */
void egress_client_close(void);                    /* ends it */
/* 0 or -errno; `way` of EGRESS_OPEN, or NULL. */
int egress_client_send(uint32_t kind, uint32_t number, uint32_t serial, const void *body, size_t size, const int *fds);
bool egress_client_receive(struct reply *answer);       /* false if it is gone */

#endif
