"""What a plan is, and what follows from it alone: all of the planner that the executor reads.

In: the values of a plan, or its JSON. Out: its actions in order, their simulated times, report and pictures.
Start with `plan_fields` and `stage` (the values), then `schedules` (which orders there are), `actions` (written out).
"""
