"""oneDNN on the CPU: which kernel it takes, how that wants its operands, and its scratchpad.

Read off oneDNN 3.12, which torch 2.13 bundles, for the AVX512 machines it calls ``avx512_core``
and, in bfloat16, ``avx512_core_bf16``; without AMX.
"""
