"""
Linear attention in chunks, by kernels of its own in Triton that are tuned over configurations for each of several shapes.

    python linear_attention.py [CONFIGURATIONS]

There are 20 of them, unless fewer are asked for.

For each chunk: what the chunks before it left (a matrix of keys times values), and attention within it. The backward runs the same two
kernels with other arguments, and a third one.
"""

import sys

import torch
import triton
import triton.language as tl
from torch import nn

CHUNK = 64
CONFIGS = [
    triton.Config({"BK": keys, "BV": values}, num_warps=warps, num_stages=stages)
    for keys in (32, 64)
    for values in (32, 64)
    for warps, stages in ((2, 2), (2, 3), (4, 2), (4, 3), (8, 2))
][: int(sys.argv[1]) if sys.argv[1:] else None]


@triton.jit
def block(base, rows, width, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # noqa: N803
    """Return addresses of a block of a matrix, and which of them are in it."""
    r, c = row + tl.arange(0, ROWS)[:, None], column + tl.arange(0, COLUMNS)[None, :]
    return base + r * width + c, (r < rows) & (c < width)


@triton.autotune(CONFIGS, key=["T", "K", "V"])
@triton.jit
def states(k, v, h, T, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # noqa: N803
    """Write into *h*, for each chunk, the sum of keys times values of the chunks before it."""
    at_k, at_v, sample = tl.program_id(0) * BK, tl.program_id(1) * BV, tl.program_id(2).to(tl.int64)
    chunks = tl.cdiv(T, C)
    state = tl.zeros([BK, BV], tl.float32)
    for chunk in range(chunks):
        ph, mh = block(h + (sample * chunks + chunk) * K * V, K, V, at_k, at_v, BK, BV)
        tl.store(ph, state.to(h.dtype.element_ty), mask=mh)
        pk, mk = block(k + sample * T * K, T, K, chunk * C, at_k, C, BK)
        pv, mv = block(v + sample * T * V, T, V, chunk * C, at_v, C, BV)
        state += tl.dot(tl.trans(tl.load(pk, mask=mk, other=0.0)), tl.load(pv, mask=mv, other=0.0))


@triton.autotune(CONFIGS, key=["T", "K", "V"])
@triton.jit
def outputs(q, k, v, h, o, T, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # noqa: N803
    """Write into *o* what queries find in the state, and in their own chunk."""
    at_v, chunk, sample = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2).to(tl.int64)
    found, scores = tl.zeros([C, BV], tl.float32), tl.zeros([C, C], tl.float32)
    for at_k in range(0, K, BK):
        pq, mq = block(q + sample * T * K, T, K, chunk * C, at_k, C, BK)
        pk, mk = block(k + sample * T * K, T, K, chunk * C, at_k, C, BK)
        ph, mh = block(h + (sample * tl.cdiv(T, C) + chunk) * K * V, K, V, at_k, at_v, BK, BV)
        queries = tl.load(pq, mask=mq, other=0.0)
        found += tl.dot(queries, tl.load(ph, mask=mh, other=0.0))
        scores += tl.dot(queries, tl.trans(tl.load(pk, mask=mk, other=0.0)))
    rows = tl.arange(0, C)
    scores = tl.where(rows[:, None] >= rows[None, :], scores, 0.0)
    pv, mv = block(v + sample * T * V, T, V, chunk * C, at_v, C, BV)
    values = tl.load(pv, mask=mv, other=0.0)
    po, mo = block(o + sample * T * V, T, V, chunk * C, at_v, C, BV)
    tl.store(po, (found + tl.dot(scores.to(values.dtype), values)).to(o.dtype.element_ty), mask=mo)


@triton.autotune(CONFIGS, key=["T", "K", "V"])
@triton.jit
def gradients(q, k, v, h, do, dh, dq, dk, T, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # noqa: N803
    """Write the gradients of queries and keys."""
    at_k, chunk, sample = tl.program_id(0) * BK, tl.program_id(1), tl.program_id(2).to(tl.int64)
    of_q, of_k, scores = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([C, C], tl.float32)
    for at_v in range(0, V, BV):
        pv, mv = block(v + sample * T * V, T, V, chunk * C, at_v, C, BV)
        po, mo = block(do + sample * T * V, T, V, chunk * C, at_v, C, BV)
        ph, mh = block(h + (sample * tl.cdiv(T, C) + chunk) * K * V, K, V, at_k, at_v, BK, BV)
        pd, md = block(dh + (sample * tl.cdiv(T, C) + chunk) * K * V, K, V, at_k, at_v, BK, BV)
        values, given = tl.load(pv, mask=mv, other=0.0), tl.load(po, mask=mo, other=0.0)
        scores += tl.dot(given, tl.trans(values))
        of_q += tl.dot(given, tl.trans(tl.load(ph, mask=mh, other=0.0)))
        of_k += tl.dot(values, tl.trans(tl.load(pd, mask=md, other=0.0)))
    rows = tl.arange(0, C)
    pq, mq = block(q + sample * T * K, T, K, chunk * C, at_k, C, BK)
    pk, _ = block(k + sample * T * K, T, K, chunk * C, at_k, C, BK)
    queries, keys = tl.load(pq, mask=mq, other=0.0), tl.load(pk, mask=mq, other=0.0)
    scores = tl.where(rows[:, None] >= rows[None, :], scores, 0.0).to(queries.dtype)
    at = (chunk * C + rows[:, None]) * K + at_k + tl.arange(0, BK)[None, :] + sample * T * K
    tl.store(dq + at, (of_q + tl.dot(scores, keys)).to(dq.dtype.element_ty), mask=mq)
    tl.store(dk + at, (of_k + tl.dot(tl.trans(scores), queries)).to(dk.dtype.element_ty), mask=mq)


def grid_of(samples, keys, values):
    """Return the grids of the three kernels but for their chunks."""
    return lambda meta: (triton.cdiv(keys, meta["BK"]), triton.cdiv(values, meta["BV"]), samples)


class LinearAttention(torch.autograd.Function):
    """Attention over samples x tokens x width."""

    @staticmethod
    def forward(context, q, k, v):
        """Return what the queries find."""
        (samples, tokens, keys), values = q.shape, v.shape[-1]
        chunks = triton.cdiv(tokens, CHUNK)
        h, o = q.new_empty(samples, chunks, keys, values), torch.empty_like(v)
        states[grid_of(samples, keys, values)](k, v, h, tokens, keys, values, CHUNK)
        outputs[lambda meta: (triton.cdiv(values, meta["BV"]), chunks, samples)](q, k, v, h, o, tokens, keys, values, CHUNK)
        context.save_for_backward(q, k, v, h)
        return o

    @staticmethod
    def backward(context, do):
        """Return the gradients."""
        q, k, v, h = context.saved_tensors
        (samples, tokens, keys), values = q.shape, v.shape[-1]
        chunks = triton.cdiv(tokens, CHUNK)
        do, dh = do.contiguous(), torch.empty_like(h)
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
        states[grid_of(samples, keys, values)](q, do, dh, tokens, keys, values, CHUNK)
        outputs[lambda meta: (triton.cdiv(values, meta["BV"]), chunks, samples)](k, q, do, dh, dv, tokens, keys, values, CHUNK)
        gradients[lambda meta: (triton.cdiv(keys, meta["BK"]), chunks, samples)](q, k, v, h, do, dh, dq, dk, tokens, keys, values, CHUNK)
        return dq, dk, dv


class Layer(nn.Module):
    """A residual layer of linear attention."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        """Return *x* with what attention found added."""
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        mixed = LinearAttention.apply(*(part.contiguous() for part in parts))
        return x + self.out(mixed.unflatten(0, (len(x), self.heads)).transpose(1, 2).flatten(2))


model = nn.Sequential(*(Layer(512, heads) for heads in (4, 4, 8, 8))).cuda().bfloat16()
optimizer = torch.optim.AdamW(model.parameters())
for tokens in (1024, 2048):
    model(torch.randn(4, tokens, 512, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
