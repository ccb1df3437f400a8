/* The process that has cuDNN: cudnn LIBRARY DESCRIPTION; calls arrive on file 3. It holds no torch. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "cudnn_wire.h"
typedef void *D;
static int (*create)(int, D *), (*destroy)(D), (*set)(D, int, int, int64_t, const void *), (*finalize)(D), (*get)(D, int, int, int64_t, int64_t *, void *);
static int all(int out, void *p, size_t n) {
    for (char *c = p; n;) {
        ssize_t k = out ? write(3, c, n) : read(3, c, n);
        if (k <= 0) exit(0);
        c += k, n -= k;
    }
    return 1;
}
int main(int argc, char **argv) {
    void *lib = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
    if (!lib) { fprintf(stderr, "%s\n", dlerror()); return 1; }
    create = dlsym(lib, "cudnnBackendCreateDescriptor"), destroy = dlsym(lib, "cudnnBackendDestroyDescriptor");
    set = dlsym(lib, "cudnnBackendSetAttribute"), finalize = dlsym(lib, "cudnnBackendFinalize"), get = dlsym(lib, "cudnnBackendGetAttribute");
    D device = NULL;
    int e = create(38, &device);
    if (!e) e = set(device, 2702, 24, strlen(argv[2]) + 1, argv[2]);
    if (!e) e = finalize(device);
    if (e) fprintf(stderr, "cuDNN refuses the description of the GPU: %d\n", e);
    for (struct question q;;) {
        all(0, &q, sizeof q);
        char *p = calloc(1, q.bytes + 64);
        if (q.bytes) all(0, p, q.bytes);
        D d = (D)q.descriptor, made = NULL;
        struct reply r = {0};
        switch (q.op) {
        case CREATE: r.status = create(q.name, &made); r.descriptor = (int64_t)made; break;
        case DESTROY: r.status = destroy(d); break;
        case SET: r.status = set(d, q.name, q.type, q.count, p); break;
        case FINALIZE: /* heuristics and plans, which had a handle */
            if (q.name == 4) set(d, 204, 15, 1, &device);
            if (q.name == 5) set(d, 407, 15, 1, &device);
            r.status = finalize(d);
            break;
        case GET: r.status = get(d, q.name, q.type, q.count, &r.count, q.bytes ? p : NULL); r.bytes = q.bytes; break;
        }
        if (getenv("STAND_IN_CUDNN_LOG") && (r.status || q.op == FINALIZE))
            fprintf(stderr, "cudnn op %ld name %ld type %ld count %ld -> %ld\n", q.op, q.name, q.type, q.count, r.status);
        all(1, &r, sizeof r);
        if (r.bytes) all(1, p, r.bytes);
        free(p);
    }
}
