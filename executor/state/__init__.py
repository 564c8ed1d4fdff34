"""What processes hold of a model, and what they do with it together at the end of a step.

In: a model and the layout of stages. Out: its parameters and buffers where they are used, and equal everywhere.
Start with `placement` (who holds what), then `tied`, `replicas` and `shared_state`;
`pieces` is how much of it travels at a time.
"""
