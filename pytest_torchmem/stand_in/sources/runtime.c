/* A test double of the CUDA runtime: what torch asks of libcudart, answered for one described GPU.
 * Memory is one lazily filled mapping per device; copies are real, kernels do nothing. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "stand_in.h"

#define MIB ((size_t)1 << 20)
#define PAGE ((size_t)4096)
#define GRAIN (2 * MIB)
#define DEVICES 16
#define CHUNK (32 * MIB)
#define OF_CONTEXT (13 * CHUNK)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current;
static __thread cudaError_t last;
static struct {
    char name[128];
    int major, minor, sms, threads, devices, binary, sm_shared, block_shared, blocks, l2;
    size_t memory, context, copy_limit;
} gpu;

typedef struct block { char *at; size_t size; struct block *next; } block;
/* addresses that the driver takes at once, and what is in use of them; in order of address */
typedef struct chunk { char *begin, *end; block *used; struct chunk *next; } chunk;
static char *region[DEVICES];
static chunk *chunks[DEVICES];
static size_t taken[DEVICES];
static block *pinned;

/* a device has its primary context from the first call on that needs one */
static int initialised[DEVICES];
static void touch(void) { initialised[current] = 1; }
int stand_in_initialised(int d) { return initialised[d]; }

static cudaError_t fail(cudaError_t e) { return last = e; }

static size_t number(const char *name, size_t otherwise) {
    const char *v = getenv(name);
    return v && *v ? strtoull(v, NULL, 10) : otherwise;
}

/* The GPU, described by environment.py. */
static void describe(void) {
    const char *n = getenv("STAND_IN_NAME");
    snprintf(gpu.name, sizeof gpu.name, "%s", n ? n : "");
    size_t capability = number("STAND_IN_CAPABILITY", 80);
    gpu.major = capability / 10, gpu.minor = capability % 10;
    gpu.sms = number("STAND_IN_MULTIPROCESSORS", 1);
    gpu.threads = number("STAND_IN_THREADS", 1024);
    gpu.memory = number("STAND_IN_MEMORY", (size_t)1024 * MIB);
    gpu.context = number("STAND_IN_CONTEXT", 0);
    gpu.devices = number("STAND_IN_DEVICES", 1);
    if (gpu.devices > DEVICES) gpu.devices = DEVICES;
    gpu.copy_limit = number("STAND_IN_COPY_LIMIT", 256 * MIB);
    gpu.binary = number("STAND_IN_BINARY", capability);
    gpu.block_shared = number("STAND_IN_BLOCK_SHARED", 48 << 10);
    gpu.sm_shared = gpu.block_shared + (gpu.major >= 8 ? 1024 : 0);
    gpu.blocks = number("STAND_IN_BLOCKS", 16);
    gpu.l2 = number("STAND_IN_L2", 4 * MIB);
}

__attribute__((constructor)) static void start(void) { describe(); }

/* Addresses for a device: twice its memory, as chunks leave some of theirs free. */
static size_t reach(void) { return (2 * gpu.memory + OF_CONTEXT) / CHUNK * CHUNK; }

static chunk *new_chunk(char *begin, char *end, chunk *next) {
    chunk *c = malloc(sizeof *c);
    *c = (chunk){begin, end, NULL, next};
    return c;
}

static void begin(int d) {
    if (region[d]) return;
    region[d] = mmap(NULL, reach() + CHUNK, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region[d] == MAP_FAILED) { perror("stand-in: mmap"); abort(); }
    region[d] = (char *)(((uintptr_t)region[d] + CHUNK - 1) & ~(CHUNK - 1));
    char *end = region[d] + reach();
    chunks[d] = new_chunk(end - OF_CONTEXT, end, NULL);
    taken[d] = 0;
}

/* -- memory -------------------------------------------------------------------------------- */
size_t stand_in_free_memory(int d) { return gpu.memory - gpu.context - taken[d]; }

int stand_in_account(int d, long bytes) {
    pthread_mutex_lock(&lock);
    int ok = bytes <= 0 || (size_t)bytes <= stand_in_free_memory(d);
    if (ok) taken[d] += bytes;
    pthread_mutex_unlock(&lock);
    return ok;
}

/* The addresses of a GPU's driver, as pytest_torchmem/allocator/device_memory.py describes them. */
static char *place(int d, size_t n) {
    begin(d);
    for (chunk *c = chunks[d]; c; c = c->next) {
        char *at = c->begin;
        block **p = &c->used;
        for (; *p && (size_t)((*p)->at - at) < n; p = &(*p)->next) at = (*p)->at + (*p)->size;
        if ((size_t)((*p ? (*p)->at : c->end) - at) < n) continue;
        block *b = malloc(sizeof *b);
        *b = (block){at, n, *p};
        *p = b;
        return at;
    }
    /* as high as there is room: below the last chunk whose lower neighbour is far enough away */
    size_t size = (n + CHUNK - 1) / CHUNK * CHUNK;
    char *below = region[d];
    chunk **found = NULL;
    for (chunk **p = &chunks[d]; *p; below = (*p)->end, p = &(*p)->next)
        if ((size_t)((*p)->begin - below) >= size) found = p;
    if (!found) return NULL;
    *found = new_chunk((*found)->begin - size, (*found)->begin, *found);
    return place(d, n);
}

cudaError_t cudaMalloc(void **out, size_t size) {
    int d = current;
    size_t n = (size + GRAIN - 1) & ~(GRAIN - 1);
    *out = NULL;
    touch();
    if (!size) return cudaSuccess;
    pthread_mutex_lock(&lock);
    if (n <= stand_in_free_memory(d)) *out = place(d, n);
    if (*out) taken[d] += n;
    pthread_mutex_unlock(&lock);
    return *out ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *ptr) {
    touch();
    if (!ptr) return cudaSuccess;
    pthread_mutex_lock(&lock);
    cudaError_t e = cudaErrorInvalidValue;
    for (int d = 0; d < gpu.devices && e; d++)
        for (chunk **c = &chunks[d]; *c && e; c = e ? &(*c)->next : c)
            for (block **p = &(*c)->used; *p; p = &(*p)->next)
                if ((*p)->at == ptr) {
                    block *b = *p;
                    *p = b->next;
                    madvise(b->at, b->size, MADV_DONTNEED);
                    taken[d] -= b->size;
                    free(b);
                    if (!(*c)->used && (*c)->next) { /* the last one is the context's */
                        chunk *empty = *c;
                        *c = empty->next;
                        free(empty);
                    }
                    e = cudaSuccess;
                    break;
                }
    pthread_mutex_unlock(&lock);
    return e ? fail(e) : e;
}
cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t s) { return cudaMalloc(out, size); }
cudaError_t cudaFreeAsync(void *ptr, cudaStream_t s) { return cudaFree(ptr); }
cudaError_t cudaMallocManaged(void **out, size_t size, unsigned f) { return cudaMalloc(out, size); }

cudaError_t cudaMemGetInfo(size_t *f, size_t *t) {
    touch();
    *f = stand_in_free_memory(current), *t = gpu.memory;
    return cudaSuccess;
}

static int device_of(const void *p) {
    for (int d = 0; d < gpu.devices; d++)
        if (region[d] && (char *)p >= region[d] && (char *)p < region[d] + reach()) return d;
    return stand_in_mapped_device(p);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    int d = device_of(p);
    if (d >= 0) {
        a->type = cudaMemoryTypeDevice, a->device = d, a->devicePointer = (void *)p;
        return cudaSuccess;
    }
    a->type = cudaMemoryTypeUnregistered, a->device = -1, a->hostPointer = (void *)p;
    pthread_mutex_lock(&lock);
    for (block *b = pinned; b; b = b->next)
        if ((char *)p >= b->at && (char *)p < b->at + b->size) {
            a->type = cudaMemoryTypeHost, a->device = 0, a->devicePointer = (void *)p;
            break;
        }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static void pin(void *p, size_t n) {
    block *b = malloc(sizeof *b);
    pthread_mutex_lock(&lock);
    *b = (block){p, n, pinned};
    pinned = b;
    pthread_mutex_unlock(&lock);
}
static int unpin(void *p) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (block **q = &pinned; *q; q = &(*q)->next)
        if ((*q)->at == p) {
            block *b = *q;
            *q = b->next;
            free(b);
            found = 1;
            break;
        }
    pthread_mutex_unlock(&lock);
    return found;
}
cudaError_t cudaHostAlloc(void **out, size_t n, unsigned flags) {
    if (posix_memalign(out, PAGE, n ? n : 1)) return fail(cudaErrorMemoryAllocation);
    pin(*out, n);
    return cudaSuccess;
}
cudaError_t cudaMallocHost(void **out, size_t n) { return cudaHostAlloc(out, n, 0); }
cudaError_t cudaFreeHost(void *p) { if (unpin(p)) free(p); return cudaSuccess; }
cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags) { pin(p, n); return cudaSuccess; }
cudaError_t cudaHostUnregister(void *p) { unpin(p); return cudaSuccess; }
cudaError_t cudaHostGetDevicePointer(void **out, void *p, unsigned f) { *out = p; return cudaSuccess; }

/* -- copies: real up to a limit ------------------------------------------------------------- */
static cudaError_t copy(void *to, const void *from, size_t n) {
    /* between two places of the device, large data is what kernels have not computed */
    size_t most = n > (4 << 20) && device_of(to) >= 0 && device_of(from) >= 0 ? 0 : gpu.copy_limit;
    if (n && n <= most) memmove(to, from, n);
    if (n && device_of(from) >= 0 && device_of(to) < 0) stand_in_note("values");
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { return copy(d, s, n); }
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t t) { return copy(d, s, n); }
cudaError_t cudaMemcpyPeer(void *d, int dd, const void *s, int sd, size_t n) { return copy(d, s, n); }
cudaError_t cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, cudaStream_t t) { return copy(d, s, n); }
cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t t) {
    for (size_t i = 0; i < h; i++) copy((char *)d + i * dp, (const char *)s + i * sp, w);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *p, int v, size_t n) {
    if (!v && n >= 16 * PAGE && device_of(p) >= 0) { /* zero pages cost nothing */
        char *a = (char *)(((uintptr_t)p + PAGE - 1) & ~(PAGE - 1));
        char *z = (char *)(((uintptr_t)p + n) & ~(PAGE - 1));
        memset(p, 0, a - (char *)p);
        madvise(a, z - a, MADV_DONTNEED);
        memset(z, 0, (char *)p + n - z);
    } else if (n <= gpu.copy_limit) memset(p, v, n);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) { return cudaMemset(p, v, n); }

/* -- devices -------------------------------------------------------------------------------- */
cudaError_t cudaGetDeviceCount(int *n) { *n = gpu.devices; return cudaSuccess; }
cudaError_t cudaGetDevice(int *d) { *d = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) {
    if (d < 0 || d >= gpu.devices) return fail(cudaErrorInvalidDevice);
    current = d;
    touch();
    return cudaSuccess;
}
cudaError_t cudaSetDeviceFlags(unsigned f) { return cudaSuccess; }
int stand_in_current(void) { return current; }
cudaError_t cudaDeviceSynchronize(void) { touch(); return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) { *v = number("STAND_IN_RUNTIME", CUDART_VERSION); return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = number("STAND_IN_RUNTIME", CUDART_VERSION); return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", d + 1); return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *l, int *g) { *l = 0; *g = -5; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *r, int a, int b) { *r = a != b; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int d, unsigned f) { return cudaSuccess; }

static cudaError_t properties(struct cudaDeviceProp *p, int d) {
    if (d < 0 || d >= gpu.devices) return fail(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", gpu.name);
    p->uuid.bytes[0] = 0x5d, p->uuid.bytes[15] = d;
    p->totalGlobalMem = gpu.memory;
    p->sharedMemPerBlock = 48 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32;
    p->memPitch = 2147483647;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->totalConstMem = 65536;
    p->major = gpu.major, p->minor = gpu.minor;
    p->textureAlignment = 512, p->texturePitchAlignment = 32;
    p->multiProcessorCount = gpu.sms;
    p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = 1;
    p->pciBusID = d + 1;
    p->asyncEngineCount = 3;
    p->memoryBusWidth = 5120;
    p->l2CacheSize = gpu.l2;
    p->maxThreadsPerMultiProcessor = gpu.threads;
    p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
    p->sharedMemPerMultiprocessor = gpu.sm_shared;
    p->managedMemory = p->concurrentManagedAccess = p->computePreemptionSupported = 1;
    p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = 1;
    p->sharedMemPerBlockOptin = gpu.block_shared;
    p->maxBlocksPerMultiProcessor = gpu.blocks;
    p->reservedSharedMemPerBlock = gpu.major >= 8 ? 1024 : 0;
    p->hostRegisterSupported = p->memoryPoolsSupported = 1;
    p->clusterLaunch = gpu.major >= 9;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) { return properties(p, d); }
#undef cudaGetDeviceProperties
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int d) { return properties(p, d); }

cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    struct cudaDeviceProp p;
    cudaError_t e = properties(&p, d);
    if (e) return e;
    switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: *v = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *v = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *v = 64; break;
    case cudaDevAttrMaxGridDimX: *v = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = p.sharedMemPerBlock; break;
    case cudaDevAttrTotalConstantMemory: *v = 65536; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *v = 65536; break;
    case cudaDevAttrClockRate: *v = 1410000; break;
    case cudaDevAttrMemoryClockRate: *v = 1593000; break;
    case cudaDevAttrTextureAlignment: *v = 512; break;
    case cudaDevAttrMultiProcessorCount: *v = p.multiProcessorCount; break;
    case cudaDevAttrCanMapHostMemory: case cudaDevAttrConcurrentKernels: case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory: case cudaDevAttrConcurrentManagedAccess: case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrHostRegisterSupported: case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrStreamPrioritiesSupported: case cudaDevAttrComputePreemptionSupported: *v = 1; break;
    case cudaDevAttrGlobalMemoryBusWidth: *v = p.memoryBusWidth; break;
    case cudaDevAttrL2CacheSize: *v = p.l2CacheSize; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrAsyncEngineCount: *v = 3; break;
    case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = p.minor; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *v = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *v = p.reservedSharedMemPerBlock; break;
    case cudaDevAttrClusterLaunch: *v = p.clusterLaunch; break;
    case cudaDevAttrPciBusId: *v = p.pciBusID; break;
    default: *v = 0; stand_in_note_number("cudaDeviceGetAttribute", a);
    }
    return cudaSuccess;
}

/* -- errors --------------------------------------------------------------------------------- */
cudaError_t cudaGetLastError(void) { cudaError_t e = last; last = cudaSuccess; return e; }
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorString(cudaError_t e) {
    return e == cudaErrorMemoryAllocation ? "out of memory" : e ? "an error of the stand-in" : "no error";
}
const char *cudaGetErrorName(cudaError_t e) {
    return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : e ? "cudaErrorUnknown" : "cudaSuccess";
}

/* -- streams, events, capture --------------------------------------------------------------- */
struct CUstream_st { int device, priority; enum cudaStreamCaptureStatus capture; unsigned long long id; cudaGraph_t graph; };
static struct CUstream_st defaults[DEVICES];
static unsigned long long captures;
static __thread enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
static struct CUstream_st *stream(cudaStream_t s) { return (uintptr_t)s <= 2 ? &defaults[current] : s; }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) {
    *s = calloc(1, sizeof **s);
    touch();
    (*s)->device = current, (*s)->priority = p;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return cudaStreamCreateWithPriority(s, f, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *s) { return cudaStreamCreateWithPriority(s, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = stream(s)->priority; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = stream(s)->capture; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g,
                                     const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
    struct CUstream_st *t = stream(s);
    *c = t->capture;
    if (t->capture) { /* the rest is only defined while capturing */
        if (id) *id = t->id;
        if (g) *g = t->graph;
        if (d) *d = NULL;
        if (e) *e = NULL;
        if (n) *n = 0;
    }
    return cudaSuccess;
}
#if CUDART_VERSION < 13000
#undef cudaStreamGetCaptureInfo
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g,
                                        const cudaGraphNode_t **d, size_t *n) { return cudaStreamGetCaptureInfo(s, c, id, g, d, NULL, n); }
#endif
struct CUgraph_st { size_t nodes; };
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) {
    struct CUstream_st *t = stream(s);
    t->capture = cudaStreamCaptureStatusActive, t->id = ++captures;
    t->graph = (cudaGraph_t)calloc(1, sizeof(struct CUgraph_st));
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) {
    struct CUstream_st *t = stream(s);
    t->capture = cudaStreamCaptureStatusNone;
    *g = t->graph;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) {
    enum cudaStreamCaptureMode was = mode;
    mode = *m, *m = was;
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { *n = 1; return cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) { *e = (cudaGraphExec_t)malloc(8); return cudaSuccess; }

struct CUevent_st { int flags; };
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = (cudaEvent_t)calloc(1, 16); return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 0.01f; return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *x) { f(x); return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *x, unsigned n) { f(s, cudaSuccess, x); return cudaSuccess; }

/* -- pools of cudaMallocAsync ---------------------------------------------------------------- */
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) { *p = (cudaMemPool_t)(uintptr_t)(d + 1); return cudaSuccess; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) {
    int d = (int)(uintptr_t)p - 1;
    *(uint64_t *)v = a == cudaMemPoolAttrUsedMemCurrent || a == cudaMemPoolAttrReservedMemCurrent ? taken[d] : 0;
    return cudaSuccess;
}

/* -- kernels --------------------------------------------------------------------------------- */
typedef struct kernel { const void *host; const char *name; int regs, shared, threads; unsigned launches; } kernel;
static kernel *kernels;
static size_t kernel_count, kernel_room;

static size_t slot(const void *h) { return ((uintptr_t)h * 0x9E3779B97F4A7C15ull) >> 20; }
static kernel *find(const void *h) {
    if (!kernel_room) return NULL;
    for (size_t i = slot(h);; i++) {
        kernel *k = &kernels[i & (kernel_room - 1)];
        if (!k->host) return NULL;
        if (k->host == h) return k;
    }
}
static void put(kernel k) {
    size_t i = slot(k.host);
    while (kernels[i & (kernel_room - 1)].host) i++;
    kernels[i & (kernel_room - 1)] = k;
}
void **__cudaRegisterFatBinary(void *image) { return calloc(1, 8); }
void __cudaRegisterFatBinaryEnd(void **h) {}
void __cudaUnregisterFatBinary(void **h) {}
char __cudaInitModule(void **h) { return 1; }
void __cudaRegisterFunction(void **h, const char *host, char *dev, const char *name, int limit, void *a, void *b, void *c, void *d, int *w) {
    pthread_mutex_lock(&lock);
    if (2 * (kernel_count + 1) > kernel_room) {
        kernel *old = kernels;
        size_t n = kernel_room;
        kernel_room = n ? 2 * n : 65536;
        kernels = calloc(kernel_room, sizeof *kernels);
        for (size_t i = 0; i < n; i++) if (old[i].host) put(old[i]);
        free(old);
    }
    put((kernel){host, name, 0, 0, 0, 0});
    kernel_count++;
    pthread_mutex_unlock(&lock);
}
typedef struct variable { const void *host; size_t size; void *at; struct variable *next; } variable;
static variable *variables;
void __cudaRegisterVar(void **h, char *host, char *dev, const char *name, int ext, size_t size, int c, int g) {
    variable *v = malloc(sizeof *v);
    *v = (variable){host, size, NULL, variables};
    variables = v;
}
cudaError_t cudaGetSymbolAddress(void **out, const void *host) {
    for (variable *v = variables; v; v = v->next)
        if (v->host == host) {
            if (!v->at) v->at = calloc(1, v->size + 16);
            *out = v->at;
            return cudaSuccess;
        }
    return fail(cudaErrorInvalidSymbol);
}
cudaError_t cudaMemcpyToSymbol(const void *s, const void *from, size_t n, size_t off, enum cudaMemcpyKind k) {
    void *at;
    cudaError_t e = cudaGetSymbolAddress(&at, s);
    return e ? e : copy((char *)at + off, from, n);
}
cudaError_t cudaMemcpyToSymbolAsync(const void *s, const void *f, size_t n, size_t o, enum cudaMemcpyKind k, cudaStream_t t) { return cudaMemcpyToSymbol(s, f, n, o, k); }

static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } call;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t sh, struct CUstream_st *s) {
    call.grid = g, call.block = b, call.shared = sh, call.stream = s;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *sh, void *s) {
    *g = call.grid, *b = call.block, *sh = call.shared, *(cudaStream_t *)s = call.stream;
    return cudaSuccess;
}
static cudaError_t launch(const void *f, dim3 g, dim3 b, size_t shared, cudaStream_t s) {
    kernel *k = find(f);
    touch();
    if (k) k->launches++;
    /* what the driver refuses: a program that asks for this would fail on the GPU as well */
    if (!g.x || !g.y || !g.z || !b.x || !b.y || !b.z || g.y > 65535 || g.z > 65535 ||
        (size_t)b.x * b.y * b.z > 1024 || shared > (size_t)gpu.block_shared)
        return fail(cudaErrorInvalidConfiguration);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t sh, cudaStream_t s) { return launch(f, g, b, sh, s); }
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t sh, cudaStream_t s) { return launch(f, g, b, sh, s); }
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return cudaSuccess; }
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t sh, cudaStream_t s) { return launch(k, g, b, sh, s); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) {
    return launch(f, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
}
cudaError_t cudaGetFuncBySymbol(cudaFunction_t *out, const void *f) { *out = (cudaFunction_t)f; return cudaSuccess; }

static void resources(const void *f, int *regs, int *shared, int *threads) {
    kernel *k = find(f);
    if (k && !k->threads) stand_in_resources(k->name, &k->regs, &k->shared, &k->threads);
    *regs = k && k->regs ? k->regs : 32;
    *shared = k ? k->shared : 0;
    *threads = k && k->threads ? k->threads : 1024;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a);
    int shared;
    resources(f, &a->numRegs, &shared, &a->maxThreadsPerBlock);
    a->sharedSizeBytes = shared;
    a->ptxVersion = a->binaryVersion = gpu.binary;
    a->maxDynamicSharedSizeBytes = 48 << 10;
    a->preferredShmemCarveout = -1;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t dynamic, unsigned flags) {
    int regs, shared, threads;
    resources(f, &regs, &shared, &threads);
    int warps = (block + 31) / 32;
    int by_warps = gpu.threads / 32 / warps;
    int per_warp = (regs * 32 + 255) / 256 * 256;
    int by_regs = 65536 / per_warp / 4 * 4 / warps;
    size_t sh = shared + dynamic + (gpu.major >= 8 ? 1024 : 0);
    sh = (sh + 127) / 128 * 128;
    int by_shared = sh ? gpu.sm_shared / sh : gpu.blocks;
    int least = gpu.blocks;
    if (by_warps < least) least = by_warps;
    if (by_regs < least) least = by_regs;
    if (by_shared < least) least = by_shared;
    *n = least;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t dynamic) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, block, dynamic, 0);
}

/* -- the driver's functions that torch asks the runtime for ----------------------------------- */
static cudaError_t entry(const char *symbol, void **out, enum cudaDriverEntryPointQueryResult *status) {
    *out = stand_in_driver(symbol);
    if (status) *status = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned v, unsigned long long f,
                                             enum cudaDriverEntryPointQueryResult *status) { return entry(symbol, out, status); }
#if CUDART_VERSION < 13000
#undef cudaGetDriverEntryPoint
cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **out, unsigned long long f,
                                    enum cudaDriverEntryPointQueryResult *status) { return entry(symbol, out, status); }
#endif

/* -- refused --------------------------------------------------------------------------------- */
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) { return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned f) { return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) { return fail(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h) { return fail(cudaErrorNotSupported); }

/* -- for tests: which kernels ran ------------------------------------------------------------- */
void stand_in_launches(const char *path) {
    FILE *f = fopen(path, "w");
    if (!f) return;
    for (size_t i = 0; i < kernel_room; i++)
        if (kernels[i].host && kernels[i].launches) fprintf(f, "%u %s\n", kernels[i].launches, kernels[i].name);
    fclose(f);
}
