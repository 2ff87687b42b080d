"""Checkpoints written in the layouts that other engines read; never part of serving."""
