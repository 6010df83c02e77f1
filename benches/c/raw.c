/* The work of benches/verbs.rs with the C interface of libibverbs, for comparison with tokio-rdma.
 *
 *   raw work=write|read|write-batch|read-batch|pingpong mode=poll|event|arm-first [depth=1] [size=BYTES]
 *       [operations=10000] [warmup=1000] [devices=rxe0[,rxe1]] [times=yes|no]
 *
 * Two connected queue pairs in one process, on one device or on two. WRITE and READ transfer 8 bytes by default, a
 * ping-pong 64 in each direction. Every send is signaled, like every awaited operation. In a batch (a chain of
 * `depth`), only the last is signaled, and times are of batches.
 *
 *   poll       spins on ibv_poll_cq
 *   event      polls; without a completion arms, polls again, and then sleeps in epoll. Reads one event at a time and
 *              acknowledges many at once.
 *   arm-first  arms before posting and sleeps for every operation, or for every message of a ping-pong
 *
 * times=no omits the times of single operations, for counting instructions. The line of output is the same as that of
 * benches/verbs.rs.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>

enum { WORD = 8, MESSAGE = 64, MAX_DEPTH = 64, MAX_SIZE = 1 << 24, CQ_SIZE = 256, ACK_EVERY = 1000 };
enum mode { POLL, EVENT, ARM_FIRST };

/* One end with its own open device. */
struct end {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    int gid_index;
    union ibv_gid gid;
    enum ibv_mtu mtu;
    unsigned unacknowledged;
    int sleeps; /* armed before posting: the next take() sleeps first */
    unsigned sends, receives; /* completions polled but not yet consumed by finish() */
    struct ibv_sge sge, receive_sge;
    struct ibv_send_wr wr;
    struct ibv_recv_wr receive_wr;
    char *memory; /* MAX_DEPTH places of `size` bytes */
};

static enum mode mode;
static unsigned long size;
static int epoll;
static unsigned long arms, events, acks, waits;

static inline void check(int good, const char *what) {
    if (!good) {
        fprintf(stderr, "raw: %s: %s\n", what, strerror(errno));
        exit(1);
    }
}

static unsigned long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ul + time.tv_nsec;
}

/* Setup. */

/* Chooses a GID of RoCE v2 over IPv4: an IPv4-mapped IPv6 address. */
static void choose_gid(struct end *end, int entries) {
    static const unsigned char mapped[12] = {[10] = 0xff, [11] = 0xff};
    for (int index = 0; index < entries; index++) {
        struct ibv_gid_entry entry;
        if (ibv_query_gid_ex(end->context, 1, index, &entry, 0) == 0 && entry.gid_type == IBV_GID_TYPE_ROCE_V2 &&
            memcmp(entry.gid.raw, mapped, sizeof mapped) == 0) {
            end->gid_index = index;
            end->gid = entry.gid;
            return;
        }
    }
    errno = ENOENT;
    check(0, "GID of RoCE v2 over IPv4");
}

static void open_end(struct end *end, const char *name) {
    int count;
    struct ibv_device **devices = ibv_get_device_list(&count);
    check(devices != NULL, "ibv_get_device_list");
    errno = ENODEV;
    for (int index = 0; index < count; index++)
        if (strcmp(ibv_get_device_name(devices[index]), name) == 0)
            end->context = ibv_open_device(devices[index]);
    check(end->context != NULL, name);
    ibv_free_device_list(devices);

    struct ibv_port_attr port;
    check(ibv_query_port(end->context, 1, &port) == 0, "ibv_query_port");
    end->mtu = port.active_mtu;
    choose_gid(end, port.gid_tbl_len);
    check((end->pd = ibv_alloc_pd(end->context)) != NULL, "ibv_alloc_pd");
    check((end->channel = ibv_create_comp_channel(end->context)) != NULL, "ibv_create_comp_channel");
    check(fcntl(end->channel->fd, F_SETFL, O_NONBLOCK) == 0, "fcntl");
    struct epoll_event interest = {.events = EPOLLIN, .data.ptr = end};
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, end->channel->fd, &interest) == 0, "epoll_ctl");
    end->cq = ibv_create_cq(end->context, CQ_SIZE, end, mode == POLL ? NULL : end->channel, 0);
    check(end->cq != NULL, "ibv_create_cq");
    struct ibv_qp_init_attr init = {
        .send_cq = end->cq,
        .recv_cq = end->cq,
        .cap = {.max_send_wr = MAX_DEPTH, .max_recv_wr = MAX_DEPTH, .max_send_sge = 1, .max_recv_sge = 1},
        .qp_type = IBV_QPT_RC,
    };
    check((end->qp = ibv_create_qp(end->pd, &init)) != NULL, "ibv_create_qp");
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    unsigned long length = size * MAX_DEPTH;
    check((end->memory = aligned_alloc(4096, (length + 4095) / 4096 * 4096)) != NULL, "aligned_alloc");
    memset(end->memory, 0, length);
    check((end->mr = ibv_reg_mr(end->pd, end->memory, length, access)) != NULL, "ibv_reg_mr");
}

static void connect_to(struct end *end, const struct end *peer) {
    struct ibv_qp_attr init = {
        .qp_state = IBV_QPS_INIT,
        .port_num = 1,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
    };
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = end->mtu < peer->mtu ? end->mtu : peer->mtu,
        .dest_qp_num = peer->qp->qp_num,
        .max_dest_rd_atomic = 16,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1,
                    .port_num = 1,
                    .grh = {.dgid = peer->gid, .sgid_index = end->gid_index, .hop_limit = 64}},
    };
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 6, .rnr_retry = 7, .max_rd_atomic = 16};
    int error = ibv_modify_qp(end->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    check(error == 0, "INIT");
    error = ibv_modify_qp(end->qp, &rtr,
                          IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                              IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    check(error == 0, "RTR");
    error = ibv_modify_qp(end->qp, &rts,
                          IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                              IBV_QP_MAX_QP_RD_ATOMIC);
    check(error == 0, "RTS");
}

/* Completions. */

static void arm(struct end *end) {
    check(ibv_req_notify_cq(end->cq, 0) == 0, "ibv_req_notify_cq");
    arms++;
}

static void arm_first(struct end *end) {
    if (mode == ARM_FIRST) {
        arm(end);
        end->sleeps = 1;
    }
}

static void acknowledge(struct end *end) {
    ibv_ack_cq_events(end->cq, end->unacknowledged);
    end->unacknowledged = 0;
    acks++;
}

/* Sleeps until a completion channel has an event, and reads it. */
static void sleep_for_event(void) {
    struct epoll_event ready;
    int count;
    do
        count = epoll_wait(epoll, &ready, 1, -1);
    while (count < 0 && errno == EINTR);
    check(count == 1, "epoll_wait");
    waits++;
    struct end *end = ready.data.ptr;
    struct ibv_cq *cq;
    void *context;
    check(ibv_get_cq_event(end->channel, &cq, &context) == 0, "ibv_get_cq_event");
    events++;
    if (++end->unacknowledged == ACK_EVERY)
        acknowledge(end);
}

static inline int poll(struct end *end, struct ibv_wc *completions, int capacity) {
    int taken = ibv_poll_cq(end->cq, capacity, completions);
    check(taken >= 0, "ibv_poll_cq");
    for (int index = 0; index < taken; index++)
        if (completions[index].status != IBV_WC_SUCCESS) {
            fprintf(stderr, "raw: %s\n", ibv_wc_status_str(completions[index].status));
            exit(1);
        }
    return taken;
}

/* Waits for completions: returns at least one, at most `capacity`. */
static inline int take(struct end *end, struct ibv_wc *completions, int capacity) {
    int taken;
    if (end->sleeps)
        sleep_for_event();
    end->sleeps = 0;
    while ((taken = poll(end, completions, capacity)) == 0) {
        if (mode == POLL)
            continue;
        arm(end);
        if ((taken = poll(end, completions, capacity)) != 0)
            break;
        sleep_for_event();
    }
    return taken;
}

/* WRITE and READ: `depth` in flight, each timed from post to completion. */

static void prepare_rdma(struct end *from, struct end *to, enum ibv_wr_opcode opcode) {
    from->sge = (struct ibv_sge){.length = size, .lkey = from->mr->lkey};
    from->wr = (struct ibv_send_wr){
        .sg_list = &from->sge,
        .num_sge = 1,
        .opcode = opcode,
        .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {.remote_addr = (uintptr_t)to->memory, .rkey = to->mr->rkey},
    };
}

static inline void post_rdma(struct end *from, unsigned long id) {
    struct ibv_send_wr *bad;
    from->sge.addr = (uintptr_t)&from->memory[id % MAX_DEPTH * size];
    from->wr.wr_id = id;
    check(ibv_post_send(from->qp, &from->wr, &bad) == 0, "ibv_post_send");
}

static void rdma(struct end *from, unsigned long depth, unsigned long operations, unsigned long *times) {
    struct ibv_wc completions[MAX_DEPTH];
    unsigned long started[MAX_DEPTH], posted = 0, done = 0;
    while (done < operations) {
        while (posted < operations && posted - done < depth) {
            arm_first(from);
            if (times)
                started[posted % MAX_DEPTH] = now();
            post_rdma(from, posted++);
        }
        int taken = take(from, completions, depth);
        if (times) {
            unsigned long stop = now();
            for (int index = 0; index < taken; index++)
                times[completions[index].wr_id] = stop - started[completions[index].wr_id % MAX_DEPTH];
        }
        done += taken;
    }
}

/* The same in chains, which are built once; only addresses and ids change. */
static void batches(struct end *from, unsigned long depth, unsigned long operations, unsigned long *times) {
    struct ibv_send_wr chain[MAX_DEPTH], *bad;
    struct ibv_sge sges[MAX_DEPTH];
    struct ibv_wc completion;
    for (unsigned long index = 0; index < depth; index++) {
        sges[index] = from->sge;
        chain[index] = from->wr;
        chain[index].sg_list = &sges[index];
        chain[index].next = index + 1 < depth ? &chain[index + 1] : NULL;
        chain[index].send_flags = index + 1 < depth ? 0 : IBV_SEND_SIGNALED;
    }
    for (unsigned long done = 0; done + depth <= operations; done += depth) {
        unsigned long start = times ? now() : 0;
        for (unsigned long index = 0; index < depth; index++) {
            sges[index].addr = (uintptr_t)&from->memory[(done + index) % MAX_DEPTH * size];
            chain[index].wr_id = done + index;
        }
        check(ibv_post_send(from->qp, chain, &bad) == 0, "ibv_post_send");
        take(from, &completion, 1);
        if (times)
            times[done / depth] = now() - start;
    }
}

/* Ping-pong: both ends alternately. An answer's send completion is awaited only before the next answer: over a wire it
 * takes as long as the next question. */

static void prepare_messages(struct end *end) {
    end->receive_sge = (struct ibv_sge){.addr = (uintptr_t)end->memory, .length = size, .lkey = end->mr->lkey};
    end->receive_wr = (struct ibv_recv_wr){.sg_list = &end->receive_sge, .num_sge = 1};
    end->sge = (struct ibv_sge){.addr = (uintptr_t)&end->memory[size], .length = size, .lkey = end->mr->lkey};
    end->wr = (struct ibv_send_wr){
        .sg_list = &end->sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
}

static void post_receive(struct end *end) {
    struct ibv_recv_wr *bad;
    check(ibv_post_recv(end->qp, &end->receive_wr, &bad) == 0, "ibv_post_recv");
}

static void post_send(struct end *end) {
    struct ibv_send_wr *bad;
    check(ibv_post_send(end->qp, &end->wr, &bad) == 0, "ibv_post_send");
}

/* Waits for `sends` and `receives` completions of an end. */
static void finish(struct end *end, unsigned sends, unsigned receives) {
    struct ibv_wc completions[4];
    while (end->sends < sends || end->receives < receives) {
        int taken = take(end, completions, 4);
        for (int index = 0; index < taken; index++)
            if (completions[index].opcode & IBV_WC_RECV)
                end->receives++;
            else
                end->sends++;
    }
    end->sends -= sends;
    end->receives -= receives;
}

static void ping_pong(struct end *ours, struct end *theirs, unsigned long operations, unsigned long *times) {
    for (unsigned long round = 0; round < operations; round++) {
        unsigned long start = times ? now() : 0;
        post_receive(ours);
        post_receive(theirs);
        arm_first(theirs);
        post_send(ours);
        finish(theirs, round > 0, 1);
        arm_first(ours);
        post_send(theirs);
        finish(ours, 1, 1);
        if (times)
            times[round] = now() - start;
    }
    finish(theirs, 1, 0);
}

/* Arguments and result. */

static int later(const void *left, const void *right) {
    unsigned long a = *(const unsigned long *)left, b = *(const unsigned long *)right;
    return (a > b) - (a < b);
}

static void run(struct end *ours, struct end *theirs, const char *work, unsigned long depth, unsigned long operations,
                unsigned long *times) {
    if (strcmp(work, "pingpong") == 0) {
        prepare_messages(ours);
        prepare_messages(theirs);
        ping_pong(ours, theirs, operations, times);
    } else {
        prepare_rdma(ours, theirs, strncmp(work, "read", 4) == 0 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE);
        if (strstr(work, "-batch"))
            batches(ours, depth, operations, times);
        else
            rdma(ours, depth, operations, times);
    }
}

int main(int count, char **arguments) {
    const char *work = "write", *how = "poll", *times = "yes";
    char devices[64] = "rxe0";
    unsigned long depth = 1, operations = 10000, warmup = 1000, bytes = 0;
    for (int index = 1; index < count; index++) {
        char *value = strchr(arguments[index], '=');
        errno = EINVAL;
        check(value != NULL, arguments[index]);
        *value++ = 0;
        const char *name = arguments[index];
        if (strcmp(name, "work") == 0)
            work = value;
        else if (strcmp(name, "mode") == 0)
            how = value;
        else if (strcmp(name, "times") == 0)
            times = value;
        else if (strcmp(name, "depth") == 0)
            depth = strtoul(value, NULL, 10);
        else if (strcmp(name, "size") == 0)
            bytes = strtoul(value, NULL, 10);
        else if (strcmp(name, "operations") == 0)
            operations = strtoul(value, NULL, 10);
        else if (strcmp(name, "warmup") == 0)
            warmup = strtoul(value, NULL, 10);
        else if (strcmp(name, "devices") == 0)
            snprintf(devices, sizeof devices, "%s", value);
        else
            check(0, name);
    }
    errno = EINVAL;
    int is_batch = strcmp(work, "write-batch") == 0 || strcmp(work, "read-batch") == 0;
    int known = strcmp(work, "write") == 0 || strcmp(work, "read") == 0 || is_batch || strcmp(work, "pingpong") == 0;
    check(known, work);
    check(depth > 0 && depth <= MAX_DEPTH && operations > 0, "depth or operations");
    size = bytes ? bytes : strcmp(work, "pingpong") == 0 ? MESSAGE : WORD;
    check(size <= MAX_SIZE, "size");
    mode = strcmp(how, "poll") == 0 ? POLL : strcmp(how, "event") == 0 ? EVENT : ARM_FIRST;
    check(mode != ARM_FIRST || (strcmp(how, "arm-first") == 0 && depth == 1 && !is_batch), how);

    static struct end ours, theirs;
    char *second = strchr(devices, ',');
    if (second)
        *second++ = 0;
    check((epoll = epoll_create1(EPOLL_CLOEXEC)) >= 0, "epoll_create1");
    open_end(&ours, devices);
    open_end(&theirs, second ? second : devices);
    connect_to(&ours, &theirs);
    connect_to(&theirs, &ours);

    run(&ours, &theirs, work, depth, warmup, NULL);
    unsigned long *measured = strcmp(times, "yes") == 0 ? calloc(operations, sizeof *measured) : NULL;
    arms = events = acks = waits = 0;
    unsigned long start = now();
    run(&ours, &theirs, work, depth, operations, measured);
    unsigned long mean = (now() - start) / operations;
    unsigned long timed = is_batch ? operations / depth : operations;
    if (measured)
        qsort(measured, timed, sizeof *measured, later);
    printf("program=c work=%s mode=%s depth=%lu size=%lu operations=%lu p50_ns=%lu p99_ns=%lu mean_ns=%lu", work, how, depth,
           size, operations, measured ? measured[timed / 2] : 0, measured ? measured[timed * 99 / 100] : 0, mean);
    printf(" arms=%lu events=%lu acks=%lu sleeps=%lu\n", arms, events, acks, waits);
    if (ours.unacknowledged)
        acknowledge(&ours);
    if (theirs.unacknowledged)
        acknowledge(&theirs);
    return 0;
}
