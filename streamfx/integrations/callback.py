"""A callback of transformers' trainers: streams while the trainer trains, for places that take callbacks and show no trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback

from streamfx.integrations.again import enabled, enabled_in
from streamfx.integrations.enabled import EnabledModules, check_dynamic
from streamfx.options import merged

ORIGIN = "streamfx.integrations.StreamCallback(...)"


class StreamCallback(TrainerCallback):
    """Streams the model of a transformers `Trainer`, or of one of TRL's, from the begin of training to its end.

    The model is enabled once the trainer and its engines have wrapped it. After the first step a line says what streams; at the
    end the model runs as it did before. What `streamfx.enable` had enabled with the same options before stays so. A training
    that ends with an error ends no callback: the model stays enabled, and a next training goes on with it. A reference or a
    teacher that the trainer holds is not seen here; `streamfx.enable(trainer)` compiles it, too.

    Args:
        dynamic: as in `torch.compile`, and in `streamfx.enable`.
        options: the backend's, as a dictionary or `streamfx.Options`.
        keywords: the same by their names (`chunk_size=1024`).

    Raises:
        OptionError: an option that does not exist, or a value that it cannot have.
        IntegrationError: when training begins, what `streamfx.enable` raises for the model.

    Example:
        >>> from streamfx.integrations import StreamCallback
        >>> callback = StreamCallback(chunk_size=1024)  # Trainer(..., callbacks=[callback])
        >>> callback.enabled is None  # until training begins
        True
    """

    def __init__(self, *, dynamic: bool | None = None, options: Any = None, **keywords: Any) -> None:
        check_dynamic(dynamic)
        self.options, self.dynamic = merged(options, keywords, ORIGIN), dynamic
        self.enabled: EnabledModules | None = None  # what is, or was last, enabled
        self._is_own = self._has_told = False

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Enable the model."""
        trainer = SimpleNamespace(model=model, args=args)
        before = enabled_in(model)
        self.enabled, self._has_told = enabled(trainer, self.options, self.dynamic), False
        self._is_own = self._is_own or self.enabled not in before

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Say after the first step what streams, on the first process."""
        if self._has_told or self.enabled is None:
            return
        self._has_told = True
        if state.is_world_process_zero:
            lines = list(dict.fromkeys(compiled.text for compiled in self.enabled.compiled))
            print(f"streamfx: {'; '.join(lines) or 'no step was compiled: print what StreamCallback.enabled says'}", flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Let the model run as it did before."""
        if self.enabled is not None and self._is_own:
            self.enabled.disable()
            self._is_own = False
