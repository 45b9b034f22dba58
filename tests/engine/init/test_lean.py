"""The memory that every sandbox has for itself stays small."""

from __future__ import annotations

import struct

from dutyfree.engine.launcher import client

HUGE = 2 << 20
WRITABLE = 2
LOADED = 1


def test_no_variable_of_init_can_become_part_of_a_huge_page() -> None:
    """With transparent huge pages, each sandbox would copy a whole one on its first write."""
    program = client.BINARY.read_bytes()
    (at,), (size, count) = struct.unpack_from("<Q", program, 32), struct.unpack_from("<HH", program, 54)
    parts = [struct.unpack_from("<IIQQQQQQ", program, at + number * size) for number in range(count)]
    (data,) = [part for part in parts if part[0] == LOADED and part[1] & WRITABLE]
    begin, end = data[3], data[3] + data[6]
    assert -(-begin // HUGE) == end // HUGE, (
        "the writable segment contains a whole huge page: allocate the largest buffers with malloc"
    )
