"""The bytes of layers and of stages, seen on fake tensors: nothing is computed.

In: a `LayerSequence` and micro-batch sizes. Out: what each layer keeps and needs, alone and as a part of any stage.
Start with `one_layer`, then `in_stage` (any stage's bytes from its layers'), then `by_size`.
"""
