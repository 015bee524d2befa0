"""Entry point of `python -m flashattn2.bench`."""

from flashattn2.bench import main

main()
