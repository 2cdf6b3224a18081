"""A stand-in for the flash-attn package: what it registers and exports (2.8), with plain arithmetic, on any device."""

from flash_attn.interface import flash_attn_func, flash_attn_varlen_func

__version__ = "2.8.3"
__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_with_kvcache(*_: object, **__: object) -> None:
    """Other packages import it; these tests do not generate."""
    raise NotImplementedError
