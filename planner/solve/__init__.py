"""From a problem to a plan: which candidates there are, in which order they are searched, and what comes of it.

In: a profile, devices, a link and settings, as one `Problem`. Out: a `Plan`, with how far from the optimum it may be.
Start with `problem`, then `balancer`; `tables` is the bridge to the compiled search, `build_plan` the way back.
"""
