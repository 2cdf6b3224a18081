"""What the operating system lets this process have."""

from __future__ import annotations


def limit_of(resource_name: str) -> int | None:
    """The soft limit of a resource in bytes, by its name in the module `resource`; None if there is none."""
    try:
        import resource

        limit: int = resource.getrlimit(getattr(resource, resource_name))[0]
    except (ImportError, AttributeError):
        return None
    return None if limit == resource.RLIM_INFINITY else limit
