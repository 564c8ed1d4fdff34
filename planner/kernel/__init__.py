"""The compiled search: dynamic programs over layer positions, in arrays and numbers alone.

In: `Tables` of one schedule, R and M. Out: cuts, devices and segments, and what no plan takes less than.
Start with `makespan` (what a step takes), then `candidate_stages` (the arcs), `rear` (a part of a plan in numbers) and
`search` (the best path); `segments` says what a stage recomputes.
"""
