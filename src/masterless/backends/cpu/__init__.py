"""The compiled CPU kernel: found, loaded, told what to do."""
