"""A callback for transformers' trainers that enables the model during training, for code that passes callbacks but has
no trainer, and the arguments of a script that uses it. A *handle* (`EnabledModules`) is the result of `streamfx.enable`: it
lists the modules, and disables them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from transformers import TrainerCallback

from streamfx.errors import OptionError
from streamfx.integrations.enabled import EnabledModules, check_dynamic
from streamfx.integrations.repeated_enable import enable_once, enabled_handles
from streamfx.options import merge_options

ORIGIN = "streamfx.integrations.StreamCallback(...)"


class StreamCallback(TrainerCallback):
    """Streams the model of a transformers `Trainer`, or of a TRL trainer, from the start of training to its end.

    The model is enabled after the trainer and its engines have wrapped it. After the first step one line reports how it is
    chunked; at the end the model runs as before. A model that `streamfx.enable` has enabled with the same options stays enabled.
    If training fails, no callback runs: the model stays enabled, and the next training continues with it. The callback does not
    see a reference or teacher model of the trainer; `streamfx.enable(trainer)` also compiles these.

    Args:
        dynamic: as in `torch.compile`, and in `streamfx.enable`.
        options: the backend's, as a dictionary or `streamfx.Options`.
        keywords: options by name (`chunk_size=1024`).

    Raises:
        OptionError: an unknown option, or an invalid value.
        IntegrationError: at the start of training, as `streamfx.enable` for the model.

    Example:
        >>> from streamfx.integrations import StreamCallback
        >>> callback = StreamCallback(chunk_size=1024)  # Trainer(..., callbacks=[callback])
        >>> callback.enabled is None  # until training begins
        True
    """

    def __init__(self, *, dynamic: bool | None = None, options: Any = None, **keywords: Any) -> None:
        """Check the options now; the model is enabled when training begins."""
        check_dynamic(dynamic)
        self.options, self.dynamic = merge_options(options, keywords, ORIGIN), dynamic
        self.enabled: EnabledModules | None = None  # the current or the last handle
        self._owns_handle = False  # whether this callback has enabled the model, and so disables it
        self._has_reported = False

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        """Enable the model. If it is enabled already, with the same options, its handle is kept, and not disabled at the end."""
        trainer = SimpleNamespace(model=model, args=args)
        handles_before = enabled_handles(model)
        self.enabled, self._has_reported = enable_once(trainer, self.options, self.dynamic), False
        self._owns_handle = self._owns_handle or self.enabled not in handles_before

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Report after the first step how the model is chunked, on the first process."""
        if self._has_reported or self.enabled is None:
            return
        self._has_reported = True
        if state.is_world_process_zero:
            lines = list(dict.fromkeys(compiled.text for compiled in self.enabled.compiled))
            print(f"streamfx: {'; '.join(lines) or 'no step was compiled; print(callback.enabled) shows the reason'}", flush=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Disable the model, unless it was enabled before the training."""
        if self.enabled is not None and self._owns_handle:
            self.enabled.disable()
            self._owns_handle = False


@dataclass
class StreamArguments:
    """Arguments of a training script, next to `TrainingArguments`: `--stream --stream_options '{"chunk_size": 1024}'`.

    `HfArgumentParser` and TRL's `TrlParser` read them from the command line or from a YAML file.

    Args:
        stream: whether to train through streamfx.
        stream_options: the backend's options, as JSON; in a YAML file, they may be a mapping.

    Example:
        >>> from transformers import HfArgumentParser
        >>> from streamfx.integrations import StreamArguments
        >>> (arguments,) = HfArgumentParser(StreamArguments).parse_args_into_dataclasses(["--stream"])
        >>> len(arguments.callbacks())  # Trainer(..., callbacks=arguments.callbacks())
        1
    """

    stream: bool = field(default=False, metadata={"help": "train through streamfx"})
    stream_options: str = field(default="{}", metadata={"help": "options of streamfx as JSON, such as '{\"chunk_size\": 1024}'"})

    def callbacks(self) -> list[StreamCallback]:
        """Return the callbacks for the trainer: one `StreamCallback`, or none without `--stream`.

        Raises:
            OptionError: invalid JSON, an unknown option, or an invalid value.
        """
        try:
            options = json.loads(self.stream_options) if isinstance(self.stream_options, str) else self.stream_options
        except json.JSONDecodeError as error:
            do = 'write for example {"chunk_size": 1024}'
            raise OptionError("stream_options must be JSON", found=f"{self.stream_options!r}: {error}", do=do) from None
        return [StreamCallback(options=options)] if self.stream else []
