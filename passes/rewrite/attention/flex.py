"""Decompose `flex_attention` into plain operators, so that all analyses of masks and scores apply to it.

A call has a score function, which computes a new score from a score and its indices (batch, head, query position, key
position), and a mask function, which says from the indices whether the key is visible. Both may read *captured* tensors.
If the score function only adds a bias, the call becomes a kernel call with a bias (`_FlexKernel`); otherwise matrix
products and a softmax (`_FlexProducts`). The block mask is ignored, because it only lists the blocks in which the mask
function is true. In shapes, m are query positions and n key positions. A call that raises NotElementwiseError is kept.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from streamfx.dialect.attention import ATTENTION, ATTENTION_BACKWARD
from streamfx.ir.joint import shape_of_node, walk
from streamfx.ir.writer import GraphWriter, find_size_input
from streamfx.kernels.sdpa import KERNELS
from streamfx.node_meta import GRAPH, VALUE
from streamfx.passes.rewrite.attention.score_mod import NotElementwiseError, ScoreValue, sum_over_scores, unwrap, vectorize_graph
from streamfx.passes.rewrite.pattern import either, op, rewrite_rule
from streamfx.torch_private import FLEX_ATTENTION, FLEX_ATTENTION_BACKWARD

aten = torch.ops.aten
SUM_WITH_SCORE = either(op(aten.add.Tensor, "score", "addend"), op(aten.sub.Tensor, "score", "addend"))
LN_2 = math.log(2)


@rewrite_rule(FLEX_ATTENTION)
def decompose_flex_attention(node: fx.Node, writer: GraphWriter) -> dict[fx.Node, fx.Node] | None:
    """flex(q, k, v, score, mask) -> attention(q, k, v, where(mask(b, h, m, n), bias, -inf))    if score = s + bias
    softmax(where(mask, score(q @ k), -inf)) @ v               otherwise
    """
    try:
        return _FlexCall(node, writer).replacements()
    except NotElementwiseError:
        return None


def _find_backward(node: fx.Node) -> fx.Node | None:
    """Return the backward call that reads a forward call's results, or None; raise NotElementwiseError if there are several."""
    aliases = (operator.getitem, aten.detach.default, aten.alias.default)
    results = walk([node], lambda value: [user for user in value.users if user.target in aliases])
    backwards = {user for value in results for user in value.users if user.target is FLEX_ATTENTION_BACKWARD}
    if len(backwards) > 1:
        raise NotElementwiseError("several backward calls")
    return backwards.pop() if backwards else None


@dataclass
class _FlexCall:
    """A forward call, its backward call if there is one, and what both implementations read of them.

    `score_function`, `mask_function` and `score_backward` (the backward of the score function) are `get_attr` nodes of
    graphs; `score_captures` and `mask_captures` are the captured tensors; `visible` is the mask for all scores, and
    `emitted_grid` the index arguments of both functions.
    """

    node: fx.Node
    writer: GraphWriter

    def __post_init__(self) -> None:
        """Unpack the call's arguments, and find its backward call and that call's incoming gradients."""
        # flex_attention(q, k, v, score_mod, block_mask, scale, kernel_options, score captures, mask captures)
        arguments: Any = self.node.args
        self.query, self.key, self.value, self.score_function, block_mask, self.scale, *_ = arguments
        *_, self.score_captures, self.mask_captures = arguments
        self.mask_function: fx.Node = block_mask[-1]
        # flex_attention_backward(q, k, v, out, lse, grad_out, grad_lse, fw_graph, joint_graph, block_mask, ...)
        self.backward = _find_backward(self.node)
        backward_args: Any = (None,) * 9 if self.backward is None else self.backward.args[:9]
        *_, self.result_gradient, self.lse_gradient, _, self.score_backward = backward_args

    def replacements(self) -> dict[fx.Node, fx.Node]:
        """Emit the call as plain operators; return {old result: new result}, or raise NotElementwiseError if impossible."""
        if self.query.meta[VALUE].shape[0] != self.key.meta[VALUE].shape[0]:
            raise NotElementwiseError("one batch of keys for all queries")
        self.visible = self.emit_vectorized(self.mask_function, [*self.emitted_grid, *self.mask_captures])
        implementation = _FlexKernel(self) if self.fits_kernel() else _FlexProducts(self)
        replacements = dict(self.map_results(self.node, implementation.forward()))
        if self.backward is not None:
            self.writer.move_before(self.backward)
            replacements |= self.map_results(self.backward, implementation.backward())
        return replacements

    # -- shared by both implementations

    @cached_property
    def emitted_grid(self) -> list[ScoreValue]:
        """The index arguments (batch, head, query position, key position), emitted once, each broadcastable to [b h m n]."""
        (b, h, m, _), n = self.query.meta[VALUE].shape, self.key.meta[VALUE].shape[2]
        return [ScoreValue(self.emit_broadcast_indices(size, dim)) for dim, size in enumerate((b, h, m, n))]

    def emit_broadcast_indices(self, size: Any, dim: int) -> fx.Node:
        """Emit 0, 1, ..., size - 1 along dimension `dim` of four: for the keys (dim 3), a tensor [1 1 1 n]."""
        size = self.size(size)
        indices = self.writer.call(aten.arange.default, size, device=self.query.meta[VALUE].device)
        return self.writer.call(aten.reshape.default, indices, [size if i == dim else 1 for i in range(4)])

    def size(self, size: Any) -> Any:
        """Return a size as an argument: an integer, or the graph input that is this size; NotElementwiseError without one."""
        if isinstance(size, int):
            return size
        size_input = find_size_input(size, self.node.graph)
        if size_input is None:
            raise NotElementwiseError("a size that is not an input")
        return size_input

    def emit_vectorized(self, function: fx.Node, arguments: Sequence[Any]) -> Any:
        """Emit a score or mask function for all scores at once, and return its result.

        The result is a `ScoreValue` (a node broadcastable to [b h m n]), or a node that is the same for all scores.
        """
        return vectorize_graph(function.meta[GRAPH], list(arguments), self.writer)

    @cached_property
    def sees_all(self) -> bool:
        """Whether the mask function is the constant True: no key is hidden."""
        return isinstance(self.visible, fx.Node) and self.visible.target is aten.full.default and self.visible.args[1] is True

    def emit_scalar(self, value: float, dtype: torch.dtype) -> fx.Node:
        """Emit a 0-dimensional constant."""
        return self.writer.call(aten.full.default, [], value, dtype=dtype, device=self.query.meta[VALUE].device)

    # -- the choice of an implementation

    def fits_kernel(self) -> bool:
        """Return whether a kernel can compute the call.

        The score function at most adds a bias to the score, only the call's result (index 0) is used outside its backward,
        and the backward needs the gradients of query, key and value alone.
        """
        query, key, value = (item.meta[VALUE] for item in (self.query, self.key, self.value))
        is_contiguous = all(item.stride(-1) == 1 for item in (query, key, value)) and query.shape[-1] == value.shape[-1]
        used_results = {
            getitem.args[1]
            for getitem in self.node.users
            for user in getitem.users
            if user is not self.backward and not _is_alias(user)
        }
        needs_more_gradients = self.backward is not None and (self.lse_gradient is not None or self.has_captured_gradients())
        return (
            is_contiguous
            and query.device.type in KERNELS
            and used_results <= {0}
            and not needs_more_gradients
            and self.score_use != "other"
        )

    def has_captured_gradients(self) -> bool:
        """Return whether the backward returns gradients of tensors that the score function captures.

        The score function's backward returns the gradients of the score, its four indices (None), and the captured tensors.
        """
        gradients = self.score_backward.meta[GRAPH].graph.output_node().args[0]
        return any(gradient is not None for gradient in gradients[5:])

    @cached_property
    def score_use(self) -> str:
        """What the score function does with the score: "none" if it returns it, "sum" if it adds a bias to it, or "other".

        A kernel reads the bias in the queries' dtype, while eager adds it in float32. So a bias that the queries' dtype may
        round counts as "other".
        """
        function: fx.GraphModule = self.score_function.meta[GRAPH]
        score, *_ = function.graph.find_nodes(op="placeholder")
        result = function.graph.output_node().args[0]
        if result is score:
            return "none"
        match = SUM_WITH_SCORE.match(result, {"score": score})
        if match is None or match["addend"] is score or len(score.users) != 1:
            return "other"
        addend, dtype = match["addend"], self.query.meta[VALUE].dtype
        is_exact = dtype.itemsize > 2 or (isinstance(addend, fx.Node) and getattr(addend.meta.get(VALUE), "dtype", None) == dtype)
        return "sum" if is_exact else "other"

    # -- replacements of results

    def map_results(self, node: fx.Node, values: Sequence[Any]) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yield (old node, new node) for each result of `node`, which its `getitem` nodes read; `values` are the new results.

        A tuple among the values is a result that is a tuple itself. A value of None is a result that nothing may use; raise
        NotElementwiseError if something does.
        """
        for getitem in node.users:
            result_index: Any = getitem.args[1]
            if getitem.target is not operator.getitem or (values[result_index] is None and getitem.users):
                raise NotElementwiseError(f"result {result_index}")
            if isinstance(values[result_index], tuple):
                yield from self.map_results(getitem, values[result_index])
            elif values[result_index] is not None:
                yield getitem, self._emit_in_dtype_of(getitem, values[result_index])

    def _emit_in_dtype_of(self, old: fx.Node, value: Any) -> Any:
        """Cast a new result to the dtype of the old one: torch traces the log-sum-exp as float32 even if it is float64."""
        dtype = old.meta[VALUE].dtype
        return value if value.meta[VALUE].dtype == dtype else self.writer.call(aten._to_copy.default, value, dtype=dtype)


def _is_alias(node: fx.Node) -> bool:
    """Return whether a node is its operand: `detach` or `alias`."""
    return node.target in (aten.detach.default, aten.alias.default)


@dataclass
class _FlexKernel:
    """Emits attention as a kernel call, whose bias combines the mask and the addend of the scores."""

    call: _FlexCall

    def forward(self) -> tuple[Any, ...]:
        """Emit the attention operator; return (output, log-sum-exp, None): a kernel does not return the maximum of scores."""
        call, write = self.call, self.call.writer.call
        self.bias = self._emit_bias()
        options: dict[str, Any] = {"scale": call.scale}
        self.options = options if self.bias is None else {"attn_mask": self.bias, **options}
        attention = write(ATTENTION, call.query, call.key, call.value, **self.options)
        self.out, self.lse = (write(operator.getitem, attention, i) for i in range(2))
        return self.out, self.lse, None

    def _emit_bias(self) -> fx.Node | None:
        """Emit the kernel's bias: the number that the score function adds to each score, or minus infinity for hidden keys.

        Return None if it adds nothing and no key is hidden. Raise NotElementwiseError if all scores get the same number.
        """
        call, write = self.call, self.call.writer.call
        dtype = call.query.meta[VALUE].dtype
        bias: Any = None
        if call.score_use == "sum":
            zero = call.emit_scalar(0.0, dtype)
            bias = call.emit_vectorized(call.score_function, [zero, *call.emitted_grid, *call.score_captures])  # 0 + bias
            bias = bias.node if isinstance(bias, ScoreValue) else bias
            bias = write(aten._to_copy.default, bias, dtype=dtype)
        if not call.sees_all:
            visible = call.visible.node if isinstance(call.visible, ScoreValue) else call.visible
            bias = call.emit_scalar(0.0, dtype) if bias is None else bias
            bias = write(aten.where.self, visible, bias, call.emit_scalar(-math.inf, dtype))
        if bias is not None and not shape_of_node(bias):
            raise NotElementwiseError("a mask that is the same number everywhere")
        return bias

    def backward(self) -> tuple[Any, ...]:
        """Emit the attention's backward; return (query gradient, key gradient, value gradient, gradients of captured tensors).

        The last item is a tuple of None: `fits_kernel` is false for calls that need these gradients.
        """
        call, write = self.call, self.call.writer.call
        if call.result_gradient is None:
            raise NotElementwiseError("no gradient of the result")
        gradients = write(
            ATTENTION_BACKWARD, call.result_gradient, call.query, call.key, call.value, self.out, self.lse, **self.options
        )
        captured_gradients = (None,) * len(call.score_captures)
        return (*(write(operator.getitem, gradients, i) for i in range(3)), captured_gradients)


@dataclass
class _FlexProducts:
    """Emits attention as matrix products and a softmax, in eager's precision. `forward` stores the values for `backward`."""

    call: _FlexCall

    def __post_init__(self) -> None:
        """Set the dtype of the softmax (`precision`), the number of key heads, and of query heads per key head (`repeats`)."""
        call = self.call
        self.write = call.writer.call
        self.dtype = call.query.meta[VALUE].dtype
        self.precision = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.key_heads = call.key.meta[VALUE].shape[1]
        self.repeats = call.query.meta[VALUE].shape[1] // self.key_heads

    def forward(self) -> tuple[Any, ...]:
        """Emit products and softmax; return (output, log-sum-exp, maximum of scores), the last two for each query.

        Both are divided by log(2), as `flex_attention` returns them.
        """
        call, write = self.call, self.write
        self.keys, self.values = self._emit_for_all_heads(call.key), self._emit_for_all_heads(call.value)
        keys = write(aten.transpose.int, self._emit_in_softmax_dtype(self.keys), 2, 3)
        scores = self._emit_batched_product(self._emit_in_softmax_dtype(call.query), keys)
        self.scores = write(aten.mul.Tensor, scores, call.scale)
        modified = call.emit_vectorized(call.score_function, [ScoreValue(self.scores), *call.emitted_grid, *call.score_captures])
        masked_scores = write(aten._to_copy.default, unwrap(modified), dtype=self.precision)
        masked_scores = self._emit_where_visible(masked_scores, -math.inf)
        self.weights = write(aten._safe_softmax.default, masked_scores, -1)
        out = self._emit_batched_product(self._emit_in_query_dtype(self.weights), self._emit_in_query_dtype(self.values))
        lse = write(aten.div.Scalar, write(aten.logsumexp.default, masked_scores, [-1]), LN_2)
        largest = write(aten.div.Scalar, write(aten.amax.default, masked_scores, [-1]), LN_2)
        return out, lse, largest

    def backward(self) -> tuple[Any, ...]:
        """Emit the backward; return (query gradient, key gradient, value gradient, gradients of captured tensors).

        The last item is a tuple, with None for a captured tensor without a gradient.
        """
        call, write = self.call, self.write
        value_gradient = (
            write(aten.zeros_like.default, call.value)
            if call.result_gradient is None
            else self._emit_value_gradient(call.result_gradient)
        )
        softmax_input_gradient = self._emit_softmax_input_gradient(call.result_gradient, call.lse_gradient)
        # the backward of the score function: (score, indices, gradient, captured tensors) -> gradients of its arguments
        arguments = [ScoreValue(self.scores), *call.emitted_grid, ScoreValue(softmax_input_gradient), *call.score_captures]
        score_gradient, _, _, _, _, *per_score_gradients = call.emit_vectorized(call.score_backward, arguments)
        scaled = self._emit_in_query_dtype(write(aten.mul.Tensor, unwrap(score_gradient), call.scale))
        scaled = self._emit_where_visible(scaled, 0.0)
        query_gradient = self._emit_batched_product(scaled, self.keys)
        key_gradient = self._emit_sum_per_key_head(
            self._emit_batched_product(write(aten.transpose.int, scaled, 2, 3), call.query)
        )
        captured_gradients = tuple(None if item is None else sum_over_scores(item, call.writer) for item in per_score_gradients)
        return query_gradient, key_gradient, value_gradient, captured_gradients

    def _emit_value_gradient(self, gradient: Any) -> fx.Node:
        """Emit the gradient of the values from the gradient of the result, summed over the query heads that share a value."""
        weights = self.write(aten.transpose.int, self._emit_in_query_dtype(self.weights), 2, 3)
        return self._emit_sum_per_key_head(self._emit_batched_product(weights, gradient))

    def _emit_softmax_input_gradient(self, gradient: Any, lse_gradient: Any) -> fx.Node:
        """Emit the gradient of the scores that enter the softmax, [b h m n].

        It is the sum of two parts: from the gradient of the result, and from the gradient of the log-sum-exp. Either may be
        None; if both are, raise NotElementwiseError.
        """
        write, scores_gradient = self.write, None
        if gradient is not None:
            values = write(aten.transpose.int, self._emit_in_softmax_dtype(self.values), 2, 3)
            weights_gradient = self._emit_batched_product(self._emit_in_softmax_dtype(gradient), values)
            scores_gradient = write(aten._softmax_backward_data.default, weights_gradient, self.weights, -1, self.precision)
        if lse_gradient is not None:
            per_row = write(aten.unsqueeze.default, write(aten.div.Scalar, lse_gradient, LN_2), 3)
            from_lse = write(aten.mul.Tensor, self.weights, per_row)
            scores_gradient = from_lse if scores_gradient is None else write(aten.add.Tensor, scores_gradient, from_lse)
        if scores_gradient is None:
            raise NotElementwiseError("no gradient at all")
        return scores_gradient

    def _emit_where_visible(self, value: fx.Node, hidden: float) -> fx.Node:
        """Emit where(the query sees the key, value, hidden); `value` is [b h m n], `hidden` a number."""
        call = self.call
        if call.sees_all:
            return value
        return self.write(aten.where.self, unwrap(call.visible), value, call.emit_scalar(hidden, value.meta[VALUE].dtype))

    def _emit_in_softmax_dtype(self, value: Any) -> Any:
        """Cast to the dtype in which eager computes the softmax."""
        return self._emit_cast(value, self.precision)

    def _emit_in_query_dtype(self, value: Any) -> Any:
        """Cast to the dtype of the queries."""
        return self._emit_cast(value, self.dtype)

    def _emit_cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return a value in a dtype; emit a cast if necessary."""
        return value if value.meta[VALUE].dtype == dtype else self.write(aten._to_copy.default, value, dtype=dtype)

    def _emit_for_all_heads(self, value: Any) -> Any:
        """Emit each of g key heads once for each of the r query heads that share it: [b g n d] -> [b (g r) n d]."""
        if self.repeats == 1:
            return value
        b, g, n, d = (self.call.size(size) for size in value.meta[VALUE].shape)
        wide = self.write(aten.expand.default, self.write(aten.unsqueeze.default, value, 2), [b, g, self.repeats, n, d])
        return self.write(aten.reshape.default, wide, [b, g * self.repeats, n, d])

    def _emit_sum_per_key_head(self, value: fx.Node) -> fx.Node:
        """Emit the sum over the r query heads that share each of g key heads: [b (g r) n d] -> [b g n d]."""
        if self.repeats == 1:
            return value
        b, _, n, d = (self.call.size(size) for size in value.meta[VALUE].shape)
        grouped = self.write(aten.reshape.default, value, [b, self.key_heads, self.repeats, n, d])
        return self.write(aten.sum.dim_IntList, grouped, [2])

    def _emit_batched_product(self, left: Any, right: Any) -> fx.Node:
        """Emit the product [b h m k] @ [b h k n] as one `bmm`: batch and heads are merged before it, and split after it."""
        sizes = [self.call.size(size) for size in (*left.meta[VALUE].shape[:3], right.meta[VALUE].shape[3])]
        flat = [self._emit_flattened_heads(item) for item in (left, right)]
        return self.write(aten.reshape.default, self.write(aten.bmm.default, *flat), sizes)

    def _emit_flattened_heads(self, value: Any) -> fx.Node:
        """Merge batch and heads: [b h m n] -> [(b h) m n]."""
        m, n = (self.call.size(size) for size in value.meta[VALUE].shape[2:])
        return self.write(aten.reshape.default, value, [-1, m, n])
