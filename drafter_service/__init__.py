"""The drafter: guesses the next tokens of many sessions as chains or trees.

Knows `protos` and nothing of verifiers, Ray or HTTP. DESIGN.md says how the parts fit together.
"""
