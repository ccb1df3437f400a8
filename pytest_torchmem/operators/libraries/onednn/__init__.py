"""oneDNN on the CPU: which kernel it takes, how that wants its operands, and its scratchpad.

Read off oneDNN 3.12, which torch 2.13 bundles, for the machines that it calls ``avx512_core`` and,
in bfloat16, ``avx512_core_bf16``; without AMX. Modules are named after the source files that they
follow. What 3.10, 3.11 and 3.13 do otherwise asks the host for its version.

Families import these modules where a call asks for them: the first trace of a process, which
imports all families, is quicker without.
"""
