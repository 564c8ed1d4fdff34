"""Watching code while it runs: which operations, which bytes, which state of Python, where in the source.

In: a call. Out: what it did, with the call unchanged. Nothing here knows layers or graphs.
Start with `storage_watch` (bytes of tensors); each other file watches one other thing.
"""
