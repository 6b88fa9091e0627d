"""Gather and batched products. Decode rows of all sequences together; prefill one sequence after the other, tiled.

The cache is seen as rows of one tile, `block_size · head_dim` contiguous elements, so that a gather is memcpy:

    tile(block, k|v, head) = block · tiles_per_block + (k|v) · kv_heads + head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvrelay_kernels.paged_attention.batch import AttentionBatch

QUERY_TILE = 128
NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class _Decode:
    """All sequences with one query row."""

    rows: Tensor
    """[n] their rows in q."""
    tiles: Tensor
    """[2 · n · kv_heads · blocks]: keys, then values."""
    stale: Tensor
    """Token rows of the gathered keys and values that belong to nobody: zeroed, for they may hold NaN."""
    mask: Tensor
    """[n · kv_heads, 1, keys]: 0 or -inf."""
    empty: Tensor | None
    """[e] places among the n that see no key at all."""


@dataclass(frozen=True, slots=True)
class _QueryTile:
    begin: int
    end: int
    """Query rows, in q."""
    key_begin: int
    key_end: int
    """Of the gathered keys."""
    mask: Tensor
    """[group · rows, key_end - key_begin]."""
    blind: Tensor | None
    """Places along `group · rows` that see no key at all."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several query rows."""

    tiles: Tensor
    """[2 · kv_heads · blocks]."""
    num_keys: int
    """Gathered keys that are real; those after are stale."""
    queries: tuple[_QueryTile, ...]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    decode: _Decode | None
    prefills: tuple[_Prefill, ...]
    num_queries: int
    scale: float


def plan_attention(batch: AttentionBatch, cache: Tensor, num_heads: int) -> CpuPlan:
    """The result serves every layer whose cache has the strides and dtype of `cache`."""
    decode_seqs: list[int] = []
    decode_rows: list[int] = []
    prefills: list[_Prefill] = []
    begin = 0
    for i, query_len in enumerate(batch.query_lens):
        if query_len == 1:
            decode_seqs.append(i)
            decode_rows.append(begin)
        elif query_len > 1:
            prefills.append(_plan_prefill(batch, cache, num_heads, i, begin))
        begin += query_len
    decode = _plan_decode(batch, cache, decode_seqs, decode_rows) if decode_seqs else None
    return CpuPlan(decode, tuple(prefills), begin, batch.scale)


def paged_attention(q: Tensor, cache: Tensor, plan: CpuPlan) -> Tensor:
    flat = _tiles(cache)
    if plan.decode is not None and not plan.prefills:
        return _decode(q, flat, cache, plan.decode, plan.scale)
    out = torch.empty(q.shape, dtype=q.dtype)
    if plan.decode is not None:
        rows = plan.decode.rows
        out.index_copy_(0, rows, _decode(q.index_select(0, rows), flat, cache, plan.decode, plan.scale))
    for prefill in plan.prefills:
        _prefill(q, flat, cache, prefill, plan.scale, out)
    return out


def _tiles(cache: Tensor) -> Tensor:
    blocks, _, kv_heads, block_size, head_dim = cache.shape
    tile = block_size * head_dim
    return cache.as_strided(((blocks - 1) * (cache.stride(0) // tile) + 2 * kv_heads, tile), (tile, 1))


def _tile_rows(blocks: Tensor, cache: Tensor) -> Tensor:
    """blocks [n, b] → tile numbers [2 · n · kv_heads · b]."""
    _, _, kv_heads, block_size, head_dim = cache.shape
    per_block = cache.stride(0) // (block_size * head_dim)
    parts = torch.arange(2 * kv_heads, dtype=torch.int64).view(2, 1, kv_heads, 1)
    return (blocks[None, :, None, :] * per_block + parts).reshape(-1)


def _first_key(position: int, window: int) -> int:
    return max(0, position - window + 1) if window > 0 else 0


def _plan_decode(batch: AttentionBatch, cache: Tensor, seqs: list[int], rows: list[int]) -> _Decode:
    _, _, kv_heads, block_size, _ = cache.shape
    kv_lens = torch.tensor([batch.kv_lens[i] for i in seqs], dtype=torch.int64)
    first_keys = torch.tensor([_first_key(batch.kv_lens[i] - 1, batch.window) for i in seqs], dtype=torch.int64)
    first_blocks = first_keys // block_size
    num_blocks = max(1, int((-(-kv_lens // block_size) - first_blocks).max()))
    columns = first_blocks[:, None] + torch.arange(num_blocks, dtype=torch.int64)
    tables = batch.block_tables[seqs]
    blocks = tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))  # [n, b]; past the end: any block, masked
    keys = first_blocks[:, None] * block_size + torch.arange(num_blocks * block_size, dtype=torch.int64)
    hidden = (keys >= kv_lens[:, None]) | (keys < first_keys[:, None])  # [n, keys]
    hidden = hidden.repeat_interleave(kv_heads, dim=0)  # [n · kv_heads, keys]
    stale = hidden.view(-1).nonzero().view(-1)
    empty = (kv_lens <= 0).nonzero().view(-1)
    return _Decode(
        rows=torch.tensor(rows, dtype=torch.int64),
        tiles=_tile_rows(blocks, cache),
        stale=torch.cat((stale, stale + hidden.numel())),
        mask=torch.zeros(hidden.shape, dtype=cache.dtype).masked_fill_(hidden, NEG_INF)[:, None, :],
        empty=empty if empty.numel() else None,
    )


def _decode(q: Tensor, flat: Tensor, cache: Tensor, plan: _Decode, scale: float) -> Tensor:
    n, heads, head_dim = q.shape
    kv_heads = cache.shape[2]
    tokens = flat.index_select(0, plan.tiles).view(-1, head_dim)  # [2 · n · kv_heads · keys, head_dim]
    if plan.stale.numel():
        tokens.index_fill_(0, plan.stale, 0.0)
    keys, values = tokens.view(2, n * kv_heads, -1, head_dim).unbind(0)
    grouped = q.reshape(n * kv_heads, heads // kv_heads, head_dim)
    out = _attend(grouped, keys, values, plan.mask, scale).view(n, heads, head_dim)
    if plan.empty is not None:
        out.index_fill_(0, plan.empty, 0.0)
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [b, r, d], keys and values [b, n, d], mask broadcast to [b, r, n] → [b, r, d]."""
    scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=scale)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
    return torch.bmm(weights.to(values.dtype), values)


def _plan_prefill(batch: AttentionBatch, cache: Tensor, num_heads: int, seq: int, begin: int) -> _Prefill:
    _, _, kv_heads, block_size, _ = cache.shape
    query_len, kv_len = batch.query_lens[seq], batch.kv_lens[seq]
    position = kv_len - query_len  # of the first query row
    first_block = _first_key(max(position, 0), batch.window) // block_size
    origin = first_block * block_size  # position of the first gathered key
    last_block = -(-kv_len // block_size)
    queries: list[_QueryTile] = []
    for tile in range(0, query_len, QUERY_TILE):
        rows = torch.arange(position + tile, position + min(tile + QUERY_TILE, query_len), dtype=torch.int64)
        key_begin = _first_key(max(int(rows[0]), 0), batch.window) // block_size * block_size
        key_end = max(key_begin, min(last_block * block_size, (int(rows[-1]) // block_size + 1) * block_size))
        hidden = _hidden(rows, torch.arange(key_begin, key_end, dtype=torch.int64), batch.window)
        hidden = hidden.repeat(num_heads // kv_heads, 1)
        mask = torch.zeros(hidden.shape, dtype=cache.dtype).masked_fill_(hidden, NEG_INF)
        blind = hidden.all(dim=1).nonzero().view(-1) if rows[0] < 0 else None
        at = begin + tile
        queries.append(_QueryTile(at, at + len(rows), key_begin - origin, key_end - origin, mask, blind))
    tiles = _tile_rows(batch.block_tables[seq : seq + 1, first_block:last_block], cache)
    return _Prefill(tiles, kv_len - origin, tuple(queries))


def _hidden(rows: Tensor, keys: Tensor, window: int) -> Tensor:
    """Positions [r] and [n] → [r, n], True where the key may not be seen."""
    hidden = keys[None, :] > rows[:, None]
    if window > 0:
        hidden |= keys[None, :] <= rows[:, None] - window
    return hidden


def _prefill(q: Tensor, flat: Tensor, cache: Tensor, plan: _Prefill, scale: float, out: Tensor) -> None:
    _, heads, head_dim = q.shape
    kv_heads = cache.shape[2]
    tokens = flat.index_select(0, plan.tiles).view(2, kv_heads, -1, head_dim)
    tokens[:, :, plan.num_keys :] = 0.0
    for tile in plan.queries:
        rows = tile.end - tile.begin
        grouped = q[tile.begin : tile.end].view(rows, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        keys, values = tokens[:, :, tile.key_begin : tile.key_end].unbind(0)
        mixed = _attend(grouped.reshape(kv_heads, -1, head_dim), keys, values, tile.mask[None], scale)
        if tile.blind is not None:
            mixed.index_fill_(1, tile.blind, 0.0)
        out[tile.begin : tile.end] = mixed.view(kv_heads, -1, rows, head_dim).permute(2, 0, 1, 3).reshape(
            rows, heads, head_dim
        )

