"""Functions of CUDA that do nothing, written in C for the names that the sources do not define.

A function that would write a size or a count writes 0, and one that creates a handle makes one.
Where a caller reads such an answer it is noted (``notes.c``), because the real library might have
given another.
"""

from __future__ import annotations

import re

#: Where sizes and counts are written, by the documented signatures: argument and bytes.
_WRITES: tuple[tuple[str, dict[int, int]], ...] = (
    (r"cusolverDn[SDCZ](getrf|potrf|geqrf)_bufferSize", {5: 4}),
    (r"cusolverDn[SDCZ](orgqr|ungqr|syevd|heevd|syevjBatched|heevjBatched)_bufferSize", {7: 4}),
    (r"cusolverDn[SDCZ](ormqr|unmqr|gesvdjBatched)_bufferSize", {11: 4}),
    (r"cusolverDn[SDCZ]sytrf_bufferSize", {4: 4}),
    (r"cusolverDn[SDCZ]gesvd_bufferSize", {3: 4}),
    (r"cusolverDn[SDCZ]gesvdj_bufferSize", {12: 4}),
    (r"cusolverDn[SDCZ]gesvdaStridedBatched_bufferSize", {16: 4}),
    (r"cusolverDnX(sytrs|syevd|syevBatched)_bufferSize", {11: 8, 12: 8}),
    (r"cusolverDnXpotrf_bufferSize", {8: 8, 9: 8}),
    (r"cusolverDnXgetrf_bufferSize", {8: 8, 9: 8}),
    (r"cusolverDnXgeqrf_bufferSize", {10: 8, 11: 8}),
    (r"cusolverDnXgeev_bufferSize", {17: 8, 18: 8}),
    (r"cusparseXbsrs[vm]2_zeroPivot", {2: 4}),
    (r"cusparse.bsrsv2_bufferSize", {11: 4}),
    (r"cusparse.bsrsm2_bufferSize", {13: 4}),
    (r"cusparse.csrgeam2_bufferSizeExt", {19: 8}),
    (r"cusparseXcsrgeam2Nnz", {13: 4}),
    (r"cusparseX(coo|csr)sort_bufferSizeExt", {6: 8}),
    (r"cusparseSpMatGetSize", {1: 8, 2: 8, 3: 8}),
    (r"cusparse(SpMV|SpSV)_bufferSize", {9: 8}),
    (r"cusparse(SpSM|SpMM|SDDMM)_bufferSize", {10: 8}),
    (r"cusparseSpGEMM_workEstimation|cusparseSpGEMM_compute", {9: 8}),
    (r"cusparseLtMatmulGetWorkspace", {2: 8}),
    (r"cusparseLtSpMMACompressedSize2", {2: 8, 3: 8}),
    (r"cudnnGetConvolution\w+WorkspaceSize", {6: 8}),
)
_CREATES = re.compile(
    r"Create(?!dBy)|^ncclCommRegister$|cusparseSpGEMM_createDescr|cusparseSp\w+_createDescr|RedOpCreate"
)
_CREATES_NOTHING = re.compile(r"ncclDevCommCreate|cudaGraph\w+")
#: What has no answer that a caller reads.
_QUIET = re.compile(
    r"cublas(Set|Create|Destroy|Lt\w+(Create|Destroy|SetAttribute))|cudaFuncSet|cupti"
    r"|cudnn(Create|Destroy|Set)|cuda(Event|Stream|Profiler|Graph)|nvrtc|nccl(Group|Comm)"
    r"|cusparse(Create|Destroy|Set)|cusolverDn(Create|Destroy|Set)|cufft(Set|Destroy)"
)
_ARGUMENTS = ", ".join(f"char *a{number}" for number in range(20))


def function(name: str) -> str:
    """Return the definition of a function that does nothing and returns success."""
    writes = next((where for pattern, where in _WRITES if re.fullmatch(pattern, name)), {})
    body = "" if _QUIET.match(name) else f'stand_in_note("{name}"); '
    for argument, nbytes in writes.items():
        kind = "int" if nbytes == 4 else "long"
        body += f"if (a{argument}) *({kind} *)a{argument} = 0; "
    if _CREATES.search(name) and not _CREATES_NOTHING.fullmatch(name):
        body += "*(void **)a0 = malloc(512); "
    return f"long {name}({_ARGUMENTS}) {{ {body}return 0; }}\n"
