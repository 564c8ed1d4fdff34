"""Plans for other engines: what a plan becomes there, what that costs, or why it cannot be.

In: a plan, its model, and the name of a target. Out: an `Export`: values for the engine, text to paste, files, and what
moved. Start with `export` (the registry, one row a target) and `target` (what a row says of an engine).
"""
