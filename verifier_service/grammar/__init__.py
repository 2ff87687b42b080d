"""Texts of a given form: grammars compiled against a target's vocabulary, and where a text stands.

The one place that knows llguidance, which is imported when the first grammar is compiled.
"""
