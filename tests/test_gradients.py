"""Promise one: gradients equal eager autograd's, over models, layouts, lengths and chunk sizes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from tests.support import decoders, hf, layouts
from tests.support.exactness import compare
from tests.support.spread import only

LENGTH = 13  # prime, and unlike every other size
CHUNKS = (1, 16)  # besides 7; 16 holds the whole sequence
long = pytest.mark.long


def batch_of(layout: str, batch: int = 2, length: int = LENGTH) -> layouts.Batch:
    return layouts.LAYOUTS[layout](layouts.tokens(hf.VOCABULARY, batch, length))


# -- Hugging Face models


# the other types, and the other attention of these, come with the layouts below or with --long
EVERY_TIME = [
    ("llama", "sdpa"),
    ("gemma2", "eager"),
    ("gemma3_short", "sdpa"),
    ("olmo2", "eager"),
]


@pytest.mark.parametrize(("name", "attention"), only(EVERY_TIME, hf.IMPLEMENTATIONS))
def test_huggingface_models(name: str, attention: str) -> None:
    compare(
        hf.made(name, attention),
        batch_of("plain"),
        also=CHUNKS,
        attention=hf.verdicts(name, attention),
    )


def layout_cases() -> list[tuple[str, str, str]]:
    """Every layout with fused and with spelled-out attention, the models taken in turn."""
    turn = ["llama", "mistral", "gpt2", "qwen3_tied", "phi3", "gpt_neox", "olmo2"]
    names = [name for name in layouts.LAYOUTS if name != "plain"]
    return [
        (turn[i % len(turn)], ("sdpa", "eager")[(i + j) % 2], layout)
        for j in range(2)
        for i, layout in enumerate(names, start=3 * j)
    ]


# labels like those of others, in the same graph
MORE_LABELS = {
    case for case in layout_cases() if case[2] in ("multi_turn", "prompt_masked", "sparse_labels", "a_row_without_labels")
}


@pytest.mark.parametrize(("name", "attention", "layout"), only(set(layout_cases()[::2]) - MORE_LABELS, layout_cases()))
def test_layouts(name: str, attention: str, layout: str) -> None:
    compare(
        hf.made(name, attention),
        batch_of(layout),
        also=(1, 16),
        attention=hf.verdicts(name, attention, layout),
    )


@long
@pytest.mark.parametrize("layout", list(layouts.LAYOUTS))
@pytest.mark.parametrize(("name", "attention"), hf.IMPLEMENTATIONS)
def test_every_model_with_every_layout(name: str, attention: str, layout: str) -> None:
    for batch, length in ((1, 13), (3, 14), (2, 5)):
        expected = hf.verdicts(name, attention, layout) if length > hf.WINDOW else None
        compare(hf.made(name, attention), batch_of(layout, batch, length), also=(1, 16, length), attention=expected)


# -- lengths that could be mistaken for other sizes

SIZES = {
    "equal to the batch": (3, 3),
    "equal to the head size": (2, hf.HEAD),
    "equal to the width": (2, hf.WIDTH),
    "equal to the vocabulary": (2, hf.VOCABULARY),
    "batch of one": (1, 13),
    "batch equal to the width": (hf.WIDTH, 5),
    "all equal to the head size": (hf.HEAD, hf.HEAD),
    "a multiple of the chunk": (2, 14),
    "shorter than a chunk": (2, 3),
    "two": (2, 2),
}


ALIKE = [
    ("sdpa", "two"),
    ("eager", "all equal to the head size"),
    ("eager", "shorter than a chunk"),
]


@pytest.mark.parametrize(("attention", "size"), only(ALIKE, list(product(("sdpa", "eager"), SIZES))))
def test_lengths(attention: str, size: str) -> None:
    """Two tokens leave one label, an axis of size one: the loss then runs whole."""
    batch, length = SIZES[size]
    batched = batch_of("plain", batch, length)
    compare(hf.made("llama", attention), batched, also=(1, 16), attention={"causal"}, streams=length > 2 or None)


@pytest.mark.parametrize("attention", only(["eager"], ["sdpa", "eager"]))
def test_length_of_one(attention: str) -> None:
    """There is nothing to stream, and nothing may break."""
    compare(hf.made("llama", attention), batch_of("plain", 2, 1), also=(1, 16), streams=None)


SQUARE = {
    "equal to the batch": (7, 7),
    "equal to the head size": (2, decoders.HEAD),
    "equal to the width": (2, decoders.WIDTH),
    "equal to the heads": (3, decoders.HEADS),
    "equal to the vocabulary": (2, decoders.VOCABULARY),
    "batch times length equal to the vocabulary": (1, decoders.VOCABULARY),
}


SQUARE_EVERY_TIME = [
    ("equal to the batch", "einsum"),
    ("equal to the head size", "triangle"),
    ("batch times length equal to the vocabulary", "triangle"),
]


@pytest.mark.parametrize(("size", "name"), only(SQUARE_EVERY_TIME, list(product(SQUARE, ("plain", "triangle", "einsum")))))
def test_lengths_of_handwritten_decoders(size: str, name: str) -> None:
    batch, length = SQUARE[size]
    compare(
        decoders.made(decoders.CAUSAL[name]),
        handwritten_batch(batch, length),
        chunk_size=4,
        also=(1, 5),
        attention={"causal"},
        streams=length > 2 or None,
    )


# -- decoders in other styles


def handwritten_batch(batch: int = 2, length: int = LENGTH) -> dict[str, Tensor]:
    return {
        "ids": layouts.tokens(decoders.VOCABULARY, batch, length),
        "labels": layouts.tokens(decoders.VOCABULARY, batch, length, seed=1),
    }


HARDEST = ["grouped", "additive_triangle", "einsum", "complex_rope"]


@pytest.mark.parametrize("name", only(HARDEST, decoders.CAUSAL))
def test_handwritten_decoders(name: str) -> None:
    compare(decoders.made(decoders.CAUSAL[name]), handwritten_batch(), also=CHUNKS, attention={"causal"})


@pytest.mark.parametrize("name", only(["fused_window"], decoders.WINDOWED))
def test_sliding_windows(name: str) -> None:
    window = {f"window({decoders.WindowHeads.window})"}
    compare(decoders.made(decoders.WINDOWED[name]), handwritten_batch(length=23), chunk_size=3, also=(1, 7, 23), attention=window)


@pytest.mark.parametrize("name", decoders.OPEN)
def test_attention_without_a_mask(name: str) -> None:
    """Not causal: queries stream over all keys, whose gradients are complete only behind a barrier."""
    compare(decoders.made(decoders.OPEN[name]), handwritten_batch(), also=CHUNKS, attention={"masked"})


def test_time_first() -> None:
    batch = {name: value.T.contiguous() for name, value in handwritten_batch().items()}
    compare(decoders.made(decoders.TimeFirst), batch, also=CHUNKS, attention={"causal"})


def test_time_first_with_as_many_steps_as_rows() -> None:
    batch = {name: value.T.contiguous() for name, value in handwritten_batch(8, 8).items()}
    compare(decoders.made(decoders.TimeFirst), batch, chunk_size=3, also=(1,), attention={"causal"})


@pytest.mark.parametrize(
    "length", only([decoders.WIDTH, decoders.HEAD], [13, decoders.WIDTH, decoders.HEAD, decoders.VOCABULARY])
)
def test_unbatched(length: int) -> None:
    batch = {name: value[0] for name, value in handwritten_batch(1, length).items()}
    compare(decoders.made(decoders.Unbatched), batch, chunk_size=5, also=(1, 16, length), attention={"causal"})


@pytest.mark.parametrize("shifted_inside", [False, True])
def test_nano_gpt(shifted_inside: bool) -> None:
    """Logits and loss both come out; the loss is on given targets, or on `logits[:, :-1]`."""
    ids = layouts.tokens(decoders.VOCABULARY, 2, LENGTH)
    targets = ids.clone()
    targets[0, 4:9] = layouts.IGNORED
    model = decoders.made(lambda: decoders.NanoGPT(shifted_inside=shifted_inside))
    compare(model, {"ids": ids, "targets": targets}, also=CHUNKS, attention={"causal"}, reduce=lambda out: out[1])


@pytest.mark.parametrize("memory", [5, LENGTH, decoders.WIDTH])
def test_cross_attention(memory: int) -> None:
    """Keys of another sequence, whose gradients are sums over all chunks."""
    batch = {**handwritten_batch(), "memory": torch.randn(2, memory, decoders.WIDTH, dtype=torch.float64, requires_grad=True)}
    compare(decoders.made(decoders.CrossAttention), batch, also=CHUNKS)


def test_padding_mask() -> None:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, :3], mask[1, 9:] = 0, 0
    batch = {**handwritten_batch(), "attention_mask": mask}
    compare(decoders.made(decoders.PaddingMask), batch, also=CHUNKS)


@pytest.mark.parametrize("kind", only(["additive"], ["boolean", "additive"]))
def test_mask_from_outside(kind: str) -> None:
    document = layouts.documents(LENGTH)
    mask: Tensor = (document[:, None] == document[None, :]).tril().expand(2, 1, -1, -1).contiguous()
    if kind == "additive":
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    compare(decoders.made(decoders.GivenMask), {**handwritten_batch(), "mask": mask}, also=CHUNKS, attention={"masked"})


def test_gradient_of_a_bias_from_outside() -> None:
    """A learned bias on the scores: its gradient has rows and keys."""
    bias = torch.randn(1, 1, LENGTH, LENGTH, dtype=torch.float64, requires_grad=True)
    compare(decoders.made(decoders.GivenMask), {**handwritten_batch(), "mask": bias}, also=CHUNKS, streams=None)


@long
@pytest.mark.parametrize("name", [*decoders.CAUSAL, *decoders.WINDOWED, *decoders.OPEN])
@pytest.mark.parametrize(("batch", "length"), [*SQUARE.values(), (1, 2), (2, 3), (1, 31), (4, 16)])
def test_every_handwritten_decoder_with_every_length(name: str, batch: int, length: int) -> None:
    every = {**decoders.CAUSAL, **decoders.WINDOWED, **decoders.OPEN}
    compare(decoders.made(every[name]), handwritten_batch(batch, length), chunk_size=4, also=(1, 7, 16, length))


# -- no model at all


class Pieces(nn.Module):
    """What graph breaks leave: a stretch of a decoder with activations in and out."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.decoder = decoders.Plain(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder.hidden(x)


@pytest.mark.parametrize("layers", only([2], [1, 2]))
def test_backbone_with_dense_gradients(layers: int) -> None:
    x = torch.randn(2, LENGTH, decoders.WIDTH, dtype=torch.float64, requires_grad=True)
    compare(decoders.made(lambda: Pieces(layers)), (x,), also=CHUNKS, attention={"causal"})


def test_lone_layer_of_a_huggingface_model() -> None:
    """FSDP compiles layer by layer: positions and mask arrive as tensors."""
    model = hf.made("llama")
    x = torch.randn(2, LENGTH, hf.WIDTH, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(LENGTH)[None]
    rotary = model.model.rotary_emb(x, positions)  # type: ignore[union-attr,operator]
    layer: nn.Module = model.model.layers[0]  # type: ignore[union-attr,index,assignment]
    compare(
        layer, {"hidden_states": x, "position_embeddings": tuple(t.detach() for t in rotary)}, also=CHUNKS, attention={"causal"}
    )


def test_piece_without_attention() -> None:
    """A lone MLP: the sequence is the axis along which most can be made in parts."""
    x = torch.randn(2, LENGTH, decoders.WIDTH, dtype=torch.float64, requires_grad=True)
    compare(decoders.made(lambda: decoders.SwiGLU(decoders.WIDTH)), (x,), also=CHUNKS)


def test_model_with_a_graph_break() -> None:
    class Broken(decoders.Plain):
        def hidden(self, x: Tensor, **more: object) -> Tensor:
            x = x + self.attend[0](self.norms[0](x))
            torch._dynamo.graph_break()
            x = x + self.attend[1](self.norms[2](x))
            return self.norms[-1](x)

    compare(decoders.made(Broken), handwritten_batch(), also=CHUNKS, graphs=None)


def test_the_registered_name_is_the_same_backend() -> None:
    """By name, as users write it; nothing of streamfx need be imported for that."""
    model, batch = decoders.made(decoders.Plain), handwritten_batch()
    model(**batch).backward()
    truth = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    compiled = torch.compile(model, backend="streambp", options={"chunk_size": 5, "outputs": "dense"})
    compiled(**batch).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, truth[name], rtol=1e-11, atol=1e-14)


CROSS = [(batch, length, chunk) for batch, length, chunk in product((1, 2), (2, 5, 11), (1, 2, 3, 10))]


@long
@pytest.mark.parametrize(("batch", "length", "chunk"), CROSS)
def test_first_chunk_size_is_compiled_not_replayed(batch: int, length: int, chunk: int) -> None:
    compare(decoders.made(decoders.HalfRope), handwritten_batch(batch, length), chunk_size=chunk, attention={"causal"})
