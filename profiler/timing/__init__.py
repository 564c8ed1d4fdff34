"""The seconds of layers, optimizers and collectives: measured, or counted from data sheets.

In: a `LayerSequence` and a kind of device. Out: seconds per layer and pass.
Start with `sweeps` (measured, each layer where it stands) or `roofline` (without the hardware).
"""
