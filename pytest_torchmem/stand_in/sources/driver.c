/* The functions of the driver that torch itself asks for: contexts, and the virtual memory of
 * expandable segments. NVIDIA's own libraries find nothing here that they could work with. */
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "stand_in.h"

#define GRAIN ((size_t)2 << 20)
typedef struct range { char *at; size_t size; struct range *next; } range;
static range *reserved;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int stand_in_mapped_device(const void *p) {
    for (range *r = reserved; r; r = r->next)
        if ((char *)p >= r->at && (char *)p < r->at + r->size) return 0;
    return -1;
}

#define API __attribute__((visibility("default"))) CUresult
static CUcontext context;
API cuCtxGetCurrent(CUcontext *c) { *c = context ? context : stand_in_initialised(stand_in_current()) ? (CUcontext)(uintptr_t)0x1000 : NULL; return CUDA_SUCCESS; }
API cuCtxSetCurrent(CUcontext c) { context = c; return CUDA_SUCCESS; }
API cuDeviceGet(CUdevice *d, int n) { *d = n; return CUDA_SUCCESS; }
API cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *active) { *f = 0, *active = stand_in_initialised(d); return CUDA_SUCCESS; }
API cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = context = (CUcontext)(uintptr_t)0x1000; return CUDA_SUCCESS; }
int cudaDeviceGetAttribute(int *, int, int);
API cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { return cudaDeviceGetAttribute(v, a, d); }
API cuGetErrorString(CUresult r, const char **s) { *s = r ? "an error of the stand-in" : "no error"; return CUDA_SUCCESS; }

API cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) { *g = GRAIN; return CUDA_SUCCESS; }
API cuMemAddressReserve(CUdeviceptr *out, size_t n, size_t align, CUdeviceptr hint, unsigned long long f) {
    char *p = mmap(NULL, n + GRAIN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    p = (char *)(((uintptr_t)p + GRAIN - 1) & ~(GRAIN - 1));
    range *r = malloc(sizeof *r);
    pthread_mutex_lock(&lock);
    *r = (range){p, n, reserved};
    reserved = r;
    pthread_mutex_unlock(&lock);
    *out = (CUdeviceptr)p;
    return CUDA_SUCCESS;
}
API cuMemAddressFree(CUdeviceptr p, size_t n) {
    pthread_mutex_lock(&lock);
    for (range **r = &reserved; *r; r = &(*r)->next)
        if ((*r)->at == (char *)p) { range *x = *r; *r = x->next; munmap(x->at, x->size); free(x); break; }
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
struct piece { size_t size; int device; };
API cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *p, unsigned long long f) {
    if (!stand_in_account(p->location.id, n)) return CUDA_ERROR_OUT_OF_MEMORY;
    struct piece *x = malloc(sizeof *x);
    x->size = n, x->device = p->location.id;
    *h = (CUmemGenericAllocationHandle)(uintptr_t)x;
    return CUDA_SUCCESS;
}
API cuMemRelease(CUmemGenericAllocationHandle h) {
    struct piece *x = (void *)(uintptr_t)h;
    stand_in_account(x->device, -(long)x->size);
    free(x);
    return CUDA_SUCCESS;
}
API cuMemMap(CUdeviceptr p, size_t n, size_t off, CUmemGenericAllocationHandle h, unsigned long long f) {
    return mprotect((void *)p, n, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
API cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *d, size_t c) { return CUDA_SUCCESS; }
API cuMemUnmap(CUdeviceptr p, size_t n) {
    madvise((void *)p, n, MADV_DONTNEED);
    return mprotect((void *)p, n, PROT_NONE) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

int cudaDriverGetVersion(int *);
API cuDriverGetVersion(int *v) { return cudaDriverGetVersion(v); }

/* What Triton asks for to load and start its kernels, which do nothing. */
API cuCtxGetDevice(CUdevice *d) { *d = stand_in_current(); return CUDA_SUCCESS; }
API cuCtxGetLimit(size_t *n, CUlimit l) { *n = 0; return CUDA_SUCCESS; }
API cuCtxSetLimit(CUlimit l, size_t n) { return CUDA_SUCCESS; }
API cuModuleUnload(CUmodule m) { return CUDA_SUCCESS; }
API cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return CUDA_SUCCESS; }
API cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return CUDA_SUCCESS; }
API cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) { *(CUdeviceptr *)v = p; return CUDA_SUCCESS; }
API cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **given, void **extra) { return CUDA_SUCCESS; }
API cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) { *v = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; return CUDA_SUCCESS; }
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int block, size_t shared) { *n = 2048 / block; return CUDA_SUCCESS; }

#undef cuMemGetAddressRange
API cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr p) {
    for (range *r = reserved; r; r = r->next)
        if ((char *)p >= r->at && (char *)p < r->at + r->size) { *base = (CUdeviceptr)r->at, *size = r->size; return CUDA_SUCCESS; }
    return CUDA_ERROR_NOT_FOUND;
}
static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }

void *stand_in_driver(const char *symbol) {
#define GIVE(name) if (!strcmp(symbol, #name)) return (void *)name
    GIVE(cuCtxGetCurrent); GIVE(cuCtxSetCurrent); GIVE(cuDeviceGet); GIVE(cuDeviceGetAttribute);
    GIVE(cuDevicePrimaryCtxGetState); GIVE(cuDevicePrimaryCtxRetain); GIVE(cuGetErrorString);
    GIVE(cuMemGetAllocationGranularity); GIVE(cuMemAddressReserve); GIVE(cuMemAddressFree);
    GIVE(cuMemCreate); GIVE(cuMemRelease); GIVE(cuMemMap); GIVE(cuMemSetAccess); GIVE(cuMemUnmap);
    GIVE(cuMemGetAddressRange);
    stand_in_note(symbol); /* torch wants some of them to be there before it uses any */
    return (void *)not_supported;
}

/* NVML, as far as torch asks: how many devices, and whether they are in a fabric */
__attribute__((visibility("default"))) int nvmlInit(void) { return 0; }
__attribute__((visibility("default"))) int nvmlInit_v2(void) { return 0; }
__attribute__((visibility("default"))) int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **d) { *d = (void *)0x10; return 0; }
__attribute__((visibility("default"))) int nvmlDeviceGetGpuFabricInfoV(void *d, void *info) { return 0; /* its state stays 0: not supported */ }
__attribute__((visibility("default"))) int nvmlDeviceGetNvLinkRemoteDeviceType(void *d, unsigned l, int *t) { return 3; }
__attribute__((visibility("default"))) int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *d, unsigned l, void *t) { return 3; }
__attribute__((visibility("default"))) int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, void *t) { *n = 0; return 0; }
__attribute__((visibility("default"))) int nvmlDeviceGetCount_v2(unsigned *n) { const char *v = getenv("STAND_IN_DEVICES"); *n = v ? atoi(v) : 1; return 0; }
__attribute__((visibility("default"))) int nvmlSystemGetCudaDriverVersion_v2(int *v) { { const char *n = getenv("STAND_IN_RUNTIME"); *v = n ? atoi(n) : 0; } return 0; }
