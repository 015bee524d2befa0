"""The command `python -m zero.bench`."""

from zero.bench.rows import main

if __name__ == "__main__":
    main()
