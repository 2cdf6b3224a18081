"""Resource limits that the operating system sets for this process."""

from __future__ import annotations


def limit_of(resource_name: str) -> int | None:
    """Return the soft limit of a resource in bytes, by its name in Python's module `resource`, for example "RLIMIT_AS".

    None if it is unlimited, or if the system has no such limit.
    """
    try:
        import resource

        limit: int = resource.getrlimit(getattr(resource, resource_name))[0]
    except (ImportError, AttributeError):
        return None
    return None if limit == resource.RLIM_INFINITY else limit
