"""The application on top of the library: demonstration models, training, plans, benchmarks, the command line."""
