"""One thread that steps: requests, pages, scheduling, drafts, commits."""
