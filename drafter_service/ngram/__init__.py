"""The `ngram` drafter: chains and small trees by prompt look-up."""

from drafter_service.ngram.drafter import Ngram

__all__ = ["Ngram"]
