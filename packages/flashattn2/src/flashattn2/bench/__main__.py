"""Entry point of `python -m flashattn2.bench`."""

from flashattn2.bench.report import main

main()
