// What the Go files see of libibverbs: types of our own, so that they compile without its header.
// Every function returns 0 or an errno, unless it says something else. None is called before
// tutti_load has returned NULL.
#ifndef TUTTI_VERBS_H
#define TUTTI_VERBS_H

#include <stdint.h>

struct ibv_context;
struct ibv_pd;
struct ibv_mr;
struct ibv_comp_channel;
struct ibv_cq;
struct ibv_qp;
struct ibv_send_wr;
struct ibv_recv_wr;
struct ibv_wc;

enum { TUTTI_POLL_BATCH = 64, TUTTI_NAME = 64 };

// As ibv_sge.
typedef struct {
	uint64_t address;
	uint32_t len, key;
} tutti_segment;

enum { TUTTI_SIGNALED = 1, TUTTI_INLINE = 2, TUTTI_FENCE = 4 };

// A request of a chain. The segments of request i begin at i times those that a request may have.
typedef struct {
	uint64_t id, remote;
	uint32_t rkey, imm;
	uint32_t op, flags; // op as in package rdma
	uint32_t segments, unused;
} tutti_request;

typedef struct {
	uint64_t id;
	uint32_t qp, status, vendor;
	uint32_t op; // as in package rdma; 0 is another one
	uint32_t bytes, imm, has_imm, unused;
} tutti_completion;

// A completion queue. The memory is C's until tutti_cq_free.
typedef struct {
	struct ibv_cq *cq;
	int depth;
	struct ibv_wc *wc;
	tutti_completion *out; // TUTTI_POLL_BATCH
} tutti_cq;

// A queue pair, with room for a chain of each queue. The memory is C's until tutti_qp_destroy.
typedef struct {
	struct ibv_qp *qp;
	uint32_t number, send_depth, recv_depth, send_segments, recv_segments, inline_bytes;
	tutti_request *send, *recv;
	tutti_segment *send_segment, *recv_segment;
	struct ibv_send_wr *send_wr;
	struct ibv_recv_wr *recv_wr;
} tutti_qp;

typedef struct {
	char firmware[TUTTI_NAME];
	uint64_t guid, max_mr_size;
	uint32_t vendor, part;
	int max_qp, max_qp_wr, max_sge, max_cqe, max_mr, max_reads, ports;
} tutti_attributes;

typedef struct {
	int state, ethernet, grh, mtu, gids, width, speed;
	uint32_t lid, max_bytes;
} tutti_port;

typedef struct {
	uint8_t gid[16];
	uint32_t type, ifindex;
} tutti_gid;

typedef struct {
	int port, mtu, global, gid_index;
	uint32_t psn, remote, remote_psn, lid;
	uint8_t gid[16];
	uint8_t reads, timeout, retries, rnr_retries, traffic_class, hop_limit, service_level;
} tutti_route;

typedef struct {
	int type, port;
	uint32_t qp;
	uint64_t cq; // as given to tutti_cq_create
} tutti_event;

enum { TUTTI_IB = 0, TUTTI_OTHER = 1 }; // transports

// A library that links this package exports none of the functions.
#pragma GCC visibility push(hidden)

// tutti_load opens the library. It returns NULL, or what is missing, which is not freed.
const char *tutti_load(void);

// What ibv_is_fork_initialized returns, -1 if the library does not have it.
int tutti_fork_state(void);
int tutti_fork_init(void);
int tutti_has_dmabuf(void);

// tutti_devices writes names and transports of up to n devices, and sets *count to their number.
int tutti_devices(char (*names)[TUTTI_NAME], int *transports, int n, int *count);
// An open device, with a channel for the completion events of all its queues.
typedef struct {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	int async_fd, channel_fd;
} tutti_device;

int tutti_open(const char *name, tutti_device *d);
int tutti_close_device(tutti_device *d);
int tutti_query_device(struct ibv_context *c, tutti_attributes *a);
int tutti_query_port(struct ibv_context *c, int port, tutti_port *p);
// ENODATA: the entry is empty; ENOSYS: the library has no such call.
int tutti_query_gid(struct ibv_context *c, int port, int index, tutti_gid *g);
// The event was acknowledged when tutti_get_event returns. EAGAIN: there is none.
int tutti_get_event(struct ibv_context *c, tutti_event *e);

int tutti_reg_mr(struct ibv_pd *pd, void *at, uint64_t n, uint32_t access, int relaxed, struct ibv_mr **mr,
		 uint32_t *lkey, uint32_t *rkey);
int tutti_reg_dmabuf(struct ibv_pd *pd, int fd, uint64_t offset, uint64_t n, uint64_t address, uint32_t access,
		     int relaxed, struct ibv_mr **mr, uint32_t *lkey, uint32_t *rkey);
int tutti_dereg_mr(struct ibv_mr *mr);

// Events of the queue come through channel, unless that is NULL.
int tutti_cq_create(struct ibv_context *c, int depth, uint64_t id, struct ibv_comp_channel *channel, tutti_cq *q);
int tutti_cq_destroy(tutti_cq *q);
void tutti_cq_free(tutti_cq *q); // the rest, also if a device that was removed has destroyed nothing
int tutti_cq_arm(tutti_cq *q);
int tutti_cq_event(struct ibv_comp_channel *c, uint64_t *id); // as tutti_get_event
int tutti_poll(tutti_cq *q, int n); // the number of completions in q->out, or -errno

int tutti_qp_create(struct ibv_pd *pd, struct ibv_cq *send, struct ibv_cq *recv, tutti_qp *q); // with q's limits
int tutti_qp_destroy(tutti_qp *q);
int tutti_qp_state(tutti_qp *q, int *state);
int tutti_qp_init(tutti_qp *q, int port, int pkey, uint32_t access); // pkey is an index
int tutti_qp_connect(tutti_qp *q, const tutti_route *r);
int tutti_qp_fail(tutti_qp *q);
int tutti_qp_reset(tutti_qp *q);
// These post the first n requests in q's memory. They return how many were posted, and an errno in
// the upper 32 bits.
uint64_t tutti_post_send(tutti_qp *q, uint32_t n);
uint64_t tutti_post_recv(tutti_qp *q, uint32_t n);

#pragma GCC visibility pop

#endif
