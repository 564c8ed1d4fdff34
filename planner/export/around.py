"""What a model does around the modules that an engine puts on stages: operations and hooks of its own.

def forward(self, x):
    x = self.embed(x * 2)          # the product is of no unit,
    for block in self.blocks:
        x = block(x)
    return self.head(x)            # and so is what a hook of the model does with this
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from planner.export.target import Request
from planner.export.units import owners
from profiler.observe.source_place import own_forward
from profiler.torch_private import has_forward_hooks
from profiler.tracing.sites import Site

_MOST_NAMED = 3


def operations_around(request: Request) -> list[Site]:
    """Operations on tensors that come from no unit, or not from units alone; those on inputs alone at the end."""
    units, sequence = {*request.all_units}, request.sequence
    found = [
        site for site in sequence.sites() if site.reads and not all(owners([path], units) for path in site.module_paths)
    ]
    return sorted(found, key=lambda site: site.name in sequence.prelude_names)


def hooks_around(request: Request) -> list[str]:
    """The modules around units that have hooks on their forward pass, for a message."""
    units = {*request.all_units}
    hooked = [
        path
        for path, module in request.model.named_modules()
        if has_forward_hooks(module) and own_forward(module) is not nn.Module.forward and not owners([path], units)
    ]
    return [repr(path) if path else "the model itself" for path in hooked]


def lines_text(sites: Iterable[Site]) -> str:
    """Lines of operations, with the first of each: `model.py:12 (aten.mul.Tensor), model.py:14 (...) and 2 more`."""
    first: dict[str, str] = {}
    for site in sites:
        text = f"{site.source} ({site.operation})" if site.source else site.operation
        first.setdefault(site.source or site.operation, text)
    more = len(first) - _MOST_NAMED
    return f"{', '.join([*first.values()][:_MOST_NAMED])}{f' and {more} more' if more > 0 else ''}"
