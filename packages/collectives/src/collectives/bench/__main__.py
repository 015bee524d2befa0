"""python -m collectives.bench."""

from collectives.bench.rows import main

if __name__ == "__main__":
    main()
