/* Functions of CUDA's libraries whose answers torch reads; build.py writes those that do nothing. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "stand_in.h"
#define API __attribute__((visibility("default")))

/* cuBLAS: torch allocates the workspaces itself */
API int cublasGetMathMode(void *h, int *m) { *m = 0; return 0; }
API int cublasGetPointerMode_v2(void *h, int *m) { *m = 0; return 0; }
API size_t cublasLtGetVersion(void) { return 130100; }
API const char *cublasGetStatusString(int s) { return "a status of the stand-in"; }
API const char *cublasLtGetStatusString(int s) { return "a status of the stand-in"; }
/* cublasLtMatmulHeuristicResult_t: an algorithm of 64 bytes, workspace, state, waves, reserved */
struct heuristic { uint64_t algo[8]; size_t workspace; int state; float waves; int reserved[4]; };
API int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d, void *p, int asked, struct heuristic *r, int *n) {
    stand_in_note("cublasLtMatmulAlgoGetHeuristic");
    for (int i = 0; i < asked; i++) memset(&r[i], 0, sizeof r[i]), r[i].waves = 1;
    *n = asked > 0;
    return 0;
}

/* cuFFT: handles are ints */
API int cufftCreate(int *h) { static int n; *h = ++n; return 0; }
API int cufftXtMakePlanMany(int h, int rank, void *n, void *ie, long is, long id, int it, void *oe, long os, long od, int ot, long batch, size_t *work, int et) {
    stand_in_note("cufftXtMakePlanMany");
    *work = 0;
    return 0;
}

/* cuSPARSE, cuSOLVER: words */
API const char *cusparseGetErrorString(int s) { return "a status of the stand-in"; }

/* cuDNN */
API size_t cudnnGetVersion(void) { return strtoull(getenv("STAND_IN_CUDNN"), NULL, 10); }
API size_t cudnnGetCudartVersion(void) { return 13000; }
API int cudnnGetProperty(int t, int *v) { size_t n = cudnnGetVersion(); *v = t == 0 ? n / 10000 : t == 1 ? n / 100 % 100 : n % 100; return 0; }
/* Its recurrent layers describe their weights by descriptors that only cuDNN can write. */
#define NOT_SUPPORTED 3000
API int cudnnCreateRNNDescriptor(void **d) { stand_in_note(__func__); return NOT_SUPPORTED; }
API const char *cudnnGetErrorString(int s) {
    return s == NOT_SUPPORTED ? "the stand-in runs no recurrent layers of cuDNN, and no convolutions where it is not installed: set torch.backends.cudnn.enabled = False"
                             : "a status of the stand-in";
}
API void cudnnGetLastErrorString(char *s, size_t n) { if (n) *s = 0; }
API int cudnnDropoutGetStatesSize(void *h, size_t *n) { stand_in_note("cudnnDropoutGetStatesSize"); *n = 0; return 0; }
API int cudnnGetRNNTempSpaceSizes(void *h, void *d, int m, void *x, size_t *w, size_t *r) { stand_in_note("cudnnGetRNNTempSpaceSizes"); if (w) *w = 0; if (r) *r = 0; return 0; }
API int cudnnGetRNNWeightSpaceSize(void *h, void *d, size_t *n) { stand_in_note("cudnnGetRNNWeightSpaceSize"); *n = 0; return 0; }
API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(void *h, int m, int o, void *x, void *z, void *y, void *b, void *a, size_t *n) { stand_in_note(__func__); *n = 0; return 0; }
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(void *h, int m, int o, void *x, void *y, void *dy, void *dz, void *dx, void *b, void *a, size_t *n) { stand_in_note(__func__); *n = 0; return 0; }
API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int m, int o, void *a, void *x, size_t *n) { stand_in_note(__func__); *n = 0; return 0; }
API int cudnnGetCTCLossWorkspaceSize(void *h, void *p, void *g, void *l, void *ll, void *il, int a, void *d, size_t *n) { stand_in_note(__func__); *n = 0; return 0; }
API int cudnnGetCTCLossWorkspaceSize_v8(void *h, int a, void *d, void *p, void *g, size_t *n) { stand_in_note(__func__); *n = 0; return 0; }

/* NCCL: a world of one, or ranks that are never reached */
API const char *ncclGetErrorString(int s) { return "a status of the stand-in"; }
API const char *ncclGetLastError(void *c) { return ""; }
API int ncclGetVersion(int *v) { *v = 22907; return 0; }
static struct { int rank, size; } comms[64];
static int comm_count;
static void *comm(int size, int rank) { int i = comm_count++ % 64; comms[i].rank = rank, comms[i].size = size; return &comms[i]; }
struct id { char bytes[128]; };
API int ncclCommInitRank(void **c, int n, struct id i, int r) { *c = comm(n, r); return 0; }
API int ncclCommInitRankConfig(void **c, int n, struct id i, int r, void *f) { *c = comm(n, r); return 0; }
API int ncclCommInitRankScalable(void **c, int n, int r, int k, void *i, void *f) { *c = comm(n, r); return 0; }
API int ncclCommInitAll(void **c, int n, void *d) { for (int i = 0; i < n; i++) c[i] = comm(n, i); return 0; }
API int ncclCommSplit(void *p, int color, int key, void **c, void *f) { *c = comm(comms[0].size, key); return 0; }
API int ncclCommCount(void *c, int *n) { *n = ((int *)c)[1]; return 0; }
API int ncclCommUserRank(void *c, int *n) { *n = ((int *)c)[0]; return 0; }
API int ncclCommGetAsyncError(void *c, int *e) { *e = 0; return 0; }

/* NVRTC: compiles nothing */
API int nvrtcVersion(int *a, int *b) { *a = 13, *b = 0; return 0; }
API const char *nvrtcGetErrorString(int s) { return "a status of the stand-in"; }
API int nvrtcGetProgramLogSize(void *p, size_t *n) { *n = 1; return 0; }
API int nvrtcGetPTXSize(void *p, size_t *n) { *n = 1; return 0; }
API int nvrtcGetCUBINSize(void *p, size_t *n) { *n = 1; return 0; }
API int nvrtcGetLoweredName(void *p, const char *name, const char **out) { *out = name; return 0; }

/* CUPTI */
API int cuptiGetVersion(uint32_t *v) { *v = 130000; return 0; }
API int cuptiGetResultString(int r, const char **s) { *s = "a status of the stand-in"; return 0; }

/* the driver's modules, for kernels that torch compiles at run time */
#define HANDLE(name) API int name(void **out) { *out = malloc(16); return 0; }
HANDLE(cuModuleLoad)
HANDLE(cuModuleLoadData)
HANDLE(cuModuleLoadDataEx)
HANDLE(cuModuleGetFunction)
/* a graph's nodes cannot be written by hand */
API int cudaGraphAddNode(void) { return 801; }
