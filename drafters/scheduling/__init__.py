"""When to draft, and how many drafts to verify: calibrated confidence, measured costs, schedulers, a simulator."""
