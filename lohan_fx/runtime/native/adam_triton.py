"""The Triton kernel of `adam_cuda`, apart because importing it needs Triton."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def adam(
    master,
    exp_avg,
    exp_avg_sq,
    gradient,
    copy,
    size,
    decay,
    weight_decay,
    sign,
    lerp,
    beta2,
    rest2,
    root,
    eps,
    step_size,
    factor,
    limit,
    COPIES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One parameter; a program updates BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    p = tl.load(master + at, mask=inside)
    g = tl.load(gradient + at, mask=inside).to(tl.float32) * factor
    g = tl.where(g < -limit, -limit, tl.where(g > limit, limit, g))  # a NaN stays one
    g = g * sign + p * weight_decay
    m = tl.load(exp_avg + at, mask=inside)
    v = tl.load(exp_avg_sq + at, mask=inside)
    m = m + lerp * (g - m)
    v = beta2 * v + rest2 * g * g
    p = p * decay + step_size * m / (tl.sqrt(v) / root + eps)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    tl.store(master + at, p, mask=inside)
    if COPIES:
        tl.store(copy + at, p.to(copy.dtype.element_ty), mask=inside)
