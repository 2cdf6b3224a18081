"""Lazy outputs: large graph outputs that are cheap to recompute, and are computed only if they are used.

The option `outputs="lazy"` enables them. In the code, such an output is *deferred*: the caller gets a `DeferredTensor`.

This package rewrites Dynamo graphs to return small values, and gives callers tensors that recompute the large ones on demand. It
knows the values of Dynamo graphs and autograd, and reaches the compiler only through `recompute.UseCompiler`. It may import
`streamfx.passes`, `streamfx.cost` and the layers below them, but neither reports nor the frontend.
"""

from streamfx.lazy.rewrite import Deferral, defer_outputs

__all__ = ["Deferral", "defer_outputs"]
