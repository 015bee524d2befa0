"""The command `python -m ddp.bench`."""

from ddp.bench.measure import main

main()
