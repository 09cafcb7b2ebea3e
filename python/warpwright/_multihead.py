"""``torch.nn.MultiheadAttention`` on our linear and attention, for calls that return no weights.

Native's rules for masks hold. ``is_causal`` says that ``attn_mask`` is the causal mask: without a
padding mask, the mask is dropped and the flag is kept. With one, native adds both masks up to one
mask per head. Here the flag stays and only the padding is a mask, of one row per sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import functional as F
from ._arch import FLOATING, PLAIN
from ._ops import ops


def multi_head_attention(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> Tensor | None:
    """The output of ``module``, called with ``need_weights=False``.

    None if native must take the call. The module adds keys (``add_bias_kv``, ``add_zero_attn``), a
    tensor is nested or of another subclass, the masks have two dtypes, or native refuses the call.
    """
    if not _is_ours(module, query, key, value, key_padding_mask, attn_mask, is_causal):
        return None
    batch_at = 0 if module.batch_first else 1
    if query.dim() == 3:
        return _attend(
            module, (query, key, value), key_padding_mask, attn_mask, is_causal, batch_at
        )
    padding = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    inputs = _unsqueezed(query, key, value)
    return _attend(module, inputs, padding, attn_mask, is_causal, 0).squeeze(0)


def _is_ours(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> bool:
    tensors = [query, key, value, *(m for m in (key_padding_mask, attn_mask) if m is not None)]
    if not all(_is_plain(t) for t in tensors):
        return False
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return False
    if query.dtype not in FLOATING or (is_causal and attn_mask is None):
        return False
    dim = query.dim()
    if dim not in (2, 3) or key.dim() != dim or value.dim() != dim:
        return False
    if query.shape[-1] != module.embed_dim or key.shape[:-1] != value.shape[:-1]:
        return False
    if key.shape[-1] != module.kdim or value.shape[-1] != module.vdim:
        return False
    rows, columns = 0, 1
    if dim == 3:
        batch_at = 0 if module.batch_first else 1
        rows = columns = 1 - batch_at
        batch = query.shape[batch_at]
        if key.shape[batch_at] != batch:
            return False
    else:
        columns, batch = 0, 1
    length, keys = query.shape[rows], key.shape[columns]
    if key_padding_mask is not None:
        expected = (batch, keys) if dim == 3 else (keys,)
        if key_padding_mask.shape != expected or not _is_mask(key_padding_mask):
            return False
    if attn_mask is not None:
        per_head = (batch * module.num_heads, length, keys)
        if attn_mask.shape not in ((length, keys), per_head) or not _is_mask(attn_mask):
            return False
        if key_padding_mask is not None and key_padding_mask.dtype != attn_mask.dtype:
            return False
    return True


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_nested


def _is_mask(mask: Tensor) -> bool:
    return mask.dtype == torch.bool or mask.is_floating_point()


def _unsqueezed(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs with a batch of one; the same tensor stays the same."""
    q = query.unsqueeze(0)
    k = q if key is query else key.unsqueeze(0)
    return q, k, k if value is key else value.unsqueeze(0)


def _attend(
    module: nn.MultiheadAttention,
    inputs: tuple[Tensor, Tensor, Tensor],
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
    batch_at: int,
) -> Tensor:
    """Query, key and value have three dimensions, the batch at ``batch_at``."""
    query, key, _ = inputs
    batch, length, keys = query.shape[batch_at], query.shape[1 - batch_at], key.shape[1 - batch_at]
    # Native drops the mask by the flag alone; the padding may replace it in a square mask only.
    causal = is_causal and (key_padding_mask is None or length == keys)
    mask = _merged(
        None if causal else attn_mask, key_padding_mask, (batch, module.num_heads, length, keys)
    )
    order = (0, 2, 1, 3) if batch_at == 0 else (1, 2, 0, 3)
    back = (0, 2, 1, 3) if batch_at == 0 else (2, 0, 1, 3)
    q, k, v = (x.permute(order) for x in _projected(module, *inputs))
    dropout = module.dropout if module.training else 0.0
    y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    y = y.permute(back).reshape(query.shape)
    return F.linear(y, module.out_proj.weight, module.out_proj.bias)


def _merged(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, size: tuple[int, int, int, int]
) -> Tensor | None:
    """One mask for attention. In it True means visible; in native's masks it means hidden."""
    batch, heads, length, keys = size
    mask = attn_mask
    if mask is not None and mask.dim() == 3:
        mask = mask.view(batch, heads, length, keys)
    if key_padding_mask is not None:
        padding = key_padding_mask.view(batch, 1, 1, keys)
        if mask is None:
            mask = padding
        else:
            mask = mask | padding if mask.dtype == torch.bool else mask + padding
    return ~mask if mask is not None and mask.dtype == torch.bool else mask


def _projected(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Projects query, key and value to (., ., heads, head size).

    Equal inputs share one product, as in native.
    """
    width, bias, weight = module.embed_dim, module.in_proj_bias, module.in_proj_weight
    if module._qkv_same_embed_dim and query is key and key is value:
        q, k, v = ops.split_qkv(F.linear(query, weight, bias), module.num_heads)
        return q, k, v
    if module._qkv_same_embed_dim and key is value:
        weights = weight.split([width, 2 * width])
        parts = (None, None) if bias is None else bias.split([width, 2 * width])
        q = F.linear(query, weights[0], parts[0])
        k, v = F.linear(key, weights[1], parts[1]).split(width, dim=-1)
    else:
        biases = (None, None, None) if bias is None else bias.chunk(3)
        weights = (
            weight.chunk(3)
            if module._qkv_same_embed_dim
            else (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        )
        q, k, v = (
            F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
    heads = (module.num_heads, module.head_dim)
    return q.unflatten(-1, heads), k.unflatten(-1, heads), v.unflatten(-1, heads)
