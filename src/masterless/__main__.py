"""``python -m masterless``: the command line."""

from masterless.lab.cli import main

if __name__ == "__main__":
    main()
