"""``python -m masterless``: the command line."""

from masterless.cli import main

if __name__ == "__main__":
    main()
