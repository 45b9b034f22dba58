/* The BPF sk_lookup program, which gives every incoming connection to one listener. */
#include "egress/netns.h"

#include "sys.h"

#include <arpa/inet.h>
#include <linux/bpf.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int bpf(int command, union bpf_attr *attributes)
{
	long result = syscall(SYS_bpf, command, attributes, sizeof *attributes);

	return result < 0 ? -errno : (int)result;
}

/* A sockmap with the listener: BPF programs find sockets through maps. */
static int create_map(int listener)
{
	uint32_t key = 0;
	uint64_t value = (uint64_t)listener;
	union bpf_attr attributes;

	memset(&attributes, 0, sizeof attributes);
	attributes.map_type = BPF_MAP_TYPE_SOCKMAP;
	attributes.key_size = sizeof key;
	attributes.value_size = sizeof value;
	attributes.max_entries = 1;
	int map = bpf(BPF_MAP_CREATE, &attributes);
	if (map < 0)
		return map;
	memset(&attributes, 0, sizeof attributes);
	attributes.map_fd = (uint32_t)map;
	attributes.key = (uintptr_t)&key;
	attributes.value = (uintptr_t)&value;
	int error = bpf(BPF_MAP_UPDATE_ELEM, &attributes);
	if (error) {
		close(map);
		return error;
	}
	return map;
}

#define OP(code_, to, from, offset, value) {.code = (code_), .dst_reg = (to), .src_reg = (from), .off = (offset), .imm = (value)}
#define FIELD(to, name) OP(BPF_LDX | BPF_MEM | BPF_W, to, BPF_REG_6, offsetof(struct bpf_sk_lookup, name), 0)
#define IF_EQUAL(register, value, to) OP(BPF_JMP32 | BPF_JEQ | BPF_K, register, 0, to, value)
#define CALL(function) OP(BPF_JMP | BPF_CALL, 0, 0, 0, function)

/* Give every TCP connection to the listener, except those to the sandbox itself. */
static int load_program(int map)
{
	const int32_t self = (int32_t)htonl(ADDRESS_SELF);
	const int32_t self6 = (int32_t)htonl(SELF_FIRST << 16 | SELF_SECOND);
	const int32_t loopback = (int32_t)(htonl(0x7f000000u)), first_byte = (int32_t)htonl(0xff000000u);
	const struct bpf_insn code[] = {
		OP(BPF_ALU64 | BPF_MOV | BPF_X, BPF_REG_6, BPF_REG_1, 0, 0),
		FIELD(BPF_REG_2, protocol),
		OP(BPF_JMP32 | BPF_JNE | BPF_K, BPF_REG_2, 0, 21, IPPROTO_TCP), /* → pass */
		FIELD(BPF_REG_2, family),
		IF_EQUAL(BPF_REG_2, AF_INET6, 5), /* → IPv6 */
		FIELD(BPF_REG_2, local_ip4),
		IF_EQUAL(BPF_REG_2, self, 17),
		OP(BPF_ALU | BPF_AND | BPF_K, BPF_REG_2, 0, 0, first_byte),
		IF_EQUAL(BPF_REG_2, loopback, 15),
		OP(BPF_JMP | BPF_JA, 0, 0, 3, 0),
		/* IPv6: ::1 and our own address. Their first four bytes are enough. */
		FIELD(BPF_REG_2, local_ip6[0]),
		IF_EQUAL(BPF_REG_2, 0, 12),
		IF_EQUAL(BPF_REG_2, self6, 11),
		OP(BPF_ST | BPF_MEM | BPF_W, BPF_REG_10, 0, -4, 0),
		OP(BPF_LD | BPF_DW | BPF_IMM, BPF_REG_1, BPF_PSEUDO_MAP_FD, 0, map),
		OP(0, 0, 0, 0, 0),
		OP(BPF_ALU64 | BPF_MOV | BPF_X, BPF_REG_2, BPF_REG_10, 0, 0),
		OP(BPF_ALU64 | BPF_ADD | BPF_K, BPF_REG_2, 0, 0, -4),
		CALL(BPF_FUNC_map_lookup_elem),
		OP(BPF_JMP | BPF_JEQ | BPF_K, BPF_REG_0, 0, 4 + 3, 0), /* no listener: connection refused */
		OP(BPF_ALU64 | BPF_MOV | BPF_X, BPF_REG_7, BPF_REG_0, 0, 0),
		OP(BPF_ALU64 | BPF_MOV | BPF_X, BPF_REG_1, BPF_REG_6, 0, 0),
		OP(BPF_ALU64 | BPF_MOV | BPF_X, BPF_REG_2, BPF_REG_0, 0, 0),
		OP(BPF_ALU64 | BPF_MOV | BPF_K, BPF_REG_3, 0, 0, 0),
		CALL(BPF_FUNC_sk_assign),
		OP(BPF_ALU64 | BPF_MOV | BPF_X, BPF_REG_1, BPF_REG_7, 0, 0),
		CALL(BPF_FUNC_sk_release),
		OP(BPF_ALU64 | BPF_MOV | BPF_K, BPF_REG_0, 0, 0, SK_PASS),
		OP(BPF_JMP | BPF_EXIT, 0, 0, 0, 0),
	};
	struct bpf_insn linked[sizeof code / sizeof *code];
	const int pass = (int)(sizeof code / sizeof *code) - 2;
	union bpf_attr attributes;

	/* All longer jumps lead to the exit. */
	memcpy(linked, code, sizeof code);
	for (int i = 0; i < pass; i++) {
		uint8_t class = BPF_CLASS(linked[i].code);
		if ((class == BPF_JMP || class == BPF_JMP32) && linked[i].off > 5)
			linked[i].off = (int16_t)(pass - i - 1);
	}
	memset(&attributes, 0, sizeof attributes);
	attributes.prog_type = BPF_PROG_TYPE_SK_LOOKUP;
	attributes.expected_attach_type = BPF_SK_LOOKUP;
	attributes.insns = (uintptr_t)linked;
	attributes.insn_cnt = sizeof code / sizeof *code;
	attributes.license = (uintptr_t) "GPL";
	return bpf(BPF_PROG_LOAD, &attributes);
}

int sk_lookup_attach(int netns, int listener)
{
	AUTOCLOSE int map = create_map(listener);
	union bpf_attr attributes;

	if (map < 0)
		return map;
	AUTOCLOSE int program = load_program(map);
	if (program < 0)
		return program;
	memset(&attributes, 0, sizeof attributes);
	attributes.link_create.prog_fd = (uint32_t)program;
	attributes.link_create.target_fd = (uint32_t)netns;
	attributes.link_create.attach_type = BPF_SK_LOOKUP;
	return bpf(BPF_LINK_CREATE, &attributes);
}
