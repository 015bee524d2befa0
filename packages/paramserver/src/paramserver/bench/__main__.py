"""Entry point of `python -m paramserver.bench`."""

from paramserver.bench.rows import main

if __name__ == "__main__":
    main()
