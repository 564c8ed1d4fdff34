"""Nothing hangs and nobody trains on other data: ranks watch each other, and all end with the first cause.

In: what each rank is at and was given. Out: one error for all, with rank, cause and what to do.
Start with `watch` (the thread), then `accusation` (who is to blame) and `failure` (how it travels).
"""
