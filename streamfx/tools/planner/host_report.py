"""The part of a plan's report about the host: its memory, copies to and from it, and the optimizer's step there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from streamfx.budget import format_bytes
from streamfx.tools.planner.devices import Device
from streamfx.tools.planner.predict import Prediction
from streamfx.tools.report.text import in_seconds

ASSUMED_HOST = "60 % of the published rate of each device's own link"
WHILE_LOOPS_RUN = "copied while loops run"
BEFORE_LAYERS = "weights, and values that a layer's backward reads, are copied before the layer runs; all else while loops run"
ASSUMED_STEP = "60 % of the published rate of 8 channels of DDR5-4800"
VALUES = "offloaded values"


def host_summary(
    prediction: Prediction, limit: int | None, device: Device, devices: int, waited: float, step: tuple[float, float]
) -> dict[str, Any] | None:
    """Return the bytes kept on the host and copied, or None if there are none. Times are None if the rate is unknown.

    `limit` are the bytes of the host for each of its `devices`. `waited` are the seconds that the device waits for copies, `step`
    those of the optimizer's step on the host, and those that the device waits for it.
    """
    size, weights = prediction.host_bytes, prediction.host_weights
    if not size:
        return None
    copied = sum(interval.copies.left + interval.copies.fetched for interval in prediction.overlap_intervals)
    found: dict[str, Any] = {
        "bytes": size,
        "devices": devices,
        "bytes_of_all": size * devices,
        "memory": None if limit is None else limit * devices,
        "copied_bytes": copied + (0 if weights is None else weights.fetched_bytes + weights.gradient_bytes),
        "bytes_per_second": device.to_host,
        "seconds": None,
        "waited_seconds": None,
    }
    if device.to_host:
        found |= {"seconds": device.copying(found["copied_bytes"]), "waited_seconds": waited}
    if weights is not None:
        by_term = {**weights.host, VALUES: size - sum(weights.host.values())}
        found["by_term"] = {name: term for name, term in by_term.items() if term}
        found |= {"step_bytes": weights.step_bytes, "step_seconds": step[0], "step_waited_seconds": step[1]}
    return found


def host_lines(host: dict[str, Any] | None) -> Iterator[str]:
    """Yield the bytes on the host, the bytes copied there and back, and the times of copies and of the optimizer's step."""
    if host is None:
        return
    limit = "" if host["memory"] is None else f" of {format_bytes(host['memory'])}"
    all_devices = f", {format_bytes(host['bytes_of_all'])}{limit} for the {host['devices']} of a machine"
    devices, terms = all_devices if host["devices"] > 1 else limit, host.get("by_term", {})
    yield (
        f"  host     {format_bytes(host['bytes'])}{devices}:"
        if terms
        else (f"  host     {format_bytes(host['bytes'])} offloaded until the backward pass{devices}")
    )
    for name, size in terms.items():
        yield f"             {format_bytes(size):>10}  {name}"
    copied, rate = f"{format_bytes(host['copied_bytes'])} copied to the host and back", host["bytes_per_second"]
    if rate is None:
        yield f"           {copied}, in a time that is not counted: the rate is unknown"
    else:
        duration, waited = in_seconds(host["seconds"]), in_seconds(host["waited_seconds"])
        yield f"           {copied} at {format_bytes(int(rate))} per second: {duration}, of which {waited} are waited for"
        yield f"           {ASSUMED_HOST}; {BEFORE_LAYERS if terms else WHILE_LOOPS_RUN}"
    if host.get("step_bytes"):
        duration, waited = in_seconds(host["step_seconds"]), in_seconds(host["step_waited_seconds"])
        size = format_bytes(host["step_bytes"])
        yield f"           {size} read and written by the optimizer's step: {duration}, of which {waited} are waited for"
        yield f"           {ASSUMED_STEP}"
