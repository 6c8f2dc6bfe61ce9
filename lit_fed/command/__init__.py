"""The command line: one table of commands, the parser, and what it says when something is wrong."""
