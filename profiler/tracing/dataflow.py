"""What travels between layers and why, as a frame, as a graph, and as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from profiler.errors import ArgumentError
from profiler.skip_value import SkipValue
from profiler.text import counted

if TYPE_CHECKING:
    import networkx
    import pandas
    from matplotlib.axes import Axes

    from profiler.tracing.sequence import BoundaryValue, LayerSequence

MOST_LAYERS_IN_A_PICTURE = 60
SENT = "sent: computed with parameters, random numbers or a gradient, or dear for its size"
RECOMPUTED = "computed by each stage: depends on inputs alone and is cheaper than sending"
INPUT = "raw input: each stage has it"


def skip_users(sequence: LayerSequence) -> dict[BoundaryValue, tuple[int, ...]]:
    """The values that some layer between two of their users does not read, each with these users, ascending.

    They are the layer that computes it and those that read it; the last layer stands for the model's output. A value
    that carries a gradient only after a layer has written it is left out: at some boundaries one comes back, at others
    not.
    """
    found = {}
    alike: dict[str, set[BoundaryValue]] = defaultdict(set)
    for boundary in sequence.boundaries:
        for value in boundary:
            alike[value.name].add(value)
    everywhere = dict.fromkeys(value for boundary in sequence.boundaries for value in boundary)
    for value in (value for value in everywhere if len(alike[value.name]) == 1):
        users = tuple(sorted({value.producer, *(min(user, len(sequence) - 1) for user in value.consumers)}))
        if any(later - earlier > 1 for earlier, later in pairwise(users)):
            found[value] = users
    return found


def skip_values(sequence: LayerSequence, sizes: Iterable[int]) -> tuple[SkipValue, ...]:
    """The values of `skip_users` as a profile holds them."""
    ascending = sorted(set(sizes))
    return tuple(
        SkipValue(
            name=value.name,
            users=users,
            has_gradient=value.requires_grad,
            size_bytes=tuple((size, value.size_bytes(size)) for size in ascending),
        )
        for value, users in skip_users(sequence).items()
    )


def travel_frame(sequence: LayerSequence) -> pandas.DataFrame:
    """One row for each boundary and value that is read after it, see `LayerSequence.travel_frame`."""
    import pandas

    rows = []
    for boundary in range(1, len(sequence)):
        sent = [(value, SENT) for value in sequence.boundaries[boundary]]
        free = [
            (value, INPUT if value.name in sequence.inputs else RECOMPUTED)
            for value in sequence.free_values
            if value.consumers[-1] >= boundary
        ]
        for value, reason in (*sent, *free):
            rows.append({"boundary": boundary, **_described(sequence, value), "reason": reason})
    columns = ["boundary", "value", "dtype", "shape", "bytes", "producer", "consumers", "requires_grad", "reason"]
    return pandas.DataFrame(rows, columns=columns)


def _described(sequence: LayerSequence, value: BoundaryValue) -> dict[str, Any]:
    names = [*(layer.name for layer in sequence.layers), "output"]
    return {
        "value": value.name,
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": str(list(value.shape)),
        "bytes": value.size_bytes(sequence.sample.batch_size),
        "producer": names[value.producer] if value.producer >= 0 else "",
        "consumers": ", ".join(names[index] for index in value.consumers),
        "requires_grad": value.requires_grad,
    }


def dataflow(sequence: LayerSequence) -> networkx.MultiDiGraph[int]:
    """Layers as nodes (`name`), values that cross boundaries as edges (`value`, `bytes`) to each of their readers.

    The model's output is the node after the last layer.
    """
    import networkx

    graph: networkx.MultiDiGraph[int] = networkx.MultiDiGraph()
    for layer in sequence.layers:
        graph.add_node(layer.index, name=layer.name)
    graph.add_node(len(sequence), name="output")
    values = {value.name: value for boundary in sequence.boundaries for value in boundary}
    for value in values.values():
        size = value.size_bytes(sequence.sample.batch_size)
        for reader in value.consumers:
            graph.add_edge(value.producer, reader, value=value.name, bytes=size)
    last = len(sequence) - 1
    if not graph.has_edge(last, len(sequence)):
        graph.add_edge(last, len(sequence), value="output", bytes=0)
    return graph


def plot_dataflow(sequence: LayerSequence, axes: Axes | None = None) -> Axes:
    """Draw `dataflow`: layers from top to bottom, skips as arcs, bytes next to the edges."""
    import networkx
    from matplotlib import pyplot

    if len(sequence) > MOST_LAYERS_IN_A_PICTURE:
        raise ArgumentError(
            f"the model has {counted(len(sequence), 'layer')}, and a picture shows at most "
            f"{MOST_LAYERS_IN_A_PICTURE}; use to_frame() or travel_frame()"
        )
    if axes is None:
        _, axes = pyplot.subplots(figsize=(7, 1 + 0.45 * len(sequence)))
    graph = dataflow(sequence)
    places = {index: (0.0, -float(index)) for index in graph}
    networkx.draw_networkx_nodes(graph, places, node_size=60, ax=axes)
    names = {index: f"{index}  {name}" for index, name in graph.nodes(data="name")}
    for index, name in names.items():
        axes.text(-0.15, places[index][1], name, ha="right", va="center", fontsize=7)
    drawn: dict[tuple[int, int], int] = {}
    for first, last, edge in graph.edges(data=True):
        drawn[first, last] = drawn.get((first, last), 0) + edge["bytes"]
    for (first, last), size in drawn.items():
        bend = 0.0 if last == first + 1 else 0.5
        networkx.draw_networkx_edges(
            graph,
            places,
            edgelist=[(first, last)],
            connectionstyle=f"arc3,rad={bend}",
            node_size=60,
            arrowsize=7,
            ax=axes,
        )
        if size:
            reach = 0.08 + bend * (last - first) / 2 * 0.25
            axes.text(reach, -(first + last) / 2, f"{size:,} B", va="center", fontsize=6)
    axes.set_xlim(-3, 3)
    axes.set_axis_off()
    return axes
