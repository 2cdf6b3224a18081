"""Explain to users why an operator is not chunked: the operator, the obstacle, the source line, and a suggested change.

Such an operator *falls back*: it runs on the full sequence, outside the loops over chunks. It is *opaque* if streamfx has no rule
that says how it treats the axes of its operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from streamfx.budget import AUTO, format_bytes
from streamfx.cost.memory import bytes_like
from streamfx.errors import NotStreamedError, OverBudgetError
from streamfx.ir.facts import Facts, StorageClass
from streamfx.ir.joint import is_parameter, is_tensor, tensor_operands
from streamfx.node_meta import FORWARD_MODULES, MODULES, VALUE
from streamfx.options import Options
from streamfx.passes.analysis.diagnostics import CONCATENATIONS, READS_BY_INDEX, SPLITS, WRITES_BY_INDEX, mixes_rows_and_blocks
from streamfx.passes.ops.collectives import is_collective
from streamfx.passes.ops.hub_kernels import is_attention
from streamfx.passes.ops.opaque import describe_opaque, is_opaque, is_triton
from streamfx.passes.ops.traits import CONTRACTIONS, producer_of
from streamfx.torch_private import AUTO_FUNCTIONALIZED, OpOverload
from streamfx.torch_private.lines import source_line

MAX_ERROR_LENGTH = 160  # characters of an unexpected error that a report shows
MAX_OPERATORS = 3  # that a reason names
MIN_BYTES_DIVISOR = 32  # an operator matters if its widest operand has at least 1/32 of the bytes of the graph's widest value

SMALLER = (
    "unchunked, the graph takes {other} at the peak for activations and gradients, and in loops over chunks {ours}, so it runs "
    "unchunked; an explicit chunk_size=... forces chunks"
)
FITS = "the unchunked graph fits into the memory budget, so it runs unchunked"
NO_RULE = (
    "write it with operators that streamfx knows, or give it a rule (streamfx.register_rule; if it has a state, "
    "streamfx.register_recurrence)"
)
RANKS = "no code needs to change"
FROM_RANKS = "{target} works on all rows that ranks exchange, without chunks"
PARTS = "keep the parts in a separate dimension (torch.stack, unflatten), so that rows remain rows of one sequence"
BY_INDEX = (
    "compare row indices instead (torch.where); experts stream if rows are sorted, multiplied by grouped matmuls "
    "(torch.nn.functional.grouped_mm, with group ends in tensors) and scattered back"
)
BY_MASK = (
    "keep all rows and let the loss ignore some (labels of -100, ignore_index), which streams; or select rows of all tensors "
    "together (xk, yk = x[k], y[k]), so that the head and its loss are in one graph"
)
OTHER_DIMENSION = "let it run along another dimension than the sequence, or outside the compiled model"
JOINED = (
    "torch.nn.functional.scaled_dot_product_attention streams over rows and blocks if keys, values and mask are concatenated "
    "alike, and the mask hides by minus infinity"
)
RECURRENT = "write the layer out as a loop over rows with torch.nn.LSTMCell, GRUCell or RNNCell: such a loop streams"
KERNEL = (
    "make the kernel an operator of torch.library, and its backward another one (torch.library.custom_op), and declare how "
    "they treat rows: streamfx.register_recurrence if it has a state, else streamfx.register_rule"
)
WRITES = "wrap it in an operator that returns the written values, and declare how it treats rows: streamfx.register_rule"
ON_HOST = (
    "keep values of data in tensors: .item() and .tolist() pass them to Python. For experts, grouped matmuls take group ends as "
    "a tensor (torch.nn.functional.grouped_mm)"
)
IN_ORDER = "give the operator contiguous memory: x.contiguous()"
ATTENTION = (
    'attn_implementation="sdpa" streams, and so do "flash_attention_2" and "flex_attention"; or give the operator a rule '
    "(streamfx.register_rule)"
)
DECLARE_SHAPES = (
    "declare the shapes of the operator's results (torch.library.register_fake) and how it treats rows "
    f"(streamfx.register_rule); if it is an attention kernel from the hub, {ATTENTION.partition(';')[0]}"
)
LOOP = "a loop over rows streams as torch._higher_order_ops.scan, or unrolled"
CHOICE = "torch.where over the results of both functions streams, if both may run"
GENERIC_SCAN = (
    'with combine_mode="generic" it streams, and computes the gradients of all leaves (PyTorch\'s "pointwise" mode computes '
    "wrong ones if one leaf depends on another)"
)
OTHER = "write it with plain operators that keep the sequence in a separate dimension"
SINGLE_ROW = "the inputs are a single row, which cannot be chunked: give longer sequences"
NO_SEQUENCE = "compile a larger part of the model in one graph, so that its attention or its loss is in it"

ADVICE_BY_FUNCTION = {"cond": CHOICE, "while_loop": LOOP, "while_loop_stack_output": LOOP, "associative_scan": GENERIC_SCAN}

ADVICE_BY_OPERATORS = {SPLITS: PARTS, CONCATENATIONS: PARTS, READS_BY_INDEX: BY_INDEX, WRITES_BY_INDEX: BY_INDEX}

ADVICE_BY_BREAK = {  # fragments of Dynamo's break reasons for which its own hint does not help, and our advice
    "RNN, GRU, or LSTM": RECURRENT,
    "aten._local_scalar_dense": ON_HOST,
    "Tensor.item()": ON_HOST,
    "Dynamic shape operator": BY_MASK,
    "torch.compiler.disable": KERNEL,
    "created with pybind": KERNEL,
    "does not support running with fake tensors": DECLARE_SHAPES,
    "non-contiguous `out=` tensor": IN_ORDER,
}


@dataclass(frozen=True)
class Obstacle:
    """An operator that is not chunked: its name, the reason (`found`), its source line (`where`), and advice (`do`).

    `matters` is False if it works on little data. `bytes`: the size of its operands and result that have the sequence.
    """

    operator: str
    found: str
    where: str
    do: str
    matters: bool
    bytes: int = 0

    def __str__(self) -> str:
        """Return the reason, the source line and the advice."""
        where = f" ({self.where})" if self.where else ""
        return f"{self.found}{where}: {self.do}"


def obstacles(facts: Facts) -> dict[fx.Node, Obstacle]:
    """Return, for each operator that falls back, why it does, for the user; {} if the graph was not analyzed."""
    if facts.found_access is None:
        return {}
    largest_bytes = max((bytes_like(node.meta.get(VALUE)) for node in facts.joint.nodes), default=0)
    return {node: _obstacle(node, reason, facts, largest_bytes) for node, reason in facts.access.reasons.items()}


def _obstacle(node: fx.Node, reason: str, facts: Facts, widest: int) -> Obstacle:
    """Return why a node falls back, for the user; `reason` is the analysis', `widest` the bytes of the graph's largest value."""
    sizes = {value: bytes_like(value.meta[VALUE]) for value in (node, *tensor_operands(node)) if is_tensor(value)}
    matters = node.target in CONTRACTIONS or max(sizes.values(), default=0) * MIN_BYTES_DIVISOR >= widest
    sequence_bytes = sum(size for value, size in sizes.items() if _is_along_sequence(value, facts))
    reason, do = (FROM_RANKS.format(target=node.target), RANKS) if is_from_ranks(node, facts) else (reason, _advice(node, facts))
    return Obstacle(str(node.target), reason, source_line(node), do, matters, sequence_bytes)


def is_from_ranks(node: fx.Node, facts: Facts) -> bool:
    """Return whether collectives supply all rows that an operator reads, and no loop works on them in between.

    Then other ranks, not this operator, are why it falls back. Follows operands with a sequence axis back to collectives.
    """
    if is_collective(node) or is_opaque(node):
        return False
    pending, visited, has_collective = [node], {node}, False
    while pending:
        for operand in tensor_operands(pending.pop()):
            producer = producer_of(operand)
            if operand in facts.axes.static or producer in visited or not _is_along_sequence(operand, facts):
                continue
            is_sent = is_collective(producer)
            if not is_sent and (producer.op == "placeholder" or facts.access.storage_class(operand) is not StorageClass.WHOLE):
                return False
            has_collective |= is_sent
            visited.add(producer)
            pending += [] if is_sent else [producer]
    return has_collective


def _is_along_sequence(value: fx.Node, facts: Facts) -> bool:
    """Return whether a value has a sequence axis, or an unknown shape."""
    shape = facts.axes.shapes.get(value)
    return shape is None or bool(facts.axes.sequence_dims(shape))


def _advice(node: fx.Node, facts: Facts) -> str:
    """Return a suggested change of the model's code for an operator that falls back to the full sequence."""
    if is_collective(node):
        return RANKS
    if is_opaque(node):
        return _advice_on_opaque(node)
    if _is_of_recurrent_layer(node):
        return RECURRENT
    signature = facts.axes.signatures.get(node)
    if signature is not None and mixes_rows_and_blocks(node, signature, facts.axes):
        return JOINED
    if (
        any(operand.meta[VALUE].dtype == torch.bool for operand in tensor_operands(node)[1:])
        and node.target in READS_BY_INDEX | WRITES_BY_INDEX
    ):
        return BY_MASK
    if signature is None or not signature.full_labels:
        return OTHER
    return next((advice for operators, advice in ADVICE_BY_OPERATORS.items() if node.target in operators), OTHER_DIMENSION)


def _advice_on_opaque(node: fx.Node) -> str:
    """Return a suggested change for an operator without an axis rule."""
    if is_triton(node):
        return KERNEL
    if is_attention(node.args[0] if node.target is AUTO_FUNCTIONALIZED else node.target):
        return ATTENTION
    if node.target is AUTO_FUNCTIONALIZED:
        return WRITES
    return NO_RULE if isinstance(node.target, OpOverload) else ADVICE_BY_FUNCTION.get(str(node.target), OTHER)


def advice_on_break(reason: str, hint: str) -> str:
    """Return advice for a graph break, given Dynamo's reason: Dynamo's own hint, unless a better one is known."""
    return next((advice for fragment, advice in ADVICE_BY_BREAK.items() if fragment in reason), hint)


def _is_of_recurrent_layer(node: fx.Node) -> bool:
    """Return whether an operator belongs to torch's own LSTM, GRU or RNN layers, which unroll their steps over rows."""
    stack = node.meta.get(MODULES) or node.meta.get(FORWARD_MODULES) or {}
    names = [str(kind) for _, kind in stack.values()]
    return any("torch.nn.modules.rnn." in name and "Cell" not in name for name in names)


def why_smaller(ours: int, other: int) -> str:
    """Explain why a graph that could be chunked runs unchunked: it takes fewer bytes (`other`) than in loops (`ours`)."""
    return SMALLER.format(ours=format_bytes(ours), other=format_bytes(other))


def why_no_stages(facts: Facts) -> str:
    """Return a text that explains why a graph has no stages, so that it runs unchunked."""
    if facts.fits is not None:
        runs = ", and Inductor compiles it" if facts.fits == "compiled" else ""
        return f"{facts.unchunked_reason or FITS}{runs}"
    if facts.analysis_error:
        error = facts.analysis_error.splitlines()[0][:MAX_ERROR_LENGTH]
        return f"the analysis failed ({error}): please report it; the graph runs unchunked"
    if facts.unchunked_reason is not None:
        return facts.unchunked_reason
    if facts.faults:
        return f"{'; '.join(facts.faults)}; so nothing streams"
    if _is_single_row(facts):
        return SINGLE_ROW
    text = "no dimension of this graph can be streamed: no attention, no sum over a long dimension"
    opaque = [(describe_opaque(node), source_line(node)) for node in facts.joint.nodes if is_opaque(node)]
    if unknown := [f"{what} ({line})" if line else what for what, line in dict.fromkeys(opaque)]:
        return f"{text}, and {'; '.join(unknown[:MAX_OPERATORS])}; {NO_RULE}"
    return f"{text}; {NO_SEQUENCE}"


def _is_single_row(facts: Facts) -> bool:
    """Return whether all inputs that change from call to call have one row: the id or the features of a single token.

    The sizes of rows are those of all dimensions but features: (2, 40) for floats [2 40 16], and (2, 40) for ids [2 40].
    """
    primals = [primal for primal in facts.joint.primals if is_tensor(primal) and not is_parameter(primal)]
    values = [primal.meta[VALUE] for primal in primals]
    rows = [value.shape[:-1] if value.is_floating_point() and value.dim() > 1 else value.shape for value in values]
    return bool(rows) and all(isinstance(size, int) and size == 1 for sizes in rows for size in sizes)


def check_strict(facts: Facts, options: Options) -> None:
    """Raise `NotStreamedError` if the option is `strict=True` and an operator of the graph falls back."""
    if options.strict and (reasons := facts.reasons()):
        raise NotStreamedError(
            "strict=True requires every stage to stream",
            found="; ".join(reasons),
            do="change the code named above, or drop strict=True: the result is exact either way",
        )


def check_budget(facts: Facts, options: Options) -> None:
    """Raise `OverBudgetError` if a memory budget is set, other than "auto", and a graph runs unchunked because a pass failed."""
    failed = facts.analysis_error or "; ".join(facts.faults)
    if failed and facts.program is None and options.memory_budget not in (None, AUTO):
        raise OverBudgetError(
            f"memory_budget={options.memory_budget!r} cannot be ensured: this graph has no plan",
            found=failed,
            do="omit memory_budget: the graph runs unchunked, and takes the memory of plain autograd",
        )


def strict_refusal_text(all_facts: Sequence[Facts], options: Options) -> str:
    """Return the end of a report on a call that `strict=True` refuses; empty if it is not refused."""
    refused = options.strict and any(facts.reasons() for facts in all_facts)
    return "\n\nstrict=True: the backend raises NotStreamedError for these fallbacks" if refused else ""
