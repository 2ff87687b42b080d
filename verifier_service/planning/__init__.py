"""What to draft next: acceptance evidence, measured costs, the plan."""
