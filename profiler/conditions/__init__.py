"""Branches on values: the branch that the sample takes is traced, and each micro-batch checks that it takes it too.

In: what the sample's own run reads of tensors. Out: the decisions of a trace, and checks in its graph.
Start with `asking` (during a trace), then `check` (during a step) and `sample_run` (where the answers come from).
"""
