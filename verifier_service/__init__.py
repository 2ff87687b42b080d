"""The verifier: runs the target, owns all committed state, decides every token.

Imports protos and torch; knows neither drafter_service nor cluster.
"""
