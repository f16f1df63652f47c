"""Device memory that an op takes and gives back inside.

An op's storages are known from the graph; what its kernel allocates besides is not. The figures
here are those of PyTorch's own CPU kernels, of oneDNN's convolutions, and of cuDNN's attention. Of
other kernels nothing is known (0): a caching allocator and library workspaces that stay are
outside of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx


def workspace_bytes(node: fx.Node) -> int:
    """Most bytes that the op's kernel holds at once, beyond its inputs and all of its results."""
    arguments = [a.meta.get("val") if isinstance(a, fx.Node) else a for a in node.args]
    if not arguments or not isinstance(arguments[0], Tensor):
        return 0
    rules = _RULES.get(arguments[0].device.type, {})
    rule = rules.get(str(getattr(node.target, "overloadpacket", None)))
    return 0 if rule is None else rule(*arguments)


def _size(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _accumulation_bytes(t: Tensor) -> int:
    return max(4, t.element_size())


def _dropout(x: Tensor, *_: Any) -> int:
    """The mask as a factor, in the dtype of the result."""
    return _size(x)


def _safe_softmax(x: Tensor, dim: int, *_: Any) -> int:
    """Which elements, and which rows, are masked."""
    return x.numel() + x.numel() // max(1, x.shape[dim]) + x.element_size()


def _layer_norm_backward(grad: Tensor, x: Tensor, shape: list[int], *_: Any) -> int:
    """Partial sums of the gradients of weight and bias, one a thread."""
    return 2 * torch.get_num_threads() * math.prod(shape) * _accumulation_bytes(x)


def _tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Rows and columns of the attention matrix that a thread holds at a time."""
    rows = query.shape[2]
    split = 256 if rows >= 768 else 64 if rows >= 192 else 32
    return min(split, rows), min(512, key.shape[2])


def _flash_attention(query: Tensor, key: Tensor, *_: Any) -> int:
    """Scores, two rows of statistics, and the result of a tile, one a thread."""
    rows, columns = _tile(query, key)
    wide = rows * (columns + 2 + query.shape[3]) * _accumulation_bytes(query)
    narrow = rows * columns * query.element_size() if query.element_size() < 4 else 0
    return torch.get_num_threads() * (wide + narrow)


def _flash_attention_backward(grad: Tensor, query: Tensor, key: Tensor, *_: Any) -> int:
    """Scores and their gradients of a tile, one a thread."""
    rows, columns = _tile(query, key)
    wide = (2 * rows * columns + rows) * _accumulation_bytes(query)
    narrow = 2 * rows * columns * query.element_size() if query.element_size() < 4 else 0
    return torch.get_num_threads() * (wide + narrow)


def _cudnn_attention_backward(grad: Tensor, query: Tensor, *_: Any) -> int:
    """The gradient of the queries in float32, and a float of each of their rows.

    Measured on an H200 (torch 2.11, CUDA 13.0), in bfloat16 with heads of 128: to the byte.
    """
    batch, heads, rows, columns = query.shape
    return batch * heads * rows * (columns + 1) * 4 + 256


def _blocked(t: Tensor) -> int:
    """Bytes of an image in oneDNN's layout: channels in blocks, as wide as a vector."""
    block = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
    channels = t.shape[1]
    return _size(t) // max(1, channels) * (-(-channels // block) * block)


def _reordered(x: Tensor) -> int:
    """Bytes of an input's copy in that layout; up to 4 channels are read as they are."""
    return 0 if x.shape[1] <= 4 else _blocked(x)


def _num_positions(
    x: Tensor, padding: list[int], dilation: list[int], kernel: Any, stride: Any
) -> int:
    return math.prod(
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip(x.shape[2:], padding, dilation, kernel, stride, strict=True)
    )


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    *_: Any,
) -> int:
    """Input, weight and result in oneDNN's layout; the plain result is made at the end."""
    if transposed or not torch.backends.mkldnn.enabled:
        return 0
    positions = _num_positions(x, padding, dilation, weight.shape[2:], stride)
    plain = x.shape[0] * weight.shape[0] * positions * x.element_size()
    blocked = _blocked(x.new_empty((x.shape[0], weight.shape[0], positions)))
    return max(blocked, _reordered(x) + _size(weight) + blocked - plain)


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    *rest: Any,
) -> int:
    """Two kernels in turn, each with copies of what it reads and makes in oneDNN's layout."""
    if transposed or not torch.backends.mkldnn.enabled:
        return 0
    wants_input, wants_weight, _ = rest[-1]
    need = _blocked(grad) + _reordered(x) if wants_weight else 0
    if wants_input:
        made = _blocked(x) * (2 if max(stride) > 1 else 1)
        kept = _size(weight) if wants_weight else 0
        need = max(need, made - kept, _blocked(grad) + _blocked(x) - _size(x) - kept)
    return need


_RULES: Mapping[str, Mapping[str, Callable[..., int]]] = {
    "cpu": {
        "aten.native_dropout": _dropout,
        "aten.native_dropout_backward": _dropout,
        "aten._safe_softmax": _safe_softmax,
        "aten.native_layer_norm_backward": _layer_norm_backward,
        "aten._scaled_dot_product_flash_attention_for_cpu": _flash_attention,
        "aten._scaled_dot_product_flash_attention_for_cpu_backward": _flash_attention_backward,
        "aten.convolution": _convolution,
        "aten.convolution_backward": _convolution_backward,
    },
    "cuda": {"aten._scaled_dot_product_cudnn_attention_backward": _cudnn_attention_backward},
}
"""By device and op."""
