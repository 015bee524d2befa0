"""`python -m llmsys_suite` is `llmsys`, for launchers that take a module."""

from llmsys_suite.cli import main

main()
