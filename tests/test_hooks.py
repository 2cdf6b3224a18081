"""Promise one, with hooks: on parameters, on gradients, and on the tensors that are saved for the backward."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.twins import batch, compiled, same_gradients, twins


def test_parameter_hooks_fire_once() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    fired: list[str] = []
    for name, parameter in own.named_parameters():
        parameter.register_hook(lambda gradient, name=name: fired.append(name))  # type: ignore[misc]
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(f"{name} after"))  # type: ignore[misc]
    function(**batch()).backward()
    names = [name for name, _ in own.named_parameters()]
    assert sorted(fired) == sorted([*names, *(f"{name} after" for name in names)])
    eager(**batch()).backward()
    same_gradients(own, eager)


def test_a_hook_that_scales_a_gradient() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    for model in (own, eager):
        model.get_parameter("head.weight").register_hook(lambda gradient: 2 * gradient)
    function(**batch()).backward()
    eager(**batch()).backward()
    same_gradients(own, eager)


def test_optimizer_in_the_backward_pass() -> None:
    """Each parameter is updated as soon as its gradient is there, in the middle of the backward pass."""

    def descend(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.add_(parameter.grad, alpha=-0.1)

    own, eager = twins()
    function, _ = compiled(own)
    for model in (own, eager):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(descend)
    for _ in range(2):
        function(**batch()).backward()
        eager(**batch()).backward()
    for one, other in zip(own.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_saved_tensors_hooks() -> None:
    """Whatever packs and unpacks saved tensors sees all of ours, each once."""
    own, eager = twins()
    function, _ = compiled(own)
    packed: list[Tensor] = []
    unpacked: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.clone()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = function(**batch())
    loss.backward()
    eager(**batch()).backward()
    same_gradients(own, eager)
    assert len(packed) == len(unpacked) > 0


def test_offload_of_saved_tensors() -> None:
    own, eager = twins()
    function, _ = compiled(own)
    with torch.autograd.graph.save_on_cpu():
        loss = function(**batch())
    loss.backward()
    eager(**batch()).backward()
    same_gradients(own, eager)
