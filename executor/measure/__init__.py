"""What a step really took, compared with what the plan predicted.

In: the times of actions in every process. Out: one table and one timeline of all.
Start with `measured`.
"""
