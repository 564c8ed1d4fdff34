"""How processes find each other: addresses, greetings, and a connection between every two of them.

In: rank, world size and master address. Out: a mesh that carries short messages.
Start with `mesh`, then `door` (who comes in) and `listening` (where).
"""
