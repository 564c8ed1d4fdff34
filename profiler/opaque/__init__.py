"""What is called as it is because it cannot be traced: modules, and functions with a backward pass of their own.

In: a module or a call. Out: one operation of the graph, with shapes, gradients and costs like any other.
Start with `call` (the operation), then `opaque_calls` (how it gets into a graph) and `custom_functions`.
"""
