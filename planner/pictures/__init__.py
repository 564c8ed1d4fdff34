"""Pictures of plans and of choices between them.

In: a plan, a measured step, a profile, or a frame of `what_if`. Out: matplotlib's Axes, given or new.
Start with timeline.
"""
