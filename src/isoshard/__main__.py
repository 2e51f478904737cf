"""`python -m isoshard` is the `isoshard` command."""

from isoshard.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
