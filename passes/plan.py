"""How large is a chunk, and what is kept from the forward half?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from streamfx.ir.facts import Facts
from streamfx.ir.plan import ChunkPlan


@dataclass(frozen=True)
class Plan:
    name: ClassVar[str] = "plan"
    chunk_size: int | Literal["auto"] = "auto"
    loss_chunk_size: int | Literal["auto"] = "auto"
    save: str = "auto"

    def apply(self, facts: Facts) -> Facts:
        stages = facts.stages.stages
        chunk = 1024 if self.chunk_size == "auto" else self.chunk_size
        loss_chunk = 512 if self.loss_chunk_size == "auto" else self.loss_chunk_size
        sizes = tuple(loss_chunk if stage.gradient_in_forward else chunk for stage in stages)
        return replace(facts, plan=ChunkPlan(sizes, tuple(() for _ in stages)))
