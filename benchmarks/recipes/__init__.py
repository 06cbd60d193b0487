"""Which recipes hold where people train: twenty and more tokens a parameter, learning rate swept, noise known.

    python -m benchmarks.recipes run                 # run what is missing, in order of importance; kill it at any time
    python -m benchmarks.recipes status              # what is done, what is left, how long it will take
    python -m benchmarks.recipes table [--json]      # gaps to the best fp32 AdamW, paired by seed, with their errors

It reads top to bottom: `recipe` (what a run is, and its key), `texts`, `trainer` (one run), `store` (rows on disk),
`plan` (which runs are missing), `groups` (the recipes), `workers`, `analysis`, `figure`.

The library is used through its public interface only (`import masterless as ml`), so that rows of an older library
and of a newer one can be told apart and compared: see `recipe.SPEC`.
"""
