"""What stages cost: seconds and bytes of layers, stages, messages and skips.

In: a profile. Out: arrays over layers and over all ranges of layers, at any micro-batch size between measured ones.
Start with `layer_costs` (what a layer costs), then `stage_memory` (what a stage holds at its peak).
"""
