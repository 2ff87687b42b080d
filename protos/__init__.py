"""What verifier, drafters and cluster agree on: the wire contract and the values it carries.

Knows nothing of models, engines or Ray. PROTOCOL.md states the contract in prose.
"""
