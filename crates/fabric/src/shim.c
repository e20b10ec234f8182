/* What we need of libfabric, as plain functions: most of its interface is inline functions and structures that change.
 *
 * Every function answers 0 or more, or a negative error number of libfabric. Nothing here keeps state of its own, but for the library itself: it is
 * loaded when a domain is first wanted. Some of what it needs measures the processor's clock while it is loaded, for a fifth of a second, which is
 * not to be spent by each process that could use a fabric.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct ff_domain {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
};

struct ff_endpoint {
    struct ff_domain *domain;
    struct fid_cq *completions;
    struct fid_av *addresses;
    struct fid_ep *endpoint;
};

/* One finished transfer: what was given with it, and 0 or an error number. */
struct ff_completion {
    uint64_t context;
    int32_t error;
};

/* A part of a transfer: so many bytes from `remote` of the window with this key to `into`. */
struct ff_part {
    void *into;
    size_t bytes;
    uint64_t remote;
    uint64_t key;
};

enum { PARTS_MAX = 4 };

/* What libfabric's headers do not have inline. */
static struct {
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
    const char *(*strerror)(int);
} library;
static int is_loaded;

static void load(void) {
    void *found = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!found)
        return;
    /* As POSIX has it for functions that come from dlsym. */
    *(void **)&library.getinfo = dlsym(found, "fi_getinfo");
    *(void **)&library.freeinfo = dlsym(found, "fi_freeinfo");
    *(void **)&library.dupinfo = dlsym(found, "fi_dupinfo");
    *(void **)&library.fabric = dlsym(found, "fi_fabric");
    *(void **)&library.strerror = dlsym(found, "fi_strerror");
    is_loaded = library.getinfo && library.freeinfo && library.dupinfo && library.fabric && library.strerror;
}

static int loaded(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    return is_loaded;
}

void ff_domain_close(struct ff_domain *self) {
    if (self->domain)
        fi_close(&self->domain->fid);
    if (self->fabric)
        fi_close(&self->fabric->fid);
    if (self->info)
        library.freeinfo(self->info);
    free(self);
}

/* `node`: the own address (`is_own`), or one that shall be reached. */
int ff_domain_open(const char *provider, const char *node, int is_own, struct ff_domain **out) {
    if (!loaded())
        return -FI_ENOSYS;
    struct ff_domain *self = calloc(1, sizeof(*self));
    struct fi_info *hints = library.dupinfo(NULL);
    int result = -FI_ENOMEM;
    if (!self || !hints)
        goto fail;
    hints->caps = FI_RMA | FI_READ | FI_REMOTE_READ;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->threading = FI_THREAD_SAFE;
    /* Not FI_MR_ALLOCATED: who needs it pins memory, and ours is sparse. */
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY;
    hints->fabric_attr->prov_name = strdup(provider);
    /* A service makes the node an address; 0 is any port. */
    result = library.getinfo(FI_VERSION(1, 17), node, node ? "0" : NULL, is_own && node ? FI_SOURCE : 0, hints, &self->info);
    if (result)
        goto fail;
    result = library.fabric(self->info->fabric_attr, &self->fabric, NULL);
    if (result)
        goto fail;
    result = fi_domain(self->fabric, self->info, &self->domain, NULL);
    if (result)
        goto fail;
    library.freeinfo(hints);
    *out = self;
    return 0;
fail:
    if (hints)
        library.freeinfo(hints);
    if (self)
        ff_domain_close(self);
    return result;
}

const char *ff_domain_provider(const struct ff_domain *self) { return self->info->fabric_attr->prov_name; }

/* `is_remote`: others may read it; else transfers of ours end there. The base is the address of its first byte for others. */
int ff_memory_register(struct ff_domain *self, void *start, size_t bytes, int is_remote, uint64_t wanted_key,
                       struct fid_mr **out, uint64_t *key, uint64_t *base) {
    int result = fi_mr_reg(self->domain, start, bytes, is_remote ? FI_REMOTE_READ : FI_READ, 0, wanted_key, 0, out, NULL);
    if (result)
        return result;
    *key = fi_mr_key(*out);
    *base = self->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)start : 0;
    return 0;
}

int ff_memory_close(struct fid_mr *memory) { return fi_close(&memory->fid); }

int ff_endpoint_close(struct ff_endpoint *self) {
    int result = self->endpoint ? fi_close(&self->endpoint->fid) : 0;
    if (result)
        return result;
    if (self->addresses)
        fi_close(&self->addresses->fid);
    if (self->completions)
        fi_close(&self->completions->fid);
    free(self);
    return 0;
}

int ff_endpoint_open(struct ff_domain *domain, struct ff_endpoint **out) {
    struct fi_cq_attr completions = {.format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_FD};
    struct fi_av_attr addresses = {.type = FI_AV_UNSPEC};
    struct ff_endpoint *self = calloc(1, sizeof(*self));
    int result = -FI_ENOMEM;
    if (!self)
        return result;
    self->domain = domain;
    if ((result = fi_cq_open(domain->domain, &completions, &self->completions, NULL)) ||
        (result = fi_av_open(domain->domain, &addresses, &self->addresses, NULL)) ||
        (result = fi_endpoint(domain->domain, domain->info, &self->endpoint, NULL)) ||
        (result = fi_ep_bind(self->endpoint, &self->completions->fid, FI_TRANSMIT | FI_RECV)) ||
        (result = fi_ep_bind(self->endpoint, &self->addresses->fid, 0)) || (result = fi_enable(self->endpoint))) {
        ff_endpoint_close(self);
        return result;
    }
    *out = self;
    return 0;
}

/* `length`: room at `bytes`, then what was written there. */
int ff_endpoint_address(struct ff_endpoint *self, void *bytes, size_t *length) {
    return fi_getname(&self->endpoint->fid, bytes, length);
}

/* Makes a peer of an address. Its length is that of the addresses of this endpoint. */
int ff_endpoint_peer(struct ff_endpoint *self, const void *address, uint64_t *peer) {
    fi_addr_t found = FI_ADDR_UNSPEC;
    int inserted = fi_av_insert(self->addresses, address, 1, &found, 0, NULL);
    if (inserted < 0)
        return inserted;
    if (inserted != 1)
        return -FI_EADDRNOTAVAIL;
    *peer = found;
    return 0;
}

/* Most parts of one transfer. */
int ff_endpoint_parts_max(const struct ff_endpoint *self) {
    const struct fi_tx_attr *can = self->domain->info->tx_attr;
    size_t most = can->iov_limit < can->rma_iov_limit ? can->iov_limit : can->rma_iov_limit;
    return most < 1 ? 1 : most < PARTS_MAX ? (int)most : PARTS_MAX;
}

/* One transfer of all parts. */
int ff_endpoint_read(struct ff_endpoint *self, const struct ff_part *parts, size_t count, struct fid_mr *local,
                     uint64_t peer, uint64_t context) {
    struct iovec into[PARTS_MAX];
    struct fi_rma_iov from[PARTS_MAX];
    void *memory[PARTS_MAX];
    struct fi_msg_rma message = {.msg_iov = into, .desc = memory, .iov_count = count, .addr = peer, .rma_iov = from,
                                 .rma_iov_count = count, .context = (void *)(uintptr_t)context};
    if (count > PARTS_MAX)
        return -FI_EINVAL;
    for (size_t index = 0; index < count; index++) {
        into[index] = (struct iovec){.iov_base = parts[index].into, .iov_len = parts[index].bytes};
        from[index] = (struct fi_rma_iov){.addr = parts[index].remote, .len = parts[index].bytes, .key = parts[index].key};
        memory[index] = fi_mr_desc(local);
    }
    return (int)fi_readmsg(self->endpoint, &message, FI_COMPLETION);
}

/* Number of finished transfers; also lets those of others come forward. */
int ff_endpoint_poll(struct ff_endpoint *self, struct ff_completion *out, size_t room) {
    struct fi_cq_entry entries[16];
    struct fi_cq_err_entry failed = {0};
    ssize_t count = fi_cq_read(self->completions, entries, room < 16 ? room : 16);
    if (count == -FI_EAGAIN)
        return 0;
    if (count == -FI_EAVAIL) {
        count = fi_cq_readerr(self->completions, &failed, 0);
        if (count == -FI_EAGAIN)
            return 0;
        if (count < 0)
            return (int)count;
        out[0].context = (uint64_t)(uintptr_t)failed.op_context;
        out[0].error = failed.err ? failed.err : FI_EOTHER;
        return 1;
    }
    for (ssize_t index = 0; index < count; index++) {
        out[index].context = (uint64_t)(uintptr_t)entries[index].op_context;
        out[index].error = 0;
    }
    return (int)count;
}

/* A descriptor that can be read from when there is something to poll for, if `ff_endpoint_may_sleep`. */
int ff_endpoint_descriptor(struct ff_endpoint *self) {
    int descriptor = -1;
    int result = fi_control(&self->completions->fid, FI_GETWAIT, &descriptor);
    return result ? result : descriptor;
}

int ff_endpoint_may_sleep(struct ff_endpoint *self) {
    struct fid *fids[1] = {&self->completions->fid};
    return fi_trywait(self->domain->fabric, fids, 1) == FI_SUCCESS;
}

const char *ff_error_text(int error) {
    return loaded() ? library.strerror(error) : "libfabric.so.1 cannot be loaded; install it (Debian: libfabric1)";
}
