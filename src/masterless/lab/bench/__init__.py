"""How fast the step is: ratios to torch's fused full-precision step, and to other libraries, in one run.

A file imports only what stands above it:

    shapes.py     tensor shapes of real models
    footprint.py  the bytes that an optimizer really holds, and what it silently keeps in full precision
    entries.py    what is measured: torch's optimizers and ours
    peers.py      other libraries' optimizers, where they install and run
    parity.py     kernel against reference: without it no speed-up is printed
    measure.py    the step: interleaved, minimum of repeats
    forward.py    decoding a layer's weight, and the products that need it
    growth.py     time and extra memory of a step from 1M to 500M parameters
    report.py     tables and plots of all that
"""
