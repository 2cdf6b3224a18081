"""How values lie in memory, and who else reads or writes it: kernels, buffers, views, marks, compiled stretches."""

from __future__ import annotations

from tests.mutations.row import Mutation

CUDA, FORMS = "streamfx/runtime/cuda_attention.py", "streamfx/runtime/forms.py"
INDUCTOR = "streamfx/torch_private/inductor.py"
STREAM = "test_cuda_kernels.py::test_kernels_stream"
VIEWS = "test_results.py::test_views_of_any_length_show_eagers_rows"
LIE = "lie = tuple([(value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value for value in given])\n"
PREPARED = "        run = self._ready.get(lie) or self._prepared(given, lie, "

KERNELS = (
    Mutation(
        "7",
        "a result may lie in any order of heads and rows",
        CUDA,
        "    out = layouts.by_rows(out)  #",
        "    out = layouts.aligned(out)  #",
        (STREAM,),
    ),
    Mutation(
        "7",
        "a log-sum-exp has no rows beyond the last",
        CUDA,
        'return layouts.aligned(F.pad(lse, (0, -lse.shape[2] % LSE_ALIGNMENT), value=float("inf")))',
        "return layouts.aligned(lse)",
        (STREAM,),
    ),
    Mutation(
        "7",
        "rows of a log-sum-exp beyond the last weigh something",
        CUDA,
        'LSE_ALIGNMENT), value=float("inf")))',
        "LSE_ALIGNMENT), value=0.0))",
        (STREAM,),
    ),
    Mutation(
        "7",
        "a bias may begin anywhere",
        CUDA,
        "bias = layouts.aligned(layouts.widened(bias, BIAS_ALIGNMENT))[..., :keys]",
        "bias = bias[..., :keys]",
        ("test_cuda_kernels.py::test_kernels_stream",),
    ),
    Mutation(
        "7",
        "flash attention's mask begins at the first row",
        CUDA,
        "if causal is True and query.shape[2] != key.shape[2]:",
        "if False:",
        ("test_cuda_kernels.py::test_a_causal_mask_that_begins_at_the_first_row",),
    ),
    Mutation(
        "7",
        "a document of more keys than a window shows goes with others",
        "streamfx/runtime/documents.py",
        "(shown is not None and max(longest, length) > shown)",
        "False",
        ("test_cuda_documents.py::test_what_is_not_one_call",),
    ),
    Mutation(
        "7",
        "log-sum-exps of some documents lie among those of others",
        "streamfx/runtime/cuda_documents.py",
        "out, lse = layouts.aligned(out), lse.contiguous()",
        "out, lse = layouts.aligned(out), lse",
        ("test_cuda_documents.py::test_what_would_take_much_memory_takes_several_calls",),
    ),
    Mutation(
        "7",
        "a kernel of documents is called untried",
        "streamfx/runtime/cuda_documents.py",
        "isinstance(query, FakeTensor) or keeps_apart(query.device, query.dtype, width)",
        "True",
        ("test_cuda_documents.py::test_kernels_that_differ_are_not_called",),
    ),
    Mutation(
        "7",
        "a kernel's operator is known by its name alone",
        "passes/operators/hub_kernels.py",
        "BUILDS.fullmatch(target.namespace) and [item.name for item in target._schema.arguments] == _arguments(name)",
        "BUILDS.fullmatch(target.namespace)",
        ("test_hub_kernels.py::test_other_arguments_are_of_another_operator",),
    ),
    Mutation(
        "7",
        "a window does not count a row's own key",
        "streamfx/runtime/cuda_last.py",
        'return {"window_size": left + 1}',
        'return {"window_size": left}',
        ("test_cuda_kernels.py::test_a_window_takes_one_call_without_a_bias",),
    ),
    Mutation(
        "7",
        "a kernel that ends at the last row is called untried",
        "streamfx/runtime/cuda_last.py",
        "isinstance(query, FakeTensor) or hides(query.device, query.dtype, width, last.left is not None)",
        "True",
        ("test_cuda_kernels.py::test_kernels_that_end_elsewhere_are_not_called",),
    ),
    Mutation(
        "7",
        "a gradient may have another type than the queries",
        CUDA,
        "(layouts.widened(item.to(query.dtype), layouts.ALIGNED) for item in (gradient, out))",
        "(layouts.widened(item, layouts.ALIGNED) for item in (gradient, out))",
        ("test_cuda_kernels.py::test_merged_results_are_rounded_to_the_type_that_kernels_read",),
    ),
    Mutation(
        "7",
        "a width of columns of zeros has its own scale",
        CUDA,
        "        scale = query.shape[-1] ** -0.5 if scale is None else scale\n    query",
        "        pass\n    query",
        ("test_cuda_kernels.py::test_a_chunk_takes_one_call",),
    ),
)
WRITTEN = (
    Mutation(
        "14",
        "what is saved of a buffer is not copied where the step writes to it",
        "passes/codegen/memory.py",
        'if not any(memory.meta.get("streamfx_mutated", False) for memory in memories(node) if memory.op == "placeholder"):',
        "if True:",
        ("test_written.py::test_the_backward_half_has_what_was_read",),
    ),
    Mutation(
        "14",
        "gradients may be one memory",
        "passes/codegen/memory.py",
        "            if own & held or any(map(_is_given, own)):\n",
        "            if False:\n",
        ("test_memory.py::test_gradients_are_accumulated_and_clipped",),
    ),
    Mutation(
        "14",
        "results may be one memory where those of the trace were not",
        "passes/codegen/memory.py",
        "            if any(is_new) or any(shown.get(memory, before) != before for memory in own):\n",
        "            if False:\n",
        ("test_memory.py::test_outputs_are_written_to",),
    ),
    Mutation(
        "14",
        "a loop writes its result over what a view of it still reads",
        "passes/codegen/reuse.py",
        "    return by_rows and not any(memories(output) & own for output in outputs)",
        "    return by_rows",
        ("test_memory.py::test_a_slice_of_what_a_loop_is_given",),
    ),
)
HANDED_OVER = (
    Mutation(
        "stages",
        "a gradient is handed over while its parameter is still read",
        "passes/codegen/deliveries.py",
        "number.get(gradient, 0), readers.get(position, 0), *reads",
        "number.get(gradient, 0), *reads",
        ("test_deliveries.py::test_when_a_gradient_is_handed_over[what is called two is a view of input 0]",),
    ),
    Mutation(
        "stages",
        "a gradient is handed over while it is still read",
        "passes/codegen/deliveries.py",
        "number.get(gradient, 0), readers.get(position, 0), *reads",
        "number.get(gradient, 0), readers.get(position, 0)",
        ("test_deliveries.py::test_when_a_gradient_is_handed_over[behind the next product, which reads it]",),
    ),
)
SHOWN = (
    Mutation(
        "views",
        "a view of a result begins where its memory does",
        "passes/canonicalization/opaque.py",
        "    return where, simplified(offset - begins), strides",
        "    return where, 0, strides",
        (VIEWS,),
    ),
    Mutation(
        "views",
        "no result is placed in another's memory",
        "passes/codegen/rewrite.py",
        "            if place is not None and not isinstance(place[0], Elsewhere):\n",
        "            if False:\n",
        ("test_results.py::test_results_that_share_memory_do_so",),
    ),
    Mutation(
        "views",
        "views of one value that is no result share nothing",
        "passes/codegen/rewrite.py",
        "        if len(alike) > 1 and same_type:\n",
        "        if False:\n",
        ("test_results.py::test_results_that_share_memory_do_so",),
    ),
    Mutation(
        "views",
        "results lie as loops make them",
        "passes/codegen/rewrite.py",
        "value if strides is None else forward.laid_out(value, output, strides)",
        "value",
        ("test_results.py::test_views_of_any_length_show_eagers_rows",),
    ),
)
MARKS = (
    Mutation(
        "marks",
        "marked conjugates are the numbers in memory",
        "passes/canonicalization/marks.py",
        "return writer.call(aten.conj_physical.default, node_argument(node))",
        "return writer.call(aten.clone.default, node_argument(node))",
        ("test_canonical.py::test_row",),
    ),
    Mutation(
        "marks",
        "marked negatives are the numbers in memory",
        "passes/canonicalization/marks.py",
        "return writer.call(aten.neg.default, node_argument(node))",
        "return writer.call(aten.clone.default, node_argument(node))",
        ("test_canonical.py::test_row",),
    ),
    Mutation(
        "marks",
        "a marked input is read as it lies",
        "passes/codegen/rewrite.py",
        'self._unmarked(outer, made) if is_tensor(node) and is_marked(node.meta["val"]) else made',
        "made",
        ("test_results.py::test_numbers_that_are_marked_as_conjugates",),
    ),
    Mutation(
        "marks",
        "a marked gradient is read as it lies",
        "streamfx/runtime/outer.py",
        "        if self._is_backward:\n            arguments[:] = map(unmarked, arguments)\n",
        "",
        ("test_results.py::test_gradients_that_are_marked_as_conjugates",),
    ),
    Mutation(
        "marks",
        "marked memory that is returned is streamed",
        "passes/canonicalization/marks.py",
        "marked = next((value for value in read if any(map(_is_marked, shown_by(value)))), None)",
        "marked = None",
        ("test_results.py::test_a_result_that_is_marked",),
    ),
)
SEGMENTS = (
    Mutation(
        "segments",
        "inputs that lie in another order take the same code",
        "streamfx/runtime/segments.py",
        f"{LIE}{PREPARED}several)",
        f"{LIE.replace(', value.stride()', '')}{PREPARED}several)",
        ("test_bodies.py::test_inputs_that_lie_otherwise_take_other_code",),
    ),
    Mutation(
        "segments",
        "code holds for all sizes of its family",
        FORMS,
        "return n is not None and (self.family.at is None or self.holds(n))",
        "return n is not None",
        ("test_bodies.py::test_inductor_settles_a_size",),
    ),
    Mutation(
        "segments",
        "code is shared by all types",
        FORMS,
        "kinds.append((value.dtype, value.device, value.dim()))",
        "kinds.append((value.device, value.dim()))",
        ("test_bodies.py::test_inputs_that_lie_otherwise_take_other_code",),
    ),
    Mutation(
        "segments",
        "code is shared by all strides",
        FORMS,
        "            numbers += strides_of(value)\n",
        "            numbers += strides_of(value.contiguous())\n",
        ("test_bodies.py::test_inputs_that_lie_otherwise_take_other_code",),
    ),
    Mutation(
        "segments",
        "what compilation asked of a size holds for all",
        "streamfx/torch_private/sizes.py",
        " and all(_is_met(item, symbol, number) for item in conditions)",
        "",
        ("test_bodies.py::test_sizes_that_compilation_settles",),
    ),
    Mutation(
        "segments",
        "bodies take the user's CUDA graphs, and are tuned ahead on arguments of full size",
        INDUCTOR,
        'options = {"config_patches": {**BODY_SETTINGS, **WITH_BARRIERS}}',
        'options = {"config_patches": dict(WITH_BARRIERS)}',
        ("test_bodies.py::test_settings_of_bodies",),
    ),
    Mutation(
        "segments",
        "a body whose compilation ran out of memory runs eagerly for good",
        INDUCTOR,
        "(InductorMemoryError if is_out_of_memory(error) else InductorFailed)",
        "InductorFailed",
        ("test_bodies.py::test_a_body_is_compiled_when_memory_is_free_again",),
    ),
)
SHARDS = (
    Mutation(
        "shards",
        "a gathered buffer has the pattern of its shard",
        "passes/canonicalization/unshard.py",
        'known = {name: value for name, value in primal.meta.items() if name != "streamfx_pattern"}',
        "known = dict(primal.meta)",
        ("test_collectives.py::test_a_mask_that_is_gathered_is_not_that_of_its_shard",),
    ),
    Mutation(
        "shards",
        "what a wrapped module hands on is made once its weights are freed",
        "streamfx/torch_private/fsdp.py",
        "        return any(group is not None and group.post_forward_mesh_info is not None for group in groups)\n",
        "        return False\n",
        ("test_fsdp2.py::test_ways_of_fsdp2[0]",),
    ),
    Mutation(
        "shards",
        "layers with other numbers in their buffers share a graph",
        "streamfx/integrations/parts.py",
        "    return own.keys() == others.keys() and all(_is_same(own[name], others[name]) for name in own)\n",
        "    return own.keys() == others.keys()\n",
        ("test_fsdp2.py::test_ways_of_fsdp2[0]",),
    ),
)
PAIRS = (
    Mutation(
        "shards",
        "gradients are those of inputs in the same places",
        "streamfx/ir/joint.py",
        "inputs = self.inputs if told is None else told",
        "inputs = self.inputs",
        ("test_collectives.py::test_a_frozen_weight_has_no_gradient",),
    ),
)
TOGETHER = (
    Mutation(
        "buckets",
        "sums and largest values are one call",
        "passes/codegen/buckets.py",
        "return node.target, node.args[1:], value.dtype, value.device",
        "return node.target, value.dtype, value.device",
        ("test_buckets.py::test_what_runs_as_one[other operators, reductions, types]",),
    ),
    Mutation(
        "buckets",
        "values of two types are one call",
        "passes/codegen/buckets.py",
        "return node.target, node.args[1:], value.dtype, value.device",
        "return node.target, node.args[1:], value.device",
        ("test_buckets.py::test_what_runs_as_one[other operators, reductions, types]",),
    ),
    Mutation(
        "buckets",
        "one call reduces what is made of its own result",
        "passes/codegen/buckets.py",
        "if not set(bucket).isdisjoint(node.all_input_nodes)",
        "if False",
        ("test_buckets.py::test_what_runs_as_one[what is made of another]",),
    ),
    Mutation(
        "buckets",
        "what has waited is begun before what can begin at once",
        "passes/codegen/buckets.py",
        "return sorted(nodes, key=waits.__getitem__)",
        "return list(nodes)",
        ("test_buckets.py::test_what_runs_as_one[what is made of another]",),
    ),
)
ROWS = (*KERNELS, *WRITTEN, *HANDED_OVER, *SHOWN, *MARKS, *SEGMENTS, *SHARDS, *PAIRS, *TOGETHER)
