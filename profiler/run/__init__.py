"""Running layers for real: what profiler and executor share, so that what is measured is what trains.

In: layers, tensors in place of their parameters, a micro-batch. Out: outputs, and a backward pass.
Start with `stage_function` (a run of layers as one differentiable function).
"""
