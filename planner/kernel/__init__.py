"""The compiled search: dynamic programs over layer positions, in arrays and numbers alone.

In: `Tables` of one schedule, R and M. Out: cuts, devices and segments, and what no plan takes less than.
Start with `makespan` (what a step takes), then `candidate_stages` (the arcs), then `search` (the best path).
"""
