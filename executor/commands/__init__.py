"""In: the words of a command line. Out: text on stdout, files, and an exit code.

Each file is one command or a few that belong together, and `executor.command` is the group. Start with planning.
"""
