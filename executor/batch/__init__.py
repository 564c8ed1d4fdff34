"""What a call of a pipeline is given: arguments, shapes, micro-batches, and who has the data.

In: `pipe.step(x, target=y)` as it was called. Out: a program to run and its tensors, on the ranks that read them.
Start with `calls`, then `feed` (data that rank 0 alone has).
"""
