"""One command of the program a file: ``add_arguments(parser)`` and ``run(args) -> exit status``."""
