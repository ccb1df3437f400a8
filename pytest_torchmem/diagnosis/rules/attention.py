"""Causes in attention: another implementation takes a call, or a cache is kept."""

from __future__ import annotations

from pytest_torchmem.diagnosis.causes import Cause, Evidence, cause, rule
from pytest_torchmem.diagnosis.rules.types import wider_type
from pytest_torchmem.profile.facts import OPERATORS
from pytest_torchmem.profile.lifetimes import Role
from pytest_torchmem.profile.module_paths import fold
from pytest_torchmem.profile.timeline import Allocation

_KERNELS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN",
}
"""The operators of fused attention, by what they are called."""
_MASK = 3
"""The place of their mask, after queries, keys and values (native_functions.yaml)."""
_ORDER = ("flash", "cuDNN", "memory-efficient")
_OF_TYPE = ": the dtype is "
_SOFTMAX = ("aten::_safe_softmax", "aten::_softmax")


@rule("attention", "attention fell from {before} to {now}{reason}", sure=True)
def attention_fell(evidence: Evidence) -> Cause | None:
    """A call of attention that a fused kernel took takes another way, which keeps more."""
    alive = evidence.before.alive
    if alive is None:
        return None
    kernels = {_KERNELS[g.what.source] for g in alive.groups if g.what.source in _KERNELS}
    if evidence.before.facts.get(OPERATORS):  # what is called as often: the softmax is another one
        counts = evidence.counts()
        kernels = {_KERNELS[name] for name, one in counts.items() if name in _KERNELS and one.fell}
    before = next((name for name in _ORDER if name in kernels), "")
    if not before:
        return None
    for row in evidence.came():
        source = row.what.source.partition(".")[0]
        is_math = source in _SOFTMAX and row.what.dtype
        now = "math" if is_math else _KERNELS.get(source, "")
        if not now or now == before:
            continue
        at_line = [
            one
            for one in evidence.came()
            if one.what.line == row.what.line and one.what.module == row.what.module
        ]
        if source == "aten::_softmax":  # math is ``_safe_softmax``; attention.cpp
            now = "eager, a softmax of its own"
        reason = _reason(evidence, row.what.line)
        if reason.startswith(_OF_TYPE) and wider_type(evidence) is not None:
            return None  # which says why it is given that type
        return cause("attention", at_line, row, before=before, now=now, reason=reason)
    return _by_calls(evidence)


def _by_calls(evidence: Evidence) -> Cause | None:
    """Return that another kernel is called, where it grew what is beside it, such as a mask."""
    counts = evidence.counts()
    fewer = {_KERNELS[name] for name, one in counts.items() if name in _KERNELS and one.fell}
    before = next((name for name in _ORDER if name in fewer), "")
    operators = [name for name, one in counts.items() if name in _KERNELS and one.rose]
    operators += [name for name in _SOFTMAX[:1] if name in counts and counts[name].rose]
    if not before or not operators:
        return None
    places = list(evidence.ran.places(operators[0]))
    modules, lines = {fold(one.module)[0] for one in places}, {one.line for one in places}
    rows = [row for row in evidence.came() if row.what.module in modules or row.what.line in lines]
    reason = next((found for line in sorted(lines) if (found := _reason(evidence, line))), "")
    now = _KERNELS.get(operators[0], "math")
    return cause("attention", rows, before=before, now=now, reason=reason)


def is_of_mask(evidence: Evidence, one: Allocation) -> bool:
    """Tell whether attention is given a tensor as its mask, or what was computed of it."""
    masks = dict.fromkeys(evidence.ran.given_as(_MASK, _KERNELS))
    return any(
        evidence.ran.allocation(index) is one
        for mask in masks
        for index in (mask, *evidence.ran.ancestors(mask))
    )


def _reason(evidence: Evidence, line: str) -> str:
    reason = evidence.watched.attention.get(line, "")
    return f": {reason}" if reason else ""


@rule("cache", "a cache of keys and values is kept in training")
def cache_kept(evidence: Evidence) -> Cause | None:
    """Keys and values of each layer are joined to those of a cache, which keeps them.

    Two that are alike in each module that has attention: a skip connection joins tensors, too.
    """
    attends = {
        group.what.module
        for group in evidence.alive.groups
        if group.what.source in _KERNELS or group.what.source.partition(".")[0] in _SOFTMAX
    }
    rows = [
        row
        for row in evidence.came(Role.SAVED, Role.HELD, Role.ACTIVATION)
        if row.what.source.startswith("aten::cat")
        and len(row.what.shape) in (3, 4)
        and row.what.module in attends
    ]
    joined = evidence.counted("aten::cat")
    if joined is not None and not joined.rose:
        return None  # there was a cache before
    alike = {(row.what.module, row.what.shape): 0 for row in rows}
    for row in rows:
        alike[row.what.module, row.what.shape] += row.count_now
    rows = [row for row in rows if alike[row.what.module, row.what.shape] % 2 == 0]
    return cause("cache", rows)
