"""From a model and a sample to a `LayerSequence`.

In: any module and a sample. Out: layers in order, each a pure function with what it reads and returns; or a refusal.
Start with `tracing` (all steps), then `front_ends` (to a graph), `cuts` (where) and `build_layer`.
"""
