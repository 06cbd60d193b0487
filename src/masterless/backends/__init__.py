"""Who performs steps: each backend is a folder that registers itself with `masterless.step.dispatch`."""
