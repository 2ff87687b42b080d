"""PROTOCOL.md as a runnable suite against any drafter server; needs `protos` and nothing else."""
