"""In: the words of a command line. Out: text on stdout, files, and an exit code.

Each file is one command or a few that belong together; start with `planning`. The group is in `executor.command`.
"""
