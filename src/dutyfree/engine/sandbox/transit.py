"""Descriptors in transit: sent through a socket and not received yet.

The kernel counts them for each user and compares the count with the sender's limit of open files. Without
root all sandboxes and their owner are one user. Commands in sandboxes have a lower limit than PID 1 and the
owner, so they cannot keep these from sending.
"""

from __future__ import annotations

import errno
import resource
import socket
import threading

FULL = "the user of this process has too many descriptors in transit"
REMEDY = "raise the hard limit of open files (ulimit -Hn, LimitNOFILE=): sandboxes get half of it"

_raised = threading.Lock()


def send(through: socket.socket, data: bytes | memoryview, descriptor: int) -> int:
    """Send data with a descriptor: above the soft limit too, up to the hard one. Raises OSError."""
    try:
        return socket.send_fds(through, [data], [descriptor])
    except OSError as error:
        if error.errno != errno.ETOOMANYREFS:
            raise
    with _raised:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            return socket.send_fds(through, [data], [descriptor])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
