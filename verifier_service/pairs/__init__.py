"""Pairs are tested, not drafters: does this drafter guess what this target says? (design 7)"""
