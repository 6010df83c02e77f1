/* The work of benches/connect.rs side=cm with librdmacm, for comparison with tokio-rdma.
 *
 *   connect [operations=1000] [warmup=100] [devices=rxe0] [times=yes|no]
 *
 * An operation is one connection: resolve, connect, accept, disconnect, and the release of everything it used at both
 * ends. Both ends are in one process and one thread, each with an event channel of its own, and share a protection
 * domain and a completion queue. The program sleeps in epoll for every event. librdmacm owns the queue pairs and
 * changes their states, as in most programs that use it. The difference of two runs with different `operations` is the
 * cost of connections without the program's start.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>

enum { CQ_SIZE = 1024, DEPTH = 128, SGES = 4, INLINE = 64, READS = 16, TIMEOUT_MS = 15000 };

static int epoll;
static struct rdma_event_channel *active, *passive;
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct sockaddr_in address;
/* The accepted connection, and whether its peer has disconnected. */
static struct rdma_cm_id *accepted;
static int established;

static inline void check(int good, const char *what) {
    if (!good) {
        fprintf(stderr, "connect: %s: %s\n", what, strerror(errno));
        exit(1);
    }
}

static unsigned long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ul + time.tv_nsec;
}

static struct rdma_event_channel *open_channel(void) {
    struct rdma_event_channel *channel = rdma_create_event_channel();
    check(channel != NULL, "rdma_create_event_channel");
    check(fcntl(channel->fd, F_SETFL, O_NONBLOCK) == 0, "fcntl");
    struct epoll_event interest = {.events = EPOLLIN, .data.ptr = channel};
    check(epoll_ctl(epoll, EPOLL_CTL_ADD, channel->fd, &interest) == 0, "epoll_ctl");
    return channel;
}

static void create_qp(struct rdma_cm_id *id) {
    struct ibv_qp_init_attr init = {
        .send_cq = cq,
        .recv_cq = cq,
        .cap = {.max_send_wr = DEPTH,
                .max_recv_wr = DEPTH,
                .max_send_sge = SGES,
                .max_recv_sge = SGES,
                .max_inline_data = INLINE},
        .qp_type = IBV_QPT_RC,
    };
    check(rdma_create_qp(id, pd, &init) == 0, "rdma_create_qp");
}

static struct rdma_conn_param parameters(void) {
    return (struct rdma_conn_param){
        .responder_resources = READS, .initiator_depth = READS, .retry_count = 6, .rnr_retry_count = 7};
}

static void destroy(struct rdma_cm_id *id) {
    rdma_destroy_qp(id);
    check(rdma_destroy_id(id) == 0, "rdma_destroy_id");
}

/* Accepts, and releases what the peer has disconnected. */
static void serve(struct rdma_cm_event *event) {
    struct rdma_cm_id *id = event->id;
    enum rdma_cm_event_type kind = event->event;
    rdma_ack_cm_event(event);
    struct rdma_conn_param param = parameters();
    switch (kind) {
    case RDMA_CM_EVENT_CONNECT_REQUEST:
        create_qp(id);
        check(rdma_accept(id, &param) == 0, "rdma_accept");
        accepted = id;
        break;
    case RDMA_CM_EVENT_ESTABLISHED:
        established = 1;
        break;
    case RDMA_CM_EVENT_DISCONNECTED:
        check(rdma_disconnect(id) == 0, "rdma_disconnect");
        destroy(id);
        accepted = NULL;
        established = 0;
        break;
    default:
        break;
    }
}

/* Takes all events, until the active end's is `expected` (any if negative), and returns whether it was. */
static int take(int expected) {
    struct epoll_event ready[2];
    int count;
    do
        count = epoll_wait(epoll, ready, 2, -1);
    while (count < 0 && errno == EINTR);
    check(count > 0, "epoll_wait");
    int found = 0;
    for (int index = 0; index < count; index++) {
        struct rdma_event_channel *channel = ready[index].data.ptr;
        struct rdma_cm_event *event;
        while (rdma_get_cm_event(channel, &event) == 0) {
            if (channel == passive) {
                serve(event);
                continue;
            }
            int kind = event->event, status = event->status;
            rdma_ack_cm_event(event);
            if (kind == RDMA_CM_EVENT_TIMEWAIT_EXIT)
                continue;
            if (kind != expected) {
                fprintf(stderr, "connect: event %s, status %d\n", rdma_event_str(kind), status);
                exit(1);
            }
            found = 1;
        }
        check(errno == EAGAIN, "rdma_get_cm_event");
    }
    return found;
}

static void wait_for(int expected) {
    while (!take(expected))
        ;
}

static void connect_once(void) {
    struct rdma_cm_id *id;
    check(rdma_create_id(active, &id, NULL, RDMA_PS_TCP) == 0, "rdma_create_id");
    check(rdma_resolve_addr(id, NULL, (struct sockaddr *)&address, TIMEOUT_MS) == 0, "rdma_resolve_addr");
    wait_for(RDMA_CM_EVENT_ADDR_RESOLVED);
    check(rdma_resolve_route(id, TIMEOUT_MS) == 0, "rdma_resolve_route");
    wait_for(RDMA_CM_EVENT_ROUTE_RESOLVED);
    create_qp(id);
    struct rdma_conn_param param = parameters();
    check(rdma_connect(id, &param) == 0, "rdma_connect");
    wait_for(RDMA_CM_EVENT_ESTABLISHED);
    while (!established)
        take(-1);
    check(rdma_disconnect(id) == 0, "rdma_disconnect");
    wait_for(RDMA_CM_EVENT_DISCONNECTED);
    destroy(id);
    while (accepted)
        take(-1);
}

static int later(const void *left, const void *right) {
    unsigned long a = *(const unsigned long *)left, b = *(const unsigned long *)right;
    return a < b ? -1 : a > b;
}

/* Listens at the first address of `name` that is an IPv4 GID. */
static void listen_at(const char *name) {
    int count;
    struct ibv_context **devices = rdma_get_devices(&count);
    check(devices != NULL, "rdma_get_devices");
    errno = ENODEV;
    for (int index = 0; index < count; index++)
        if (strcmp(ibv_get_device_name(devices[index]->device), name) == 0)
            context = devices[index];
    check(context != NULL, name);
    static const unsigned char mapped[12] = {[10] = 0xff, [11] = 0xff};
    union ibv_gid gid;
    errno = ENOENT;
    for (int index = 0; !address.sin_family && ibv_query_gid(context, 1, index, &gid) == 0; index++)
        if (memcmp(gid.raw, mapped, sizeof mapped) == 0) {
            address.sin_family = AF_INET;
            memcpy(&address.sin_addr, &gid.raw[12], 4);
        }
    check(address.sin_family, "GID of RoCE v2 over IPv4");
    static struct rdma_cm_id *listener;
    check(rdma_create_id(passive, &listener, NULL, RDMA_PS_TCP) == 0, "rdma_create_id");
    check(rdma_bind_addr(listener, (struct sockaddr *)&address) == 0, "rdma_bind_addr");
    check(rdma_listen(listener, 128) == 0, "rdma_listen");
    address.sin_port = rdma_get_src_port(listener);
    check((pd = ibv_alloc_pd(context)) != NULL, "ibv_alloc_pd");
    check((cq = ibv_create_cq(context, CQ_SIZE, NULL, NULL, 0)) != NULL, "ibv_create_cq");
}

int main(int count, char **arguments) {
    const char *times = "yes";
    char *device = "rxe0";
    unsigned long operations = 1000, warmup = 100;
    for (int index = 1; index < count; index++) {
        char *value = strchr(arguments[index], '=');
        errno = EINVAL;
        check(value != NULL, arguments[index]);
        *value++ = 0;
        const char *name = arguments[index];
        if (strcmp(name, "operations") == 0)
            operations = strtoul(value, NULL, 10);
        else if (strcmp(name, "warmup") == 0)
            warmup = strtoul(value, NULL, 10);
        else if (strcmp(name, "devices") == 0)
            device = value;
        else if (strcmp(name, "times") == 0)
            times = value;
        else
            check(0, name);
    }
    errno = EINVAL;
    check(operations > 0, "operations");
    check((epoll = epoll_create1(EPOLL_CLOEXEC)) >= 0, "epoll_create1");
    active = open_channel();
    passive = open_channel();
    listen_at(device);
    for (unsigned long round = 0; round < warmup; round++)
        connect_once();
    unsigned long *measured = strcmp(times, "yes") == 0 ? calloc(operations, sizeof *measured) : NULL;
    unsigned long start = now();
    for (unsigned long round = 0; round < operations; round++) {
        unsigned long before = measured ? now() : 0;
        connect_once();
        if (measured)
            measured[round] = now() - before;
    }
    unsigned long mean = (now() - start) / operations;
    if (measured)
        qsort(measured, operations, sizeof *measured, later);
    printf("program=c work=connect side=cm operations=%lu p50_ns=%lu p99_ns=%lu mean_ns=%lu\n", operations,
           measured ? measured[operations / 2] : 0, measured ? measured[operations * 99 / 100] : 0, mean);
    return 0;
}
