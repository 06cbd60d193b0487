"""The commands of the command line, one file each; every heavy import is inside the function that needs it."""
