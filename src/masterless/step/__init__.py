"""The step of one parameter: the rules' mathematics, the oracle in plain torch, and who performs it."""
