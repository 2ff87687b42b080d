"""The `draft_model` drafter: any small causal language model with the target's vocabulary."""
