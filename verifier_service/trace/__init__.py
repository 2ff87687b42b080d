"""Traces: what every step did for a request, as files; how they are written, read and explained.

`tracer` belongs to the engine's thread, `writer` to one of its own; `reading`, `story` and
`drawing` serve `outrider explain` and need no torch.
"""
