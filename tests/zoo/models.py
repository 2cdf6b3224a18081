"""A tiny model of any type in float64, and inputs for it."""

from functools import cache
from typing import Any

import torch
from torch import nn

from tests.zoo.configs import DATA, VOCABULARY, tiny

ROWS, BATCH, CHUNK = 22, 2, 5


def model_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def built(model_type: str) -> nn.Module:
    """The model with random weights, large enough that attention is not uniform and no norm is the identity."""
    torch.manual_seed(0)
    model = constructed(model_type).double()
    model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else a warning in the loss may break the graph
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and float(parameter.std()) < 0.1:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
            elif parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def constructed(model_type: str) -> nn.Module:
    """An instance of the class in the mapping, with the part of the configuration that fits the class."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config, kind = tiny(model_type), getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    parts = [config, *(part for part in vars(config).values() if isinstance(part, kind.config_class))]
    fitting = [part for part in parts if isinstance(part, kind.config_class)]
    model: nn.Module = kind(fitting[0]) if fitting else transformers.AutoModelForCausalLM.from_config(config)
    return model


def inputs(model_type: str, model: nn.Module) -> dict[str, Any]:
    torch.manual_seed(1)
    rows = ROWS_OF.get(model_type, ROWS)
    batch = BATCH * getattr(model.config, "num_codebooks", 1)
    ids = torch.randint(3, VOCABULARY - 8, (batch, rows))
    return {"input_ids": ids} if model_type in WITHOUT_LABELS else {"input_ids": ids, "labels": ids.clone()}


# types with blocks of rows get several blocks; reformer needs a product of two sizes
ROWS_OF = {"reformer": 24, "xlstm": 43, **dict.fromkeys(DATA["blocks of 64 rows"], 150)}
BY_DEFAULT_DOUBLE = {"xglm"}  # it converts a float64 limit to a tensor of the default type
WITHOUT_LABELS = {"git", "musicgen", "musicgen_melody"}  # their losses need images or codes


def dtype_of(model_type: str) -> torch.dtype:
    """The default dtype that a model of the type is built and run with."""
    return torch.float64 if model_type in BY_DEFAULT_DOUBLE else torch.get_default_dtype()


@cache
def grouped_products_in_float64() -> None:
    """Experts use the grouped product of transformers, also in eager: torch's has no float64. Its FLOPs are counted."""
    from torch.utils.flop_counter import register_flop_formula
    from transformers.integrations import moe

    moe._can_use_grouped_mm = lambda *_: False
    operators = torch.ops.transformers
    operators.grouped_mm_fallback  # noqa: B018  (the look-up registers it)

    def forward(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
        return 2 * int(rows[0]) * int(rows[1]) * int(weights[2])

    def backward(rows: Any, weights: Any, *_: Any, **__: Any) -> int:
        return 2 * forward(rows, weights)

    register_flop_formula(operators.grouped_mm_fallback)(forward)
    register_flop_formula(operators.grouped_mm_fallback_backward)(backward)
