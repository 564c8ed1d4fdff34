"""Values that need not travel: what depends on the model's inputs and constant buffers alone.

Masks, position ids and rotary tables are cheap to compute and would otherwise cross every boundary; batch extents
are numbers that no transport carries. Every stage computes those that it reads, from the inputs that it has anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx, nn

from profiler.conditions.check import Check
from profiler.torch_private import HigherOrderOperator
from profiler.tracing.node_facts import NodeFacts
from profiler.tracing.node_text import attribute

# A value is recomputed where it is needed if that takes fewer FLOPs than this per byte that would be sent.
# Compute outruns a link between devices by far more (H100: 67 TFLOP/s in float32 against 0.45 TB/s of NVLink, 150).
FLOPS_PER_BYTE_AT_MOST = 16


def prelude_nodes(
    graph: fx.Graph, facts: Mapping[fx.Node, NodeFacts], not_everywhere: Collection[str] = ()
) -> set[fx.Node]:
    """The operations whose values every stage computes for itself.

    They read only inputs, buffers that nothing writes, and each other; draw no random numbers; carry no gradient;
    touch no storage that something writes in place; and are cheap for their size.

    Args:
        graph: of the model.
        facts: of its nodes.
        not_everywhere: names of buffers that only some stages have.
    """
    written = frozenset().union(*(fact.writes for fact in facts.values()))
    chosen: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        fact = facts[node]
        plain = not isinstance(node.target, HigherOrderOperator | Check)
        cheap = fact.flops <= FLOPS_PER_BYTE_AT_MOST * max(fact.value_bytes, 1)
        own = not fact.writes and fact.storage not in written and not fact.draws_random and not fact.requires_grad
        if (
            plain
            and cheap
            and own
            and all(_available(source, facts, written, chosen, not_everywhere) for source in node.all_input_nodes)
        ):
            chosen.add(node)
    return chosen


def _available(
    source: fx.Node,
    facts: Mapping[fx.Node, NodeFacts],
    written: frozenset[int],
    chosen: set[fx.Node],
    not_everywhere: Collection[str],
) -> bool:
    """Whether every stage can have the value: an input, a constant buffer, or another prelude value.

    A frozen parameter is none of these: it lives on the stages whose layers read it.
    """
    root = source.graph.owning_module
    assert root is not None, "the graph is the one that the model was traced to"
    if source.op == "get_attr":
        name = str(source.target)
        if name in not_everywhere or isinstance(attribute(root, name), nn.Parameter):
            return False
    if source.op in ("placeholder", "get_attr"):
        return not facts[source].requires_grad and facts[source].storage not in written
    return source in chosen
