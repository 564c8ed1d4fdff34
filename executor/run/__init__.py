"""A step: the actions of a process carried out one after the other, and the messages between stages.

In: a program and the micro-batches of a call. Out: loss, outputs, and gradients in the model's own parameters.
Start with `runtime` (the loop), then `stage_runner` (one stage) and `transport` (messages;
`transports` says which there are).
"""
