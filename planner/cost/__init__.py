"""What stages cost: seconds and bytes of layers, stages, messages and skips.

In: a profile. Out: arrays over layers and over all ranges of layers, at any micro-batch size between measured ones.
Start with `layer_costs` (what a layer costs), then `ledger` (what a stage holds) and `time_ledger` (what it takes).
"""
