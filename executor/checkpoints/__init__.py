"""The files of checkpoints: written whole or not at all, checked before they are loaded, owned by one run.

In: a folder. Out: the checkpoints in it, their tensors and training state; no file runs code.
Start with `executor.checkpoint`, the public face above; here with `writing` and `reading`, then with `folder`.
"""
