"""`python -m tinyml.bench`."""

from tinyml.bench import main

main()
