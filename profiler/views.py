"""A layer sequence and a profile as notebooks show them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profiler.html import block, paragraph, table
from profiler.text import counted

if TYPE_CHECKING:
    from profiler.record import LayerCost, Profile
    from profiler.tracing.sequence import LayerSequence

MS, MIB = 1e-3, 2**20
_TEXT = frozenset({"name"})


def sequence_html(sequence: LayerSequence) -> str:
    """One line on the whole, and one row a layer: what it computes and what crosses the boundary after it."""
    size = sequence.sample.batch_size
    rows = [
        [
            str(layer.index),
            layer.name,
            f"{len(layer.operations):,}",
            f"{sum(sequence.parameters[name].numel() for name in layer.parameters):,}",
            f"{layer.flops / 1e9:,.3g}",
            str(len(crossing)),
            f"{sum(value.size_bytes(size) for value in crossing) / MIB:,.3g}",
        ]
        for layer, crossing in zip(sequence.layers, sequence.boundaries[1:], strict=True)
    ]
    heads = ["layer", "name", "operations", "parameters", "GFLOP", "values after it", "MiB after it"]
    note = (
        f"GFLOP and MiB are of {counted(size, 'sample')}; what is after a layer crosses the boundary if it is cut "
        "there."
    )
    return block(paragraph(repr(sequence)), table(heads, rows, left=_TEXT), paragraph(note))


def profile_html(profile: Profile) -> str:
    """A table for each kind of device: one row a layer, at the largest micro-batch that was measured."""
    trainable = sum(entry.elements for entry in profile.parameters if entry.trainable)
    elements = sum(entry.elements for entry in profile.parameters)
    parts = [
        paragraph(
            f"Profile of {counted(len(profile.layers), 'layer')}, {elements:,} parameters, of them "
            f"{trainable:,} trainable"
        )
    ]
    for kind in dict.fromkeys(cost.device_kind for cost in profile.costs):
        sizes = sorted({cost.micro_batch_size for cost in profile.costs if cost.device_kind == kind})
        shown = [cost for cost in profile.costs if (cost.device_kind, cost.micro_batch_size) == (kind, sizes[-1])]
        source = "estimated from a data sheet" if any(e.device_kind == kind for e in profile.estimates) else "measured"
        listed = ", ".join(map(str, sizes))
        parts.append(paragraph(f"{kind}, {source} for micro-batches of {listed} samples; below, of {sizes[-1]}:"))
        parts.append(_cost_table(profile, sorted(shown, key=lambda cost: cost.layer)))
    parts.extend(
        paragraph(
            f"link: {link.latency_s / 1e-6:.3g} us and {link.bytes_per_s / 1e9:.3g} GB/s"
            + (", of which its ends copy {:.0%} and {:.0%}".format(*link.copied) if any(link.copied) else "")
        )
        for link in profile.links
    )
    return block(*parts)


def _cost_table(profile: Profile, costs: list[LayerCost]) -> str:
    heads = ["layer", "name", "forward in ms", "recompute in ms", "backward in ms", "spread", "kept in MiB"]
    heads += ["transient in MiB", "crossing after it in MiB"]
    rows = [
        [
            str(cost.layer),
            profile.layers[cost.layer].name,
            *(f"{seconds / MS:,.4g}" for seconds in (cost.forward_s, cost.recompute_s, cost.backward_s)),
            f"{cost.spread:.1%}",
            *(f"{size / MIB:,.4g}" for size in (cost.kept_bytes, cost.transient_bytes, cost.output_bytes)),
        ]
        for cost in costs
    ]
    return table(heads, rows, left=_TEXT)
