//go:build cgo && linux

// The calls of libibverbs that package verbs makes. The library is opened at run time, and each of
// its functions is looked up with the version of its ABI that the header describes: the library
// also has older ones of the same names.

#define _GNU_SOURCE
#include "verbs.h"

#include <errno.h>

#if defined(__has_include)
#if __has_include(<infiniband/verbs.h>)
#define HAVE_VERBS 1
#endif
#endif

#ifndef HAVE_VERBS

const char *tutti_load(void)
{
	return "this program was built without <infiniband/verbs.h> (libibverbs-dev, or rdma-core-devel)";
}

// None of these is called: tutti_load fails.
int tutti_fork_state(void) { return -1; }
int tutti_fork_init(void) { return ENOSYS; }
int tutti_has_dmabuf(void) { return 0; }
int tutti_devices(char (*names)[TUTTI_NAME], int *transports, int n, int *count) { return ENOSYS; }
int tutti_open(const char *name, tutti_device *d) { return ENOSYS; }
int tutti_close_device(tutti_device *d) { return ENOSYS; }
int tutti_query_device(struct ibv_context *c, tutti_attributes *a) { return ENOSYS; }
int tutti_query_port(struct ibv_context *c, int port, tutti_port *p) { return ENOSYS; }
int tutti_query_gid(struct ibv_context *c, int port, int index, tutti_gid *g) { return ENOSYS; }
int tutti_get_event(struct ibv_context *c, tutti_event *e) { return ENOSYS; }
int tutti_reg_mr(struct ibv_pd *pd, void *at, uint64_t n, uint32_t access, int relaxed, struct ibv_mr **mr,
		 uint32_t *lkey, uint32_t *rkey) { return ENOSYS; }
int tutti_reg_dmabuf(struct ibv_pd *pd, int fd, uint64_t offset, uint64_t n, uint64_t address, uint32_t access,
		     int relaxed, struct ibv_mr **mr, uint32_t *lkey, uint32_t *rkey) { return ENOSYS; }
int tutti_dereg_mr(struct ibv_mr *mr) { return ENOSYS; }
int tutti_cq_create(struct ibv_context *c, int depth, uint64_t id, struct ibv_comp_channel *channel,
		    tutti_cq *q) { return ENOSYS; }
int tutti_cq_destroy(tutti_cq *q) { return ENOSYS; }
void tutti_cq_free(tutti_cq *q) {}
int tutti_cq_arm(tutti_cq *q) { return ENOSYS; }
int tutti_cq_event(struct ibv_comp_channel *c, uint64_t *id) { return ENOSYS; }
int tutti_poll(tutti_cq *q, int n) { return -ENOSYS; }
int tutti_qp_create(struct ibv_pd *pd, struct ibv_cq *send, struct ibv_cq *recv, tutti_qp *q) { return ENOSYS; }
int tutti_qp_destroy(tutti_qp *q) { return ENOSYS; }
int tutti_qp_state(tutti_qp *q, int *state) { return ENOSYS; }
int tutti_qp_init(tutti_qp *q, int port, int pkey, uint32_t access) { return ENOSYS; }
int tutti_qp_connect(tutti_qp *q, const tutti_route *r) { return ENOSYS; }
int tutti_qp_fail(tutti_qp *q) { return ENOSYS; }
int tutti_qp_reset(tutti_qp *q) { return ENOSYS; }
uint64_t tutti_post_send(tutti_qp *q, uint32_t n) { return (uint64_t)ENOSYS << 32; }
uint64_t tutti_post_recv(tutti_qp *q, uint32_t n) { return (uint64_t)ENOSYS << 32; }

#else

#include <arpa/inet.h>
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// The header's macros of these names would call symbols of the library directly.
#undef ibv_query_port
#undef ibv_reg_mr

// What is called, or read, without a function of the library: the table of a context and the heads
// of its objects, at the places that every provider was compiled for.
#define OP(name, i) _Static_assert(offsetof(struct ibv_context_ops, name) == (i) * sizeof(void *), #name)
OP(poll_cq, 11);
OP(req_notify_cq, 12);
OP(post_send, 25);
OP(post_recv, 26);
_Static_assert(sizeof(struct ibv_context_ops) == 32 * sizeof(void *), "ibv_context_ops");
_Static_assert(offsetof(struct ibv_context, ops) == sizeof(void *), "ibv_context.ops");
_Static_assert(offsetof(struct ibv_context, async_fd) == 33 * sizeof(void *) + 4, "ibv_context.async_fd");
_Static_assert(offsetof(struct ibv_context, num_comp_vectors) == 33 * sizeof(void *) + 8,
	       "ibv_context.num_comp_vectors");
_Static_assert(offsetof(struct ibv_comp_channel, fd) == sizeof(void *), "ibv_comp_channel.fd");
_Static_assert(offsetof(struct ibv_cq, cqe) == 3 * sizeof(void *) + 4, "ibv_cq.cqe");
_Static_assert(offsetof(struct ibv_qp, qp_num) == 6 * sizeof(void *) + 4, "ibv_qp.qp_num");
_Static_assert(offsetof(struct ibv_mr, lkey) == 4 * sizeof(void *) + 4, "ibv_mr.lkey");
_Static_assert(sizeof(tutti_segment) == sizeof(struct ibv_sge) &&
		       offsetof(tutti_segment, len) == offsetof(struct ibv_sge, length) &&
		       offsetof(tutti_segment, key) == offsetof(struct ibv_sge, lkey),
	       "tutti_segment");
// rdma.Status, rdma.State, rdma.GIDType and the lowest rights of rdma.Access have the numbers of
// these; errors.go and fork.go have those of events and of fork.
_Static_assert(IBV_WC_SUCCESS == 0 && IBV_WC_WR_FLUSH_ERR == 5 && IBV_WC_REM_ACCESS_ERR == 10 &&
		       IBV_WC_RETRY_EXC_ERR == 12 && IBV_WC_GENERAL_ERR == 21, "ibv_wc_status");
_Static_assert(IBV_QPS_RESET == 0 && IBV_QPS_RTS == 3 && IBV_QPS_ERR == 6, "ibv_qp_state");
_Static_assert(IBV_GID_TYPE_IB == 0 && IBV_GID_TYPE_ROCE_V1 == 1 && IBV_GID_TYPE_ROCE_V2 == 2, "ibv_gid_type");
_Static_assert(IBV_ACCESS_LOCAL_WRITE == 1 && IBV_ACCESS_REMOTE_WRITE == 2 && IBV_ACCESS_REMOTE_READ == 4 &&
		       IBV_ACCESS_REMOTE_ATOMIC == 8, "ibv_access_flags");
_Static_assert(IBV_EVENT_CQ_ERR == 0 && IBV_EVENT_QP_FATAL == 1 && IBV_EVENT_QP_REQ_ERR == 2 &&
		       IBV_EVENT_QP_ACCESS_ERR == 3 && IBV_EVENT_DEVICE_FATAL == 8 && IBV_EVENT_PORT_ACTIVE == 9 &&
		       IBV_EVENT_PORT_ERR == 10 && IBV_EVENT_GID_CHANGE == 18, "ibv_event_type");
_Static_assert(IBV_FORK_DISABLED == 0 && IBV_FORK_ENABLED == 1 && IBV_FORK_UNNEEDED == 2, "ibv_fork_status");

// X(result, name, version, arguments): what every library has had since rdma-core 1.
#define FUNCTIONS(X)                                                                                          \
	X(struct ibv_device **, get_device_list, "1.1", (int *))                                              \
	X(void, free_device_list, "1.1", (struct ibv_device **))                                              \
	X(const char *, get_device_name, "1.1", (struct ibv_device *))                                        \
	X(struct ibv_context *, open_device, "1.1", (struct ibv_device *))                                    \
	X(int, close_device, "1.1", (struct ibv_context *))                                                   \
	X(int, query_device, "1.1", (struct ibv_context *, struct ibv_device_attr *))                         \
	X(int, query_port, "1.1", (struct ibv_context *, uint8_t, struct _compat_ibv_port_attr *))            \
	X(struct ibv_pd *, alloc_pd, "1.1", (struct ibv_context *))                                           \
	X(int, dealloc_pd, "1.1", (struct ibv_pd *))                                                          \
	X(struct ibv_mr *, reg_mr, "1.1", (struct ibv_pd *, void *, size_t, int))                             \
	X(int, dereg_mr, "1.1", (struct ibv_mr *))                                                            \
	X(struct ibv_comp_channel *, create_comp_channel, "1.0", (struct ibv_context *))                      \
	X(int, destroy_comp_channel, "1.0", (struct ibv_comp_channel *))                                      \
	X(struct ibv_cq *, create_cq, "1.1", (struct ibv_context *, int, void *, struct ibv_comp_channel *, int)) \
	X(int, destroy_cq, "1.1", (struct ibv_cq *))                                                          \
	X(int, get_cq_event, "1.1", (struct ibv_comp_channel *, struct ibv_cq **, void **))                   \
	X(void, ack_cq_events, "1.1", (struct ibv_cq *, unsigned int))                                        \
	X(struct ibv_qp *, create_qp, "1.1", (struct ibv_pd *, struct ibv_qp_init_attr *))                    \
	X(int, modify_qp, "1.1", (struct ibv_qp *, struct ibv_qp_attr *, int))                                \
	X(int, query_qp, "1.1", (struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *))      \
	X(int, destroy_qp, "1.1", (struct ibv_qp *))                                                          \
	X(int, get_async_event, "1.1", (struct ibv_context *, struct ibv_async_event *))                      \
	X(void, ack_async_event, "1.1", (struct ibv_async_event *))                                           \
	X(int, fork_init, "1.1", (void))
// What newer ones have; NULL without it.
#define OPTIONAL(X)                                                                                           \
	X(struct ibv_mr *, reg_mr_iova2, "1.8", (struct ibv_pd *, void *, size_t, uint64_t, unsigned int))    \
	X(struct ibv_mr *, reg_dmabuf_mr, "1.12", (struct ibv_pd *, uint64_t, size_t, uint64_t, int, int))    \
	X(int, is_fork_initialized, "1.13", (void))

static struct {
#define FIELD(result, name, version, args) result(*name) args;
	FUNCTIONS(FIELD)
	OPTIONAL(FIELD)
	int (*query_gid_ex)(struct ibv_context *, uint32_t, uint32_t, struct ibv_gid_entry *, uint32_t, size_t);
} lib;

const char *tutti_load(void)
{
	void *h = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
	if (!h)
		return dlerror();
#define REQUIRE(result, name, version, args)                                                                  \
	if (!(lib.name = (result(*) args)dlvsym(h, "ibv_" #name, "IBVERBS_" version)))                        \
		return "libibverbs.so.1 has no ibv_" #name " of version IBVERBS_" version ": install rdma-core";
	FUNCTIONS(REQUIRE)
#define TAKE(result, name, version, args) lib.name = (result(*) args)dlvsym(h, "ibv_" #name, "IBVERBS_" version);
	OPTIONAL(TAKE)
	lib.query_gid_ex = (__typeof__(lib.query_gid_ex))dlvsym(h, "_ibv_query_gid_ex", "IBVERBS_1.11");
	return NULL;
}

int tutti_fork_state(void) { return lib.is_fork_initialized ? lib.is_fork_initialized() : -1; }
int tutti_fork_init(void) { return lib.fork_init(); }
int tutti_has_dmabuf(void) { return lib.reg_dmabuf_mr != NULL; }

// failure returns errno, which some providers forget to set.
static int failure(void) { return errno ? errno : EIO; }

int tutti_devices(char (*names)[TUTTI_NAME], int *transports, int n, int *count)
{
	errno = 0;
	struct ibv_device **all = lib.get_device_list(count);
	if (!all) {
		*count = 0;
		return failure();
	}
	for (int i = 0; i < *count && i < n; i++) {
		strncpy(names[i], lib.get_device_name(all[i]), TUTTI_NAME - 1);
		transports[i] = all[i]->transport_type == IBV_TRANSPORT_IB ? TUTTI_IB : TUTTI_OTHER;
	}
	lib.free_device_list(all);
	return 0;
}

int tutti_open(const char *name, tutti_device *d)
{
	int n, err = ENODEV;
	errno = 0;
	struct ibv_device **all = lib.get_device_list(&n);
	if (!all)
		return failure();
	for (int i = 0; i < n; i++) {
		if (strcmp(lib.get_device_name(all[i]), name))
			continue;
		errno = err = 0;
		if (!(d->context = lib.open_device(all[i]))) {
			err = failure();
		} else if (!(d->pd = lib.alloc_pd(d->context))) {
			err = failure();
			lib.close_device(d->context);
		} else if (!(d->channel = lib.create_comp_channel(d->context))) {
			err = failure();
			lib.dealloc_pd(d->pd);
			lib.close_device(d->context);
		} else {
			d->async_fd = d->context->async_fd;
			d->channel_fd = d->channel->fd;
		}
		break;
	}
	lib.free_device_list(all);
	return err;
}

int tutti_close_device(tutti_device *d)
{
	// The library destroys no queue of a device that was removed, and keeps the channel for it.
	// RDMAV_ALLOW_DISASSOC_DESTROY would change that, but forbids to wait for events meanwhile.
	if (lib.destroy_comp_channel(d->channel))
		close(d->channel_fd);
	int err = lib.dealloc_pd(d->pd), err2 = lib.close_device(d->context);
	return err ? err : err2;
}

int tutti_query_device(struct ibv_context *c, tutti_attributes *a)
{
	struct ibv_device_attr d = {0};
	int err = lib.query_device(c, &d);
	if (err)
		return err;
	memcpy(a->firmware, d.fw_ver, sizeof a->firmware);
	a->firmware[TUTTI_NAME - 1] = 0;
	a->guid = (uint64_t)ntohl((uint32_t)d.node_guid) << 32 | ntohl((uint32_t)(d.node_guid >> 32));
	a->max_mr_size = d.max_mr_size;
	a->vendor = d.vendor_id;
	a->part = d.vendor_part_id;
	a->max_qp = d.max_qp;
	a->max_qp_wr = d.max_qp_wr;
	a->max_sge = d.max_sge_rd > 0 && d.max_sge_rd < d.max_sge ? d.max_sge_rd : d.max_sge;
	a->max_cqe = d.max_cqe;
	a->max_mr = d.max_mr;
	a->max_reads = d.max_qp_init_rd_atom < d.max_qp_rd_atom ? d.max_qp_init_rd_atom : d.max_qp_rd_atom;
	a->ports = d.phys_port_cnt;
	return 0;
}

int tutti_query_port(struct ibv_context *c, int port, tutti_port *p)
{
	// The library's function fills the struct as it was before it grew, and no padding.
	struct ibv_port_attr a = {0};
	int err = lib.query_port(c, port, (struct _compat_ibv_port_attr *)&a);
	if (err)
		return err;
	p->state = a.state;
	p->ethernet = a.link_layer == IBV_LINK_LAYER_ETHERNET;
	p->grh = (a.flags & IBV_QPF_GRH_REQUIRED) != 0;
	p->mtu = a.active_mtu >= IBV_MTU_256 && a.active_mtu <= IBV_MTU_4096 ? 128 << a.active_mtu : 0;
	p->gids = a.gid_tbl_len;
	p->width = a.active_width;
	p->speed = a.active_speed;
	p->lid = a.lid;
	p->max_bytes = a.max_msg_sz;
	return 0;
}

int tutti_query_gid(struct ibv_context *c, int port, int index, tutti_gid *g)
{
	struct ibv_gid_entry e = {0};
	if (!lib.query_gid_ex)
		return ENOSYS;
	int err = lib.query_gid_ex(c, port, index, &e, 0, sizeof e);
	if (err)
		return err;
	memcpy(g->gid, e.gid.raw, sizeof g->gid);
	g->type = e.gid_type;
	g->ifindex = e.ndev_ifindex;
	return 0;
}

int tutti_get_event(struct ibv_context *c, tutti_event *e)
{
	struct ibv_async_event v;
	errno = 0;
	if (lib.get_async_event(c, &v))
		return failure();
	memset(e, 0, sizeof *e);
	e->type = v.event_type;
	switch (v.event_type) {
	case IBV_EVENT_CQ_ERR:
		e->cq = (uintptr_t)v.element.cq->cq_context;
		break;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		e->qp = v.element.qp->qp_num;
		break;
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
	case IBV_EVENT_GID_CHANGE:
		e->port = v.element.port_num;
		break;
	default:
		break;
	}
	lib.ack_async_event(&v);
	return 0;
}

static int registered(struct ibv_mr *r, struct ibv_mr **mr, uint32_t *lkey, uint32_t *rkey)
{
	if (!r)
		return failure();
	*mr = r;
	*lkey = r->lkey;
	*rkey = r->rkey;
	return 0;
}

int tutti_reg_mr(struct ibv_pd *pd, void *at, uint64_t n, uint32_t access, int relaxed, struct ibv_mr **mr,
		 uint32_t *lkey, uint32_t *rkey)
{
	errno = 0;
	if (relaxed && lib.reg_mr_iova2) // knows which rights are hints, and what the kernel understands
		return registered(lib.reg_mr_iova2(pd, at, n, (uintptr_t)at, access | IBV_ACCESS_RELAXED_ORDERING), mr,
				  lkey, rkey);
	return registered(lib.reg_mr(pd, at, n, access), mr, lkey, rkey);
}

int tutti_reg_dmabuf(struct ibv_pd *pd, int fd, uint64_t offset, uint64_t n, uint64_t address, uint32_t access,
		     int relaxed, struct ibv_mr **mr, uint32_t *lkey, uint32_t *rkey)
{
	if (!lib.reg_dmabuf_mr)
		return ENOSYS;
	errno = 0;
	return registered(lib.reg_dmabuf_mr(pd, offset, n, address, fd,
					    access | (relaxed ? IBV_ACCESS_RELAXED_ORDERING : 0)), mr, lkey, rkey);
}

int tutti_dereg_mr(struct ibv_mr *mr) { return lib.dereg_mr(mr); }

int tutti_cq_create(struct ibv_context *c, int depth, uint64_t id, struct ibv_comp_channel *channel, tutti_cq *q)
{
	int err = ENOMEM;
	memset(q, 0, sizeof *q);
	q->wc = calloc(TUTTI_POLL_BATCH, sizeof *q->wc);
	q->out = calloc(TUTTI_POLL_BATCH, sizeof *q->out);
	if (!q->wc || !q->out)
		goto failed;
	// The interrupts of queues, of all processes, are spread over those of the device.
	int vector = c->num_comp_vectors > 0 ? (id + (uint64_t)getpid()) % (uint64_t)c->num_comp_vectors : 0;
	errno = 0;
	if (!(q->cq = lib.create_cq(c, depth, (void *)(uintptr_t)id, channel, vector))) {
		err = failure();
		goto failed;
	}
	q->depth = q->cq->cqe;
	return 0;
failed:
	free(q->wc);
	free(q->out);
	return err;
}

int tutti_cq_destroy(tutti_cq *q) { return lib.destroy_cq(q->cq); }

void tutti_cq_free(tutti_cq *q)
{
	free(q->wc);
	free(q->out);
}

int tutti_cq_arm(tutti_cq *q) { return q->cq->context->ops.req_notify_cq(q->cq, 0); }

int tutti_cq_event(struct ibv_comp_channel *c, uint64_t *id)
{
	struct ibv_cq *cq;
	void *context;
	errno = 0;
	if (lib.get_cq_event(c, &cq, &context))
		return failure();
	*id = (uintptr_t)context;
	lib.ack_cq_events(cq, 1);
	return 0;
}

static uint32_t opcode(enum ibv_wc_opcode op)
{
	switch (op) { // Opcode of package rdma
	case IBV_WC_RDMA_WRITE:
		return 1;
	case IBV_WC_SEND:
		return 3;
	case IBV_WC_RDMA_READ:
		return 5;
	case IBV_WC_RECV:
		return 6;
	case IBV_WC_RECV_RDMA_WITH_IMM:
		return 7;
	default:
		return 0;
	}
}

int tutti_poll(tutti_cq *q, int n)
{
	errno = 0;
	int got = q->cq->context->ops.poll_cq(q->cq, n, q->wc);
	if (got < 0)
		return -failure();
	for (int i = 0; i < got; i++) {
		struct ibv_wc *w = &q->wc[i];
		tutti_completion *o = &q->out[i];
		o->id = w->wr_id;
		o->qp = w->qp_num;
		o->status = w->status;
		o->vendor = w->vendor_err;
		o->op = o->bytes = o->imm = o->has_imm = 0;
		if (w->status != IBV_WC_SUCCESS)
			continue;
		o->op = opcode(w->opcode);
		if (w->opcode & IBV_WC_RECV) {
			o->bytes = w->byte_len;
			if ((o->has_imm = (w->wc_flags & IBV_WC_WITH_IMM) != 0))
				o->imm = ntohl(w->imm_data);
		}
	}
	return got;
}

static void *array(uint32_t n, uint32_t m, size_t size) { return calloc((size_t)n * m + 1, size); }

static void release(tutti_qp *q)
{
	free(q->send);
	free(q->recv);
	free(q->send_segment);
	free(q->recv_segment);
	free(q->send_wr);
	free(q->recv_wr);
}

int tutti_qp_create(struct ibv_pd *pd, struct ibv_cq *send, struct ibv_cq *recv, tutti_qp *q)
{
	struct ibv_qp_init_attr a = {
		.send_cq = send,
		.recv_cq = recv,
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = q->send_depth, .max_recv_wr = q->recv_depth, .max_send_sge = q->send_segments,
			.max_recv_sge = q->recv_segments, .max_inline_data = q->inline_bytes},
	};
	errno = 0;
	if (!(q->qp = lib.create_qp(pd, &a)))
		return failure();
	q->number = q->qp->qp_num;
	q->send_depth = a.cap.max_send_wr;
	q->recv_depth = a.cap.max_recv_wr;
	q->send_segments = a.cap.max_send_sge;
	q->recv_segments = a.cap.max_recv_sge;
	q->inline_bytes = a.cap.max_inline_data;
	q->send = array(q->send_depth, 1, sizeof *q->send);
	q->recv = array(q->recv_depth, 1, sizeof *q->recv);
	q->send_segment = array(q->send_depth, q->send_segments, sizeof *q->send_segment);
	q->recv_segment = array(q->recv_depth, q->recv_segments, sizeof *q->recv_segment);
	q->send_wr = array(q->send_depth, 1, sizeof *q->send_wr);
	q->recv_wr = array(q->recv_depth, 1, sizeof *q->recv_wr);
	if (q->send && q->recv && q->send_segment && q->recv_segment && q->send_wr && q->recv_wr)
		return 0;
	lib.destroy_qp(q->qp);
	release(q);
	return ENOMEM;
}

int tutti_qp_destroy(tutti_qp *q)
{
	int err = lib.destroy_qp(q->qp);
	if (!err)
		release(q);
	return err;
}

int tutti_qp_state(tutti_qp *q, int *state)
{
	struct ibv_qp_attr a = {0};
	struct ibv_qp_init_attr i = {0};
	int err = lib.query_qp(q->qp, &a, IBV_QP_STATE, &i);
	*state = a.qp_state;
	return err;
}

int tutti_qp_init(tutti_qp *q, int port, int pkey, uint32_t access)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .pkey_index = pkey, .port_num = port,
				.qp_access_flags = access};
	return lib.modify_qp(q->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

int tutti_qp_connect(tutti_qp *q, const tutti_route *r)
{
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_RTR,
		.dest_qp_num = r->remote,
		.rq_psn = r->remote_psn,
		.max_dest_rd_atomic = r->reads,
		.min_rnr_timer = 12, // 0.64 ms
		.ah_attr = {.dlid = r->lid, .sl = r->service_level, .is_global = r->global, .port_num = r->port},
	};
	for (int m = IBV_MTU_256; m <= IBV_MTU_4096; m++)
		if (128 << m == r->mtu)
			a.path_mtu = m;
	if (!a.path_mtu)
		return EINVAL;
	if (r->global) {
		memcpy(a.ah_attr.grh.dgid.raw, r->gid, sizeof r->gid);
		a.ah_attr.grh.sgid_index = r->gid_index;
		a.ah_attr.grh.hop_limit = r->hop_limit;
		a.ah_attr.grh.traffic_class = r->traffic_class;
	}
	int err = lib.modify_qp(q->qp, &a,
				IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (err)
		return err;
	struct ibv_qp_attr s = {.qp_state = IBV_QPS_RTS, .timeout = r->timeout, .retry_cnt = r->retries,
				.rnr_retry = r->rnr_retries, .sq_psn = r->psn, .max_rd_atomic = r->reads};
	return lib.modify_qp(q->qp, &s,
			     IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
				     IBV_QP_MAX_QP_RD_ATOMIC);
}

static int move(tutti_qp *q, enum ibv_qp_state state)
{
	struct ibv_qp_attr a = {.qp_state = state};
	return lib.modify_qp(q->qp, &a, IBV_QP_STATE);
}

int tutti_qp_fail(tutti_qp *q) { return move(q, IBV_QPS_ERR); }
int tutti_qp_reset(tutti_qp *q) { return move(q, IBV_QPS_RESET); }

// outcome is what tutti_post_send and tutti_post_recv return. Most providers return an errno, some
// the negated one. One that names no bad request may have taken all of them.
static uint64_t outcome(int err, uint32_t n, ptrdiff_t bad)
{
	if (!err)
		return n;
	return (uint64_t)(uint32_t)(err < 0 ? -err : err) << 32 | (uint32_t)(bad >= 0 && bad < n ? bad : n);
}

uint64_t tutti_post_send(tutti_qp *q, uint32_t n)
{
	static const enum ibv_wr_opcode ops[] = {0, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND,
						 IBV_WR_SEND_WITH_IMM, IBV_WR_RDMA_READ};
	struct ibv_send_wr *bad = NULL;
	for (uint32_t i = 0; i < n; i++) {
		const tutti_request *r = &q->send[i];
		struct ibv_send_wr *w = &q->send_wr[i];
		w->wr_id = r->id;
		w->next = i + 1 < n ? w + 1 : NULL;
		w->sg_list = (struct ibv_sge *)&q->send_segment[(size_t)i * q->send_segments];
		w->num_sge = r->segments;
		w->opcode = ops[r->op];
		w->send_flags = (r->flags & TUTTI_SIGNALED ? IBV_SEND_SIGNALED : 0) |
				(r->flags & TUTTI_INLINE ? IBV_SEND_INLINE : 0) |
				(r->flags & TUTTI_FENCE ? IBV_SEND_FENCE : 0);
		w->imm_data = htonl(r->imm);
		w->wr.rdma.remote_addr = r->remote;
		w->wr.rdma.rkey = r->rkey;
	}
	int err = q->qp->context->ops.post_send(q->qp, q->send_wr, &bad);
	return outcome(err, n, bad ? bad - q->send_wr : -1);
}

uint64_t tutti_post_recv(tutti_qp *q, uint32_t n)
{
	struct ibv_recv_wr *bad = NULL;
	for (uint32_t i = 0; i < n; i++) {
		struct ibv_recv_wr *w = &q->recv_wr[i];
		w->wr_id = q->recv[i].id;
		w->next = i + 1 < n ? w + 1 : NULL;
		w->sg_list = (struct ibv_sge *)&q->recv_segment[(size_t)i * q->recv_segments];
		w->num_sge = q->recv[i].segments;
	}
	int err = q->qp->context->ops.post_recv(q->qp, q->recv_wr, &bad);
	return outcome(err, n, bad ? bad - q->recv_wr : -1);
}

#endif
