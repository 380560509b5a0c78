"""Attention of some queries with some keys that also says how much weight it saw: output and log-sum-exp.

Shapes: q `[B, H, Lq, D]`, k `[B, K, Lk, D]`, v `[B, K, Lk, Dv]` with H a multiple of K (grouped heads, keys are never
repeated), output `[B, H, Lq, Dv]`, log-sum-exp `[B, H, Lq]`: natural logarithm, fp32 (fp64 for fp64 inputs).

Forward and backward are two plain functions. The backward takes the output and log-sum-exp of the *whole* row, not
those of the block: then P = exp(scores - lse) are the true probabilities, and the blocks' gradients add up (Liu et al.,
Ring Attention, arXiv 2310.01889; Dao, FlashAttention-2, arXiv 2307.08691, section 3.1).

| back end | where | what it takes |
|---|---|---|
| cpu_flash | CPU | fp64, fp32, bf16, fp16 |
| cuda_flash | CUDA | bf16, fp16, head sizes up to 256 |
| plain | everywhere | everything, soft-cap too; scores in fp32 or better, a few rows at a time |

Flash kernels want one head size: the smaller of D and Dv is filled up with zeros. Every row of a tile sees at least one
key (`mask.py` cuts them so): a kernel would give a row without keys the log-sum-exp 0 instead of -inf. Tiles are never
empty: the CPU kernel ends the process on an empty one. The cuda_flash back end was written from torch's schemas and
has not been run on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dtensor_5d.context.mask import Band
from dtensor_5d.context.sums import exact_dtype
from dtensor_5d.errors import PlanError, Violation

__all__ = ["BACK_ENDS", "Block", "block_for"]

BACK_ENDS = ("cpu_flash", "cuda_flash", "plain")

_SCORES = 1 << 22
"""Scores that the plain back end holds at a time: 16 MiB in fp32."""

_CUDA_HEAD = 256


def block_for(q: Tensor, v: Tensor, scale: float, softcap: float | None = None, back_end: str | None = None) -> Block:
    """The block attention for tensors like these; `back_end` forces one.

    Example: `out, lse = block_for(q, v, 0.125).forward(q, k, v, Band(None, 0))`

    Errors: `PlanError` for a forced back end that cannot take these tensors.
    """
    fits = {
        "cpu_flash": softcap is None and q.device.type == "cpu",
        "cuda_flash": softcap is None and q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16)
        and max(q.size(-1), v.size(-1)) <= _CUDA_HEAD,
        "plain": True,
    }  # fmt: skip
    if back_end is None:
        back_end = next(name for name in BACK_ENDS if fits[name])
    if not fits.get(back_end):
        asked = f"attention back end {back_end!r} for {q.dtype} on {q.device.type}, head sizes {q.size(-1)} and "
        able = ", ".join(name for name in BACK_ENDS if fits[name])
        raise PlanError(
            Violation(f"{asked}{v.size(-1)}, softcap={softcap}", f"back ends that can take this: {able}",
                      "choose one of these, or None for the fastest")
        )  # fmt: skip
    return Block(back_end, scale, softcap)


@dataclass(frozen=True)
class Block:
    """One back end with the scale of the scores and the soft-cap. Made by `block_for`."""

    back_end: str
    scale: float
    softcap: float | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        """(output, log-sum-exp) of a tile. The output is fresh, in the dtype of q or, from `plain`, fp32 or better."""
        if self.back_end == "plain":
            return self._plain_forward(q, k, v, band)
        size = v.size(-1)
        q, k, v = self._one_size(q, k, v)
        if self.back_end == "cuda_flash":
            out, lse = _cuda_forward(q, k, v, band, self.scale)
        else:
            out, lse = _cpu_forward(q, k, v, band, self.scale)
        return out[..., :size], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of a tile from the gradient, output and log-sum-exp of whole rows; dtype as in forward."""
        if self.back_end == "plain":
            return self._plain_backward(grad, q, k, v, out, lse, band)
        size, value_size = q.size(-1), v.size(-1)
        q, k, v, grad, out = self._one_size(q, k, v, grad, out)
        way = _cuda_backward if self.back_end == "cuda_flash" else _cpu_backward
        dq, dk, dv = way(grad, q, k, v, out, lse, band, self.scale)
        return dq[..., :size], dk[..., :size], dv[..., :value_size]

    def _one_size(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """All with the same head size, each head in one piece: zeros change neither scores nor outputs."""
        size = max(t.size(-1) for t in tensors)
        if self.back_end == "cuda_flash":
            size = -(-size // 8) * 8
        return tuple(_in_rows(t) if t.size(-1) == size else F.pad(t, (0, size - t.size(-1))) for t in tensors)

    def _plain_forward(self, q: Tensor, k: Tensor, v: Tensor, band: Band) -> tuple[Tensor, Tensor]:
        exact = exact_dtype(q)
        out = q.new_empty(*q.shape[:3], v.size(-1), dtype=exact)
        lse = q.new_empty(q.shape[:3], dtype=exact)
        for rows, keys, inner in _strips(q, k, band, max(1, _SCORES // max(1, q.size(0) * q.size(1) * k.size(2)))):
            scores, _ = self._scores(q[:, :, rows], k[:, :, keys], inner)
            lse[:, :, rows] = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - lse[:, :, rows].unsqueeze(-1))
            out[:, :, rows] = _by_group(weights, v[:, :, keys].to(exact))
        return out, lse

    def _plain_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band
    ) -> tuple[Tensor, Tensor, Tensor]:
        exact = exact_dtype(q)
        dq = q.new_empty(q.shape, dtype=exact)
        dk, dv = k.new_zeros(k.shape, dtype=exact), v.new_zeros(v.shape, dtype=exact)
        for rows, keys, inner in _strips(q, k, band, max(1, _SCORES // max(1, q.size(0) * q.size(1) * k.size(2)))):
            part, g = q[:, :, rows].to(exact), grad[:, :, rows].to(exact)
            scores, slope = self._scores(part, k[:, :, keys], inner)
            weights = torch.exp(scores - lse[:, :, rows].unsqueeze(-1))
            drop = (g * out[:, :, rows]).sum(-1, keepdim=True)
            d_scores = weights * (_by_group(g, v[:, :, keys].to(exact).mT) - drop) * self.scale
            if slope is not None:
                d_scores *= slope
            dq[:, :, rows] = _by_group(d_scores, k[:, :, keys].to(exact))
            dk[:, :, keys] += _over_group(d_scores, part, k.size(1))
            dv[:, :, keys] += _over_group(weights, g, k.size(1))
        return dq, dk, dv

    def _scores(self, q: Tensor, k: Tensor, band: Band) -> tuple[Tensor, Tensor | None]:
        """Scores, -inf where a key is not seen, and their slope where a soft-cap bends them."""
        exact = exact_dtype(q)
        scores = _by_group(q.to(exact), k.to(exact).mT) * self.scale
        slope = None
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores, slope = bent * self.softcap, 1 - bent.square()
        if not band.is_full:
            scores = scores.masked_fill(~_seen(q.size(2), k.size(2), band, q.device), -math.inf)
        return scores, slope


def _in_rows(x: Tensor) -> Tensor:
    # The CPU kernel takes the numbers of a head as neighbours without looking: other strides give wrong results.
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_group(x: Tensor, y: Tensor) -> Tensor:
    """[B, H, L, N] times [B, K, N, M] -> [B, H, L, M]: the heads of a group are more rows of one product."""
    b, h, length, n = x.shape
    return (x.reshape(b, y.size(1), -1, n) @ y).view(b, h, length, y.size(-1))


def _over_group(x: Tensor, y: Tensor, groups: int) -> Tensor:
    """[B, H, L, N] and [B, H, L, M] -> [B, K, N, M]: summed over the rows of all heads of a group."""
    b = x.size(0)
    return x.reshape(b, groups, -1, x.size(-1)).mT @ y.reshape(b, groups, -1, y.size(-1))


def _seen(rows: int, keys: int, band: Band, device: torch.device) -> Tensor:
    """The band as a boolean mask [rows, keys]."""
    seen = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if band.high is not None:
        seen = seen.tril_(band.high)
    return seen if band.low is None else seen.triu_(band.low)


def _strips(q: Tensor, k: Tensor, band: Band, rows: int) -> Iterator[tuple[slice, slice, Band]]:
    """A tile as strips of at most that many rows: (rows, the keys that any of them sees, band within the strip)."""
    for start in range(0, q.size(2), rows):
        stop = min(start + rows, q.size(2))
        left = 0 if band.low is None else max(0, start + band.low)
        right = k.size(2) if band.high is None else min(k.size(2), stop + band.high)
        by = start - left
        low = None if band.low is None or stop - 1 + band.low <= left else band.low + by
        high = None if band.high is None or start + band.high >= right - 1 else band.high + by
        yield slice(start, stop), slice(left, right), Band(low, high)


def _cpu_strips(q: Tensor, k: Tensor, band: Band) -> Iterator[tuple[slice, slice, Band, Tensor | None]]:
    """What the CPU kernel takes at a time: itself full and causal, and strips of a window with an explicit mask."""
    if band.low is None and (band.is_full or (band.is_causal and q.size(2) == k.size(2))):
        yield slice(0, q.size(2)), slice(0, k.size(2)), band, None
        return
    # The kernel computes what the mask hides, too: strips of a quarter of the window waste a quarter.
    width = k.size(2) if band.low is None or band.high is None else band.high - band.low + 1
    for rows, keys, inner in _strips(q, k, band, min(512, max(64, width // 4))):
        mask = None
        if not inner.is_full:
            hidden = ~_seen(rows.stop - rows.start, keys.stop - keys.start, inner, q.device)
            mask = q.new_zeros(hidden.shape).masked_fill_(hidden, -math.inf)[None, None]
        yield rows, keys, Band(), mask


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    parts = [
        call(q[:, :, rows], k[:, :, keys], v[:, :, keys], 0.0, inner.is_causal, attn_mask=mask, scale=scale)
        for rows, keys, inner, mask in _cpu_strips(q, k, band)
    ]
    if len(parts) == 1:
        out, lse = parts[0]
        return out, lse
    return torch.cat([o for o, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    call = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    parts = [
        (rows, keys, call(grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows],
                          lse[:, :, rows], 0.0, inner.is_causal, attn_mask=mask, scale=scale))
        for rows, keys, inner, mask in _cpu_strips(q, k, band)
    ]  # fmt: skip
    if len(parts) == 1 and parts[0][1] == slice(0, k.size(2)):
        dq, dk, dv = parts[0][2]
        return dq, dk, dv
    exact = exact_dtype(q)
    dq = q.new_empty(q.shape, dtype=exact)
    dk, dv = k.new_zeros(k.shape, dtype=exact), v.new_zeros(v.shape, dtype=exact)
    for rows, keys, (a, b, c) in parts:
        dq[:, :, rows] = a
        dk[:, :, keys] += b
        dv[:, :, keys] += c
    return dq, dk, dv


def _cuda_window(q: Tensor, k: Tensor, band: Band) -> dict[str, int]:
    """The band in the kernel's words: it counts diagonals from the last query and the last key (bottom right)."""
    shift = k.size(2) - q.size(2)
    left = -1 if band.low is None else shift - band.low
    right = -1 if band.high is None else band.high - shift
    return {} if band.low is None else {"window_size_left": left, "window_size_right": right}


def _cuda_forward(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._flash_attention_forward(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, None, q.size(2), k.size(2), 0.0,
        band.is_causal, False, scale=scale, **_cuda_window(q, k, band)
    )  # fmt: skip
    return found[0].transpose(1, 2), found[1]


def _cuda_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    # Without dropout the kernel draws no random numbers; its two slots for their state still want tensors.
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out.transpose(1, 2),
        lse.contiguous(), None, None, q.size(2), k.size(2), 0.0, band.is_causal, unused, unused[:0],
        scale=scale, **_cuda_window(q, k, band)
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
