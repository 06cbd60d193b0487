"""How fast the step is: ratios to torch's fused full-precision step, in one run.

A file imports only what stands above it:

    processors.py    what the processor is, by name and generation
    tensor_sizes.py  tensor shapes of real models
    footprint.py     the bytes that an optimizer really holds, and what it silently keeps in full precision
    entries.py       what is measured: torch's optimizers and ours
    parity.py        kernel against reference: without it no speed-up is printed
    step_time.py     the step: interleaved, minimum of repeats
    forward.py       decoding a layer's weight, and the products that need it
    end_to_end.py    a whole training step of a small GPT, every preset
    growth.py        time and extra memory of a step from 1M to 500M parameters
    report.py        tables and plots of all that

Other libraries are measured by ``benchmarks/bench.py``, which adds them as guests.
"""
