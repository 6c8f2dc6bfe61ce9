"""The command line: one table of commands, the parser, and its error messages."""
